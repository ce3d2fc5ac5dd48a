# SPDX-License-Identifier: Apache-2.0
"""The kernels that compare, compact and write into place what changed, and their tables in device memory."""

from __future__ import annotations

from functools import lru_cache
from importlib.resources import files

import numpy as np

from nccl_m2n.execution.lower import ArrayTable, Wire
from nccl_m2n.layout.intervals import offsets
from nccl_m2n.planning.delta_sizes import TILE
from nccl_m2n.planning.program import Program
from nccl_m2n.transport.gpu import import_cupy
from nccl_m2n.typing import Array, Bools, Ints, Stream

THREADS = 256  # also in delta.cu


@lru_cache(maxsize=64)
def delta_kernels(device: int) -> Array:
    """The compiled module of one device."""
    cupy = import_cupy()
    folder = files("nccl_m2n.execution")
    source = "\n".join((folder / name).read_text() for name in ("copy_parts.cu", "delta/delta.cu"))
    with cupy.cuda.Device(device):
        module = cupy.RawModule(code=source, options=("--std=c++17",))
        names = ("count_changed", "sum_counts", "encode_changed", "apply_changed")
        return {name: module.get_function(name) for name in names}


class OutgoingTables:
    """What the kernels know of the chunks that a rank packs.

    Args:
        device: The rank's GPU.
        packed: (chunks,) address where each chunk is packed.
        baseline: (chunks,) address of what was sent last.
        units: (chunks,) how many units each has.
        unit: (chunks,) bytes of a unit.
        number: (chunks,) its number among all chunks of the rank.
        bounds: (rounds + 1,) the rows of each round.
    """

    def __init__(
        self, device: int, packed: Ints, baseline: Ints, units: Ints, unit: Ints, number: Ints, bounds: Ints
    ) -> None:
        cupy = import_cupy()
        tiles = -(-units // TILE)
        first = offsets(tiles)
        rows = np.stack([packed, baseline, units, unit, first, number], axis=1).astype(np.int64)
        self._bounds, self._kernels, self._device = bounds.tolist(), delta_kernels(device), device
        after = np.append(first, tiles.sum())[bounds]
        self._tiles, self._base = np.diff(after).tolist(), after.tolist()
        self.count = len(rows)
        with cupy.cuda.Device(device):
            stream = cupy.cuda.Stream(non_blocking=True)
            with stream:
                self._rows = cupy.asarray(rows)
                self._counts = cupy.zeros(max(1, int(tiles.sum())), np.uint32)
                self._fresh = cupy.ones(max(1, self.count), np.uint8)
            stream.synchronize()

    def _in_round(self, x: int) -> tuple[Array, np.int32, np.int64]:
        return (
            self._rows[self._bounds[x] :].data.ptr if self._tiles[x] else 0,
            np.int32(self._bounds[x + 1] - self._bounds[x]),
            np.int64(self._base[x]),
        )

    def count_changed(self, x: int, stream: Stream) -> None:
        """Count the changed units of each tile that is packed in a round."""
        self._launch("count_changed", self._tiles[x], (*self._in_round(x), self._counts), stream)

    def sum_counts(self, entries: Array, stream: Stream) -> None:
        """Sum the counts by chunk into `entries`, a (chunks,) array of uint32."""
        self._launch("sum_counts", self.count, (self._rows, self._fresh, self._counts, entries), stream)

    def encode(self, x: int, travels: Array, stream: Stream) -> None:
        """Write what is packed in a round as it travels, and keep it."""
        arguments = (*self._in_round(x), self._counts, travels)
        self._launch("encode_changed", self._tiles[x], arguments, stream)

    def mark(self, fresh: Bools | None, stream: Stream) -> None:
        """Say of which chunks the destinations' state is not known: of none, or of those where `fresh` is not 0."""
        with import_cupy().cuda.Device(self._device), stream:
            if fresh is None:
                self._fresh.fill(0)
            else:
                self._fresh[: self.count] = import_cupy().asarray(fresh.astype(np.uint8))

    def _launch(self, name: str, blocks: int, arguments: tuple[Array, ...], stream: Stream) -> None:
        if blocks:
            import_cupy().cuda.runtime.setDevice(self._device)
            self._kernels[name]((blocks,), (THREADS,), arguments, stream=stream)


class ArrivalTables:
    """Where every byte of the chunks that a rank receives belongs.

    Args:
        device: The rank's GPU.
        program: What the rank does.
        destinations: Its destination arrays.
        wire: What elements are on the wire.
        unit: (chunks,) bytes of a unit of each of the rank's chunks.
    """

    def __init__(
        self, device: int, program: Program, destinations: ArrayTable, wire: Wire, unit: Ints
    ) -> None:
        self._kernels, self._device = delta_kernels(device), device
        spans, first, stop = sorted_spans(program)
        self._program, self._unit, self._first, self._stop = program, unit, first, stop
        self._tangled = tangled(spans, first, stop)
        targets, shapes = target_tables(program, destinations, wire)
        cupy = import_cupy()
        with cupy.cuda.Device(device):
            stream = cupy.cuda.Stream(non_blocking=True)
            with stream:
                self._spans, self._targets, self._shapes = map(cupy.asarray, (spans, targets, shapes))
            stream.synchronize()

    def rows(self, chunks: Ints) -> tuple[Ints, int]:
        """The table of some chunks, and their tiles."""
        units = self._program.chunks["bytes"][chunks] // self._unit[chunks]
        tiles = -(-units // TILE)
        columns = (chunks, units, self._unit[chunks], offsets(tiles))
        spans = (self._first[chunks], self._stop[chunks], self._tangled[chunks])
        return np.stack([*columns, *spans], axis=1).astype(np.int64), int(tiles.sum())

    def apply(self, rows: Array, count: int, tiles: int, travels: Array, stream: Stream) -> None:
        """Write some chunks into place; `rows` are in device memory."""
        if tiles:
            import_cupy().cuda.runtime.setDevice(self._device)
            tables = (travels, self._spans, self._targets, self._shapes)
            self._kernels["apply_changed"](
                (tiles,), (THREADS,), (rows, np.int32(count), *tables), stream=stream
            )


def sorted_spans(program: Program) -> tuple[Ints, Ints, Ints]:
    """Rows of (offset, stop, start, cell) of the received chunks' spans by chunk and offset, and each chunk's rows."""
    received = program.chunks["received"][program.spans["chunk"]]
    spans = program.spans[received]
    spans = spans[np.lexsort((spans["offset"], spans["chunk"]))]
    length = spans["stop"] - spans["start"]
    rows = np.stack([spans["offset"], spans["offset"] + length, spans["start"], spans["cell"]], axis=1)
    every = np.arange(len(program.chunks))
    first, stop = (np.searchsorted(spans["chunk"], every, side=side) for side in ("left", "right"))
    return rows.astype(np.int64), first, stop


def tangled(spans: Ints, first: Ints, stop: Ints) -> Ints:
    """Whether spans of a chunk overlap: a byte then has several places, and each span must be looked at."""
    found = np.zeros(len(first), np.int64)
    if len(spans) > 1:
        meets = np.append(False, spans[1:, 0] < spans[:-1, 1])
        before = np.append(0, np.cumsum(meets))
        inner = np.minimum(first + 1, stop)  # the first span of a chunk has none before it
        found = (before[stop] > before[inner]).astype(np.int64)
    return found


def target_tables(program: Program, destinations: ArrayTable, wire: Wire) -> tuple[Ints, Ints]:
    """Rows of (address, shape) of the destination cells, and the shapes: item, cast, extents, strides."""
    cells = program.destination_cells
    boxes = destinations.boxes(cells)
    number = cells["transfer"]
    formats = wire.format[number], destinations.format[number]
    cast = np.where(formats[0] == formats[1], 0, formats[0] * 16 + formats[1])
    wide = np.column_stack([wire.item[number], cast, boxes.extent, boxes.stride]).astype(np.int64)
    if not len(wide):
        return np.zeros((0, 2), np.int64), wide
    shapes, inverse = np.unique(wide, axis=0, return_inverse=True)
    return np.column_stack([boxes.address, inverse.reshape(-1)]).astype(np.int64), shapes
