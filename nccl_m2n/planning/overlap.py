# SPDX-License-Identifier: Apache-2.0
"""Cells: the overlaps of source boxes and destination boxes.

Where both layouts come from meshes, intervals are swept in each dimension and cells are the product;
no source rank is ever compared with a destination rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from nccl_m2n.errors import PlanError
from nccl_m2n.layout import Box, Layout
from nccl_m2n.layout.intervals import overlaps, product_index, ravel_index
from nccl_m2n.layout.partition import BoxPartition, GridPartition, box_overlaps
from nccl_m2n.typing import Ints


@dataclass(frozen=True)
class Cells:
    """The non-empty overlaps of a source and a destination layout, in row-major order of the sweep."""

    start: Ints  # (cells, ndim) global index, in elements
    stop: Ints  # (cells, ndim)
    holder: Ints  # (cells,) which entry of `holders`
    needer: Ints  # (cells,) which entry of `needers`
    holders: tuple[Ints, ...]  # sorted source ranks
    needers: tuple[Ints, ...]  # sorted destination ranks

    @cached_property
    def size(self) -> Ints:
        """Elements in each cell."""
        return np.asarray((self.stop - self.start).prod(axis=1))


@lru_cache(maxsize=1024)
def overlap(source: Layout, destination: Layout) -> Cells:
    """The cells of one transfer, cached by value.

    Raises:
        PlanError: If the source leaves a hole where the destination needs something.
    """
    a, b = source.partition, destination.partition
    if isinstance(a, GridPartition) and isinstance(b, GridPartition):
        return _grid_cells(a, b)
    cells = _box_cells(a.boxes, b.boxes)
    _refuse_holes(cells, b.boxes)
    return cells


def _grid_cells(a: GridPartition, b: GridPartition) -> Cells:
    found = [overlaps(s.start, s.stop, d.start, d.stop) for s, d in zip(a.dims, b.dims, strict=True)]
    index = product_index([len(row) for row, _, _, _ in found])
    start, stop = np.empty((2, index.shape[1], index.shape[0]), np.int64)
    holder_groups, needer_groups = np.empty((2, *index.shape), np.int64)
    for d, (needing, holding, lo, hi) in enumerate(found):
        start[:, d], stop[:, d] = lo[index[d]], hi[index[d]]
        holder_groups[d] = a.dims[d].group[holding[index[d]]]
        needer_groups[d] = b.dims[d].group[needing[index[d]]]
    holder = ravel_index(holder_groups, a.group_shape)
    return Cells(start, stop, holder, ravel_index(needer_groups, b.group_shape), a.holders, b.holders)


def _box_cells(a: BoxPartition, b: BoxPartition) -> Cells:
    j, i = box_overlaps(b, a)
    start, stop = np.maximum(a.start[i], b.start[j]), np.minimum(a.stop[i], b.stop[j])
    return Cells(start, stop, a.holder[i], b.holder[j], a.holders, b.holders)


def _refuse_holes(cells: Cells, needed: BoxPartition) -> None:
    if int(cells.size.sum()) == int((needed.stop - needed.start).prod(axis=1).sum()):
        return
    for lo, hi, needer in zip(needed.start, needed.stop, needed.holder.tolist(), strict=True):
        inside = ((cells.start >= lo) & (cells.stop <= hi)).all(axis=1)
        missing = int((hi - lo).prod()) - int(cells.size[inside].sum())
        if missing:
            raise PlanError(
                f"expected source pieces that cover box {Box(tuple(lo), tuple(hi))} needed by ranks "
                f"{needed.holders[needer].tolist()}, got none for {missing} of its elements; "
                "give the missing pieces to a source rank"
            )
