# SPDX-License-Identifier: Apache-2.0
"""Where cells lie in one rank's local arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nccl_m2n.layout.intervals import expand, offsets
from nccl_m2n.layout.shape import MAX_NDIM
from nccl_m2n.planning.bundles import Bundles, StreamCells, stream_cells
from nccl_m2n.typing import Ints, Table

# A box in the rank's local array of one transfer; scalars and low ranks are padded on the left.
CELL = np.dtype([("transfer", "i8"), ("extent", "i8", MAX_NDIM), ("offset", "i8", MAX_NDIM)])


def locate_cells(bundles: Bundles, stream: StreamCells, rank: int, side: str) -> tuple[Table, Ints]:
    """Where each cell lies in the rank's arrays, and how often."""
    order = np.argsort(stream.template, kind="stable")
    names, opens = np.unique(stream.template[order], return_index=True)
    rows, made = [np.zeros(0, np.int64)], [np.zeros(0, CELL)]
    for t, rows_of_template in zip(names.tolist(), np.split(order, opens[1:]), strict=False):
        template = bundles.templates[t]
        layout = template.source if side == "source" else template.destination
        used, which = np.unique(stream.cell[rows_of_template], return_inverse=True)
        box, local = layout.locate(rank, template.cells.start[used])
        if side == "source":  # one will do to read from
            box, first = np.unique(box, return_index=True)
            local = local[first]
        counts = np.bincount(box, minlength=len(used))
        row, k = expand(counts[which])
        found = offsets(counts)[which[row]] + k
        cells = np.zeros(len(row), CELL)
        cells["transfer"], cells["extent"] = stream.transfer[rows_of_template[row]], 1
        if layout.ndim:
            extent = template.cells.stop[used] - template.cells.start[used]
            cells["extent"][:, -layout.ndim :] = extent[box[found]]
            cells["offset"][:, -layout.ndim :] = local[found]
        rows.append(rows_of_template[row])
        made.append(cells)
    row = np.concatenate(rows)
    sort = np.argsort(row, kind="stable")
    return np.concatenate(made)[sort], np.bincount(row, minlength=len(stream.cell))


@dataclass(frozen=True)
class CellsOfRank:
    """The cells that a rank holds or needs, one row each time that one lies there."""

    transfer: Ints
    cell: Ints  # number in the template's cells, the same on every rank
    start: Ints  # (rows, MAX_NDIM) first index in the whole tensor, padded on the left with 0
    local: Table  # CELL


def cells_of_rank(bundles: Bundles, rank: int, side: str, *, first_holder_only: bool = False) -> CellsOfRank:
    """All cells on one side of a rank, those that it copies to itself included.

    Args:
        bundles: The plan's bundles.
        rank: The rank.
        side: ``"source"`` or ``"destination"``.
        first_holder_only: Of cells with several holders, only those of which this rank is the lowest.
    """
    table = bundles.sets.table()
    chosen = table.containing(rank)[bundles.table["holders" if side == "source" else "needers"]]
    if first_holder_only:
        chosen = chosen & (table.flat[table.first[bundles.table["holders"]]] == rank)
    stream = stream_cells(bundles, np.flatnonzero(chosen))
    local, counts = locate_cells(bundles, stream, rank, side)
    row = expand(counts)[0]
    start = np.zeros((len(row), MAX_NDIM), np.int64)
    for number in np.unique(stream.template).tolist():
        cells = bundles.templates[number].cells
        rows = np.flatnonzero(stream.template[row] == number)
        if cells.start.shape[1]:
            start[rows, -cells.start.shape[1] :] = cells.start[stream.cell[row[rows]]]
    return CellsOfRank(stream.transfer[row], stream.cell[row], start, local)
