# SPDX-License-Identifier: Apache-2.0
"""Partitions: a tensor cut into disjoint boxes, each held by one set of ranks.

The planner's view of a layout. Where a layout comes from a mesh, its boxes are the product of
intervals in each dimension, and are never listed unless a user-made layout stands on the other side.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from nccl_m2n.layout.box import Box
from nccl_m2n.layout.intervals import expand, overlaps, product_index, ravel_index
from nccl_m2n.layout.mesh import Mesh
from nccl_m2n.layout.split import Intervals, Split, distinct_intervals
from nccl_m2n.typing import Ints


@dataclass(frozen=True)
class BoxPartition:
    """Disjoint boxes, one after another."""

    start: Ints  # (boxes, ndim)
    stop: Ints  # (boxes, ndim)
    holder: Ints  # (boxes,) which entry of `holders`
    holders: tuple[Ints, ...]  # sorted ranks that hold the same boxes

    @property
    def boxes(self) -> BoxPartition:
        """Itself; what a `GridPartition` lists."""
        return self


@dataclass(frozen=True)
class GridPartition:
    """Disjoint boxes that are the product of intervals in each dimension."""

    dims: tuple[Intervals, ...]
    holders: tuple[Ints, ...]  # by the row-major number of the dimensions' groups: sorted ranks

    @property
    def group_shape(self) -> tuple[int, ...]:
        """Number of groups in each dimension."""
        return tuple(len(d.counts) for d in self.dims)

    @cached_property
    def boxes(self) -> BoxPartition:
        """The same boxes, listed in row-major order."""
        index = product_index([len(d.start) for d in self.dims])
        start, stop = np.empty((2, index.shape[1], index.shape[0]), np.int64)
        groups = np.empty_like(index)
        for d, (dim, i) in enumerate(zip(self.dims, index, strict=True)):
            start[:, d], stop[:, d], groups[d] = dim.start[i], dim.stop[i], dim.group[i]
        return BoxPartition(start, stop, ravel_index(groups, self.group_shape), self.holders)


def grid_partition(mesh: Mesh, splits: Sequence[Split]) -> GridPartition:
    """The partition of a mesh layout; `splits` has one entry a dimension."""
    dims = tuple(map(distinct_intervals, splits))
    sharding = [axis for split in splits for axis in split.axes]
    replicating = [axis for axis in range(mesh.ndim) if axis not in sharding]
    sizes = [math.prod(mesh.shape[a] for a in split.axes) for split in splits]
    ranks = mesh.array.transpose(sharding + replicating).reshape(*sizes, -1)
    shape = tuple(len(d.counts) for d in dims)
    if all((d.counts == 1).all() for d in dims):
        chosen = ranks[np.ix_(*[d.coordinates for d in dims])]
        holders = tuple(np.sort(chosen.reshape(math.prod(shape), ranks.shape[-1]), axis=1))
    else:
        groups = [np.split(d.coordinates, np.cumsum(d.counts))[:-1] for d in dims]
        holders = tuple(np.sort(ranks[np.ix_(*chosen)].ravel()) for chosen in itertools.product(*groups))
    return GridPartition(dims, holders)


def box_partition(ndim: int, pieces: Mapping[int, Sequence[Box]]) -> BoxPartition:
    """The partition of user-made pieces; boxes that partly overlap are cut along each other's faces."""
    owners: dict[Box, set[int]] = {}
    for rank, boxes in pieces.items():
        for box in boxes:
            if box.size:
                owners.setdefault(box, set()).add(rank)
    start = np.array([b.start for b in owners], np.int64).reshape(len(owners), ndim)
    stop = np.array([b.stop for b in owners], np.int64).reshape(len(owners), ndim)
    ranks = list(owners.values())
    if _any_overlap(start, stop):
        start, stop, ranks = _refine(start, stop, ranks)
    order = np.lexsort(start.T[::-1]) if ndim else np.arange(len(start))
    names: dict[tuple[int, ...], int] = {}
    holder = [names.setdefault(tuple(sorted(ranks[i])), len(names)) for i in order.tolist()]
    sets = tuple(np.array(key, np.int64) for key in names)
    return BoxPartition(start[order], stop[order], np.array(holder, np.int64), sets)


def box_overlaps(a: BoxPartition, b: BoxPartition) -> tuple[Ints, Ints]:
    """Which boxes of two partitions meet: box numbers in `a` and in `b`.

    Sweeps the dimension with the most distinct faces and filters what it finds by the others.
    """
    return _meeting(a.start, a.stop, b.start, b.stop)


def _meeting(a_start: Ints, a_stop: Ints, b_start: Ints, b_stop: Ints) -> tuple[Ints, Ints]:
    ndim = a_start.shape[1]
    if not ndim or not len(a_start) or not len(b_start):
        i, j = np.indices((len(a_start), len(b_start))).reshape(2, -1)
        return i, j
    sweep = int(np.argmax([len(np.unique(b_start[:, d])) for d in range(ndim)]))
    points = np.unique(np.concatenate([b_start[:, sweep], b_stop[:, sweep]]))
    # The pairs that share an elementary interval of the swept dimension.
    box_a, interval_a, _, _ = overlaps(points[:-1], points[1:], a_start[:, sweep], a_stop[:, sweep])
    box_b, interval_b, _, _ = overlaps(points[:-1], points[1:], b_start[:, sweep], b_stop[:, sweep])
    order = np.argsort(interval_b, kind="stable")
    first = np.searchsorted(interval_b[order], interval_a, side="left")
    row, k = expand(np.searchsorted(interval_b[order], interval_a, side="right") - first)
    i, j = box_a[row], box_b[order][first[row] + k]
    meet = ((a_start[i] < b_stop[j]) & (b_start[j] < a_stop[i])).all(axis=1)
    pairs = np.unique(np.stack([i[meet], j[meet]]), axis=1)
    return pairs[0], pairs[1]


def _any_overlap(start: Ints, stop: Ints) -> bool:
    i, j = _meeting(start, stop, start, stop)
    return bool((i != j).any())


def _refine(start: Ints, stop: Ints, ranks: Sequence[set[int]]) -> tuple[Ints, Ints, list[set[int]]]:
    """Cut boxes along all faces, so that what is left is equal or disjoint, and merge the holders."""
    points = [np.unique(np.concatenate([start[:, d], stop[:, d]])) for d in range(start.shape[1])]
    cells: dict[tuple[int, ...], set[int]] = {}
    for a, b, held in zip(start, stop, ranks, strict=True):
        spans = [range(*np.searchsorted(p, [x, y])) for p, x, y in zip(points, a, b, strict=True)]
        for cell in np.ndindex(*map(len, spans)):
            key = tuple(span[i] for span, i in zip(spans, cell, strict=True))
            cells.setdefault(key, set()).update(held)
    keys = np.array(list(cells), np.int64)
    lo = np.stack([p[keys[:, d]] for d, p in enumerate(points)], axis=1)
    hi = np.stack([p[keys[:, d] + 1] for d, p in enumerate(points)], axis=1)
    return lo, hi, list(cells.values())
