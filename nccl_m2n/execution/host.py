# SPDX-License-Identifier: Apache-2.0
"""Running programs in host memory: every copy is a NumPy assignment prepared beforehand."""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from nccl_m2n.dtypes import cast_name
from nccl_m2n.errors import TransportError
from nccl_m2n.execution.bound import DEFAULT_TIMEOUT
from nccl_m2n.execution.delta.changes import Changes
from nccl_m2n.execution.descriptors import COPY, Mask
from nccl_m2n.execution.lower import ArrayTable, Lowered, Task, Wire, arrange, lower
from nccl_m2n.execution.memory import bytes_at, numpy_type
from nccl_m2n.execution.staging import Staging
from nccl_m2n.planning.program import Program
from nccl_m2n.transport.base import Message, PreparedRound, Transport
from nccl_m2n.typing import Stream, Table

Elements: TypeAlias = npt.NDArray[np.generic]
_UNIT_TYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


class HostExecutor:
    """The programs of this process's ranks, bound to host arrays.

    While the messages of a round are under way, those of the round before are unpacked and those of the
    next are packed.

    Args:
        transport: Moves the messages.
        tasks: For each local rank its program and its arrays.
        wire: What elements are on the wire.
        staging: Where to take staging from.
    """

    def __init__(
        self,
        transport: Transport,
        tasks: Mapping[int, Task],
        wire: Wire,
        staging: Staging,
    ) -> None:
        self.baseline_bytes = 0
        self.changes: Changes | None = None
        self.staging_bytes = 0
        self._staging: Staging | None = staging
        self._rounds: list[PreparedRound] = []
        self._copies: list[list[tuple[Elements, Elements]]] = []
        self._moves: list[list[tuple[int, int, int]]] = []
        self._transport = transport
        self._pending = False
        self._round = self._launched = 0  # of the run: the round under way, how many launches were made
        made = {rank: self._lower(self._staging, rank, *task, wire) for rank, task in tasks.items()}
        count = max((program.rounds for program, _, _ in tasks.values()), default=0)
        for launch in range(count + 2):
            self._copies.append([pair for low in made.values() for pair in launch_copies(low, launch)])
            self._moves.append([move for low in made.values() for move in launch_moves(low, launch)])
        by_round: list[list[Message]] = [[] for _ in range(count)]
        for rank, (program, _, _) in tasks.items():
            address, size = made[rank].address, program.chunks["bytes"]
            for at, peer, send, chunk in program.messages.tolist():
                buffer = bytes_at(int(address[chunk]), int(size[chunk]))
                by_round[at].append(Message(rank, peer, send, buffer))
        self._rounds = [transport.prepare(messages) for messages in by_round]

    def _lower(
        self,
        staging: Staging,
        rank: int,
        program: Program,
        sources: ArrayTable,
        destinations: ArrayTable,
        wire: Wire,
    ) -> Lowered:
        arranged = arrange(program, sources, destinations, wire, alignment=1)
        self.staging_bytes += arranged.staging_bytes
        send = staging.take(rank, arranged.staging_bytes)
        receive = send + 2 * arranged.send_half_bytes
        return lower(program, arranged, sources, destinations, send, receive)

    @property
    def busy(self) -> bool:
        """Whether a started run has not been finished."""
        return self._pending

    def forget(self, ranks: Collection[int] | None) -> None:
        """Nothing: every run sends everything."""

    def connect(self) -> None:
        """Nothing: host transports are connected when they are made."""

    def capture(self) -> None:
        """Nothing: everything is prepared already."""

    def start(self, stream: Stream = None) -> None:
        """End the last run, pack the first round and start its messages; `finish` does the rest."""
        self.finish(time.monotonic() + DEFAULT_TIMEOUT)
        self._pending, self._round, self._launched = True, 0, 0
        self._launch_up_to(0)
        if self._rounds:
            self._rounds[0].start()
        self._transport.under_way.append(self)

    def finish(self, deadline: float | None) -> None:
        """Drive the started run to its end."""
        if self in self._transport.under_way:  # this one is moved on here
            self._transport.under_way.remove(self)
        while self._pending:
            self._launch_up_to(self._round + 1)
            if self._round < len(self._rounds):
                self._rounds[self._round].finish(deadline)
            self._next_round()

    def move_on(self) -> None:
        """Drive the started run as far as it goes without waiting."""
        while self._pending:
            self._launch_up_to(self._round + 1)
            if self._round < len(self._rounds) and not self._rounds[self._round].done():
                return
            self._next_round()
        self._transport.under_way.remove(self)

    def _next_round(self) -> None:
        self._round += 1
        if self._round < len(self._rounds):
            self._rounds[self._round].start()
        else:
            self._launch_up_to(len(self._copies) - 1)
            self._pending = False

    def _launch_up_to(self, launch: int) -> None:
        while self._launched <= launch:
            self._launch(self._launched)
            self._launched += 1

    def _launch(self, launch: int) -> None:
        for destination, source, nbytes in self._moves[launch]:
            ctypes.memmove(destination, source, nbytes)
        if self._copies[launch]:
            with np.errstate(
                over="ignore", invalid="ignore"
            ):  # casts may overflow; a warning must not raise here
                for to, array in self._copies[launch]:
                    np.copyto(to, array, casting="unsafe")

    def close(self) -> None:
        """Release requests and staging."""
        if self._pending:
            raise TransportError(
                "expected the run to be over before its program is closed; call wait() first"
            )
        for each in self._rounds:
            each.close()
        self._rounds, self._copies, self._staging = [], [], None


