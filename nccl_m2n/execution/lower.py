# SPDX-License-Identifier: Apache-2.0
"""One rank's program and its arrays' addresses, turned into what a device runs: addresses and copy tables.

    Program ──arrange──▶ Arrangement ──lower──▶ Lowered
              which chunks need no staging    addresses of all chunks, one copy table a launch

Launch 0 packs what round 0 sends; launch x + 1 runs while round x is on the wire: it unpacks what round
x - 1 brought and packs what round x + 1 sends. Both kinds of staging have two halves, used by odd and even
rounds, and those two suffice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from nccl_m2n.execution.descriptors import (
    COPY,
    DIMENSIONS,
    Boxes,
    Mask,
    join,
    packed_boxes,
    tiles,
    trim,
    widen,
)
from nccl_m2n.execution.views import ArrayView
from nccl_m2n.planning.program import Program
from nccl_m2n.typing import Ints, Table

HALF_ALIGNMENT = 256  # bytes


_PAD_EXTENT = [(1,) * (DIMENSIONS - n) for n in range(DIMENSIONS + 1)]
_PAD_STRIDE = [(0,) * (DIMENSIONS - n) for n in range(DIMENSIONS + 1)]


@dataclass(frozen=True)
class ArrayTable:
    """One side's arrays at one rank, one row a transfer; a row without an array has no elements."""

    address: Ints  # (transfers,)
    extent: Ints  # (transfers, DIMENSIONS) elements, padded on the left with 1; 0 where there is no array
    stride: Ints  # (transfers, DIMENSIONS) bytes, padded on the left with 0
    item: Ints  # (transfers,) bytes
    format: Ints  # (transfers,)

    @classmethod
    def of(cls, views: Mapping[int, ArrayView], items: Ints, formats: Ints) -> ArrayTable:
        """The table of some array views.

        Args:
            views: By number of the transfer.
            items: Bytes of an element, for each transfer.
            formats: Number of the element's format, for each transfer.
        """
        address = np.zeros(len(items), np.int64)
        extent, stride = (np.zeros((len(items), DIMENSIONS), np.int64) for _ in range(2))
        if views:
            rows = np.fromiter(views, np.int64, len(views))
            address[rows] = [view.pointer for view in views.values()]
            extent[rows] = [_PAD_EXTENT[len(v.shape)] + v.shape for v in views.values()]
            stride[rows] = [_PAD_STRIDE[len(v.strides)] + v.strides for v in views.values()]
        return cls(address, extent, stride, items, formats)

    def whole(self) -> Boxes:
        """All arrays, each as one box."""
        return Boxes(self.address, self.extent, self.stride, self.item, self.format)

    def boxes(self, cells: Table) -> Boxes:
        """Where the cells of a program lie in these arrays."""
        row = cells["transfer"]
        address = self.address[row] + (cells["offset"] * self.stride[row]).sum(axis=1)
        return Boxes(address, cells["extent"], self.stride[row], self.item[row], self.format[row])


Task: TypeAlias = tuple[
    Program, ArrayTable, ArrayTable
]  # what a rank does, its source and destination arrays


@dataclass(frozen=True)
class Wire:
    """What an element of each transfer is on the wire."""

    item: Ints  # (transfers,) bytes
    format: Ints  # (transfers,)

    def boxes(self, cells: Table) -> Boxes:
        """The cells as they are on the wire: packed, from address 0."""
        row = cells["transfer"]
        return packed_boxes(cells["extent"], self.item[row], self.format[row])


@dataclass(frozen=True)
class Arrangement:
    """Which chunks lie ready in the user's arrays, and the staging that the others need."""

    direct: Mask  # (chunks,)
    address: Ints  # (chunks,) in the user's arrays where direct, else 0
    send_half_bytes: int
    receive_half_bytes: int
    copies: Table  # `COPY`, one row a span: user's side in place, staging side relative to the chunk
    chunk: Ints  # (copies,) the chunk of each row

    @property
    def staging_bytes(self) -> int:
        """Bytes of two halves for sending, followed by two for receiving."""
        return 2 * (self.send_half_bytes + self.receive_half_bytes)


@dataclass(frozen=True)
class Launches:
    """Copy tables of all launches, one after the other."""

    copies: Table  # `COPY`
    first_tile: Ints  # (copies,) number of each copy's first tile within its launch
    bounds: Ints  # (launches + 1,) rows of each launch
    tiles: Ints  # (launches,)


@dataclass(frozen=True)
class Lowered:
    """What one rank's device runs."""

    address: Ints  # (chunks,) where the bytes of each chunk lie when they are sent or received
    launches: Launches