def launch_moves(low: Lowered, launch: int) -> list[tuple[int, int, int]]:
    """(destination, source, bytes) of those of one launch's copies that are contiguous on both sides."""
    copies = _rows(low, launch)
    copies = copies[_contiguous(copies)]
    unit, first = copies["source_unit"], copies["start"]
    columns = (copies["destination"] + first * unit, copies["source"] + first * unit)
    return list(zip(*(c.tolist() for c in (*columns, (copies["stop"] - first) * unit)), strict=True))


def _rows(low: Lowered, launch: int) -> Table:
    bounds = low.launches.bounds
    return low.launches.copies[bounds[launch] : bounds[launch + 1]]


def _contiguous(copies: Table) -> Mask:
    contiguous: Mask = (copies["cast"] == 0) & (copies["extent"] == 1).all(axis=1)
    return contiguous


def launch_copies(low: Lowered, launch: int) -> list[tuple[Elements, Elements]]:
    """(destination, source) views of the others."""
    pairs = []
    copies = _rows(low, launch)
    copies = copies[~_contiguous(copies)]
    for at, to, start, stop, run, unit, other_unit, cast, *shape in zip(
        *(copies[name].tolist() for name in COPY.names or ()), strict=True
    ):
        # Outermost dimension first, the run last, and none of extent 1.
        dims = [*zip(*(column[::-1] for column in shape), strict=True), (run, unit, other_unit)]
        dims = [d for d in dims if d[0] != 1]
        extent, strides, other_strides = zip(*dims, strict=True) if dims else ((), (), ())
        kind, other_kind = _types(cast, unit, other_unit)
        source = strided(at, extent, strides, kind)
        destination = strided(to, extent, other_strides, other_kind)
        if stop - start == source.size:
            pairs.append((destination, source))
            continue
        for index in boxes_of_range(extent, start, stop):
            pairs.append((destination[index].squeeze(), source[index].squeeze()))
    return pairs


def _types(
    cast: int, source_unit: int, destination_unit: int
) -> tuple[np.dtype[np.generic], np.dtype[np.generic]]:
    if not cast:
        return np.dtype(_UNIT_TYPES[source_unit]), np.dtype(_UNIT_TYPES[destination_unit])
    return numpy_type(cast_name(cast // 16)), numpy_type(cast_name(cast % 16))


def strided(
    address: int, extent: Sequence[int], strides: Sequence[int], kind: np.dtype[np.generic]
) -> Elements:
    """An array of a shape at an address, with strides in bytes."""
    reach = [(n - 1) * s for n, s in zip(extent, strides, strict=True)]
    low = sum(r for r in reach if r < 0)
    size = sum(map(abs, reach)) + kind.itemsize
    return np.ndarray(tuple(extent), kind, bytes_at(address + low, size), -low, tuple(strides))


def boxes_of_range(extent: Sequence[int], start: int, stop: int) -> list[tuple[slice, ...]]:
    """Rectangles that make up elements ``start … stop`` of a row-major box, in their order.

    Example:
        >>> from nccl_m2n.execution.host import boxes_of_range
        >>> boxes_of_range((3, 4), 2, 9)
        [(slice(0, 1, None), slice(2, 4, None)),
         (slice(1, 2, None), slice(0, 4, None)),
         (slice(2, 3, None), slice(0, 1, None))]
    """
    if start >= stop:
        return []
    inner = math.prod(extent[1:])
    if len(extent) == 1:
        return [(slice(start, stop),)]
    first, last = -(-start // inner), stop // inner
    whole = tuple(slice(0, n) for n in extent[1:])
    if first > last:
        row = start // inner
        return _in_row(row, boxes_of_range(extent[1:], start - row * inner, stop - row * inner))
    head = boxes_of_range(extent[1:], start - (first - 1) * inner, inner) if start < first * inner else []
    tail = boxes_of_range(extent[1:], 0, stop - last * inner) if stop > last * inner else []
    body = [(slice(first, last), *whole)] if first < last else []
    return _in_row(first - 1, head) + body + _in_row(last, tail)


def _in_row(row: int, boxes: Sequence[tuple[slice, ...]]) -> list[tuple[slice, ...]]:
    return [(slice(row, row + 1), *box) for box in boxes]