def arrange(
    program: Program, sources: ArrayTable, destinations: ArrayTable, wire: Wire, alignment: int = 16
) -> Arrangement:
    """Find the chunks whose bytes lie end to end in the user's arrays; only the others are staged.

    Args:
        program: What the rank does, see `Plan.program`.
        sources: The rank's source arrays.
        destinations: The rank's destination arrays.
        wire: Formats on the wire.
        alignment: Bytes that the address of a chunk must be a multiple of to go without staging; NCCL
            moves less aligned buffers slowly.
    """
    chunks, spans = program.chunks, program.spans
    received = chunks["received"].astype(bool)
    unpacked = received[spans["chunk"]]
    copies = np.zeros(len(spans), COPY)
    cells = program.source_cells
    copies[~unpacked] = join(sources.boxes(cells), wire.boxes(cells))[spans["cell"][~unpacked]]
    cells = program.destination_cells
    copies[unpacked] = join(wire.boxes(cells), destinations.boxes(cells))[spans["cell"][unpacked]]
    staged = np.where(unpacked, copies["source_unit"], copies["destination_unit"])
    shift = spans["offset"] - spans["start"]
    copies["source"] += np.where(unpacked, shift, 0)
    copies["destination"] += np.where(unpacked, 0, shift)
    copies["start"], copies["stop"] = spans["start"] // staged, spans["stop"] // staged
    copies, single = trim(copies)
    single &= copies["cast"] == 0
    user = np.where(unpacked, copies["destination"], copies["source"])
    direct, address = _direct_chunks(chunks, spans, single, user - spans["offset"], alignment)
    return Arrangement(
        direct=direct,
        address=address,
        send_half_bytes=_half_bytes(chunks[~direct & ~received]),
        receive_half_bytes=_half_bytes(chunks[~direct & received]),
        copies=copies,
        chunk=spans["chunk"].astype(np.int64),
    )


def _direct_chunks(
    chunks: Table, spans: Table, single: Mask, base: Ints, alignment: int
) -> tuple[Mask, Ints]:
    """Chunks all of whose spans give the same address for the chunk's first byte, and cover it."""
    direct = np.zeros(len(chunks), bool)
    address = np.zeros(len(chunks), np.int64)
    filled = np.flatnonzero(chunks["spans"] > 0)
    filled = filled[np.argsort(chunks["first_span"][filled], kind="stable")]
    if len(filled):
        first = chunks["first_span"][filled]
        low, high = np.minimum.reduceat(base, first), np.maximum.reduceat(base, first)
        covered = np.add.reduceat(spans["stop"] - spans["start"], first) == chunks["bytes"][filled]
        one_run = np.logical_and.reduceat(single, first)
        direct[filled] = one_run & covered & (low == high) & (low % alignment == 0)
        address[filled] = np.where(direct[filled], low, 0)
    return direct, address


def _half_bytes(staged: Table) -> int:
    end = int((staged["offset"] + staged["bytes"]).max(initial=0))
    return -(-end // HALF_ALIGNMENT) * HALF_ALIGNMENT


def lower(
    program: Program,
    arranged: Arrangement,
    sources: ArrayTable,
    destinations: ArrayTable,
    send_staging: int,
    receive_staging: int,
) -> Lowered:
    """Give every chunk its address and lay out the copies of every launch.

    Args:
        program: What the rank does.
        arranged: What `arrange` found for it.
        sources: The rank's source arrays.
        destinations: The rank's destination arrays.
        send_staging: Address of two halves of `arranged.send_half_bytes`.
        receive_staging: Address of two halves of `arranged.receive_half_bytes`.
    """
    chunks = program.chunks
    received = chunks["received"].astype(bool)
    half = chunks["round"] % 2
    base = np.where(
        received,
        receive_staging + half * arranged.receive_half_bytes,
        send_staging + half * arranged.send_half_bytes,
    )
    address = np.where(arranged.direct, arranged.address, base + chunks["offset"])
    copied = ~arranged.direct[arranged.chunk]
    copies, chunk = arranged.copies[copied], arranged.chunk[copied]
    unpacked = received[chunk]
    copies["source"] += np.where(unpacked, address[chunk], 0)
    copies["destination"] += np.where(unpacked, 0, address[chunk])
    launch = chunks["round"][chunk] + np.where(unpacked, 2, 0)
    local = local_copies(program, sources, destinations)
    spread = _spread(local, program.rounds)
    return Lowered(
        address,
        launches(np.concatenate([copies, local]), np.concatenate([launch, spread]), program.rounds + 2),
    )


def local_copies(program: Program, sources: ArrayTable, destinations: ArrayTable) -> Table:
    """Rows of `COPY` for what the rank has and needs itself."""
    local = program.local
    return join(
        sources.boxes(program.source_cells[local["source"]]),
        destinations.boxes(program.destination_cells[local["destination"]]),
    )


def _spread(local: Table, rounds: int) -> Ints:
    """Launches of the local copies: even bytes beside every round on the wire, so that none waits for them."""
    size = local["stop"] * local["source_unit"]
    before = np.cumsum(size) - size
    launch: Ints = np.minimum(1 + before * rounds // max(1, int(size.sum())), rounds + 1)
    return launch


def launches(copies: Table, launch: Ints, count: int) -> Launches:
    """Sort copies by launch and number the tiles of each launch.

    Args:
        copies: Rows of `COPY`, in elements.
        launch: Launch of each row.
        count: Number of launches.
    """
    copies, origin = widen(copies)
    order = np.argsort(launch[origin], kind="stable")
    copies, launch = copies[order], launch[origin][order]
    bounds = np.searchsorted(launch, np.arange(count + 1))
    after = np.concatenate([[0], np.cumsum(tiles(copies))])
    return Launches(
        copies=copies,
        first_tile=after[:-1] - after[bounds[launch]],
        bounds=bounds,
        tiles=np.diff(after[bounds]),
    )
