# SPDX-License-Identifier: Apache-2.0
"""How one dimension of a tensor is split over the mesh axes that shard it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nccl_m2n.errors import LayoutError
from nccl_m2n.layout.intervals import chunk_bounds, offsets, overlaps
from nccl_m2n.layout.placement import Shard, StridedShard
from nccl_m2n.typing import Ints


@dataclass(frozen=True, slots=True)
class Split:
    """One dimension, split: which intervals of it each coordinate of the sharding mesh axes holds.

    A *coordinate* is a row-major number over the mesh axes in `axes`. The rows are ordered by
    coordinate, then by place in the local array; global starts ascend within a coordinate too.
    """

    axes: tuple[int, ...]  # mesh axes that shard this dimension, left to right
    extents: Ints  # (coordinates,) local extent of each coordinate
    coordinate: Ints  # (rows,)
    start: Ints  # (rows,) first global index
    stop: Ints  # (rows,) one past the last global index
    local: Ints  # (rows,) local index of `start`

    def rows(self, coordinate: int) -> slice:
        """The rows of one coordinate."""
        lo, hi = np.searchsorted(self.coordinate, [coordinate, coordinate + 1])
        return slice(int(lo), int(hi))


def split_dimension(extent: int, axes: Sequence[tuple[int, int, Shard | StridedShard]]) -> Split:
    """Split `extent` elements over mesh axes, left to right, each cutting what the last one left.

    Args:
        extent: Elements in the dimension.
        axes: (mesh axis, its size, its placement) of every axis that shards the dimension.
    """
    some = np.zeros(1 if extent else 0, np.int64)
    whole = Split((), np.array([extent]), some, some, some + extent, some)
    for axis, size, placement in axes:
        whole = _cut(whole, axis, size, placement)
    return _joined(whole)


def _cut(split: Split, axis: int, size: int, placement: Shard | StridedShard) -> Split:
    lo, hi = _local_ranges(split, size, placement)  # (coordinates, ranks on the axis, ranges)
    ranges = lo.shape[2]
    base = offsets(split.extents)  # the coordinates' local arrays, laid end to end
    at = base[split.coordinate] + split.local
    row, source, a, b = overlaps(
        at,
        at + split.stop - split.start,
        (lo + base[:, None, None]).ravel(),
        (hi + base[:, None, None]).ravel(),
    )
    coordinate, length = row // ranges, b - a
    start = split.start[source] + a - at[source]
    extents = (hi - lo).sum(axis=2).ravel()
    local = offsets(length) - offsets(extents)[coordinate]
    return Split((*split.axes, axis), extents, coordinate, start, start + length, local)


def _local_ranges(split: Split, size: int, placement: Shard | StridedShard) -> tuple[Ints, Ints]:
    """Ranges of each coordinate's local array that each rank on a mesh axis of `size` takes."""
    parts = np.array([size])
    if isinstance(placement, StridedShard):
        factor = min(placement.split_factor, max(1, int(split.extents.max())))  # more chunks would be empty
        a, b = chunk_bounds(split.extents[:, None], factor, np.arange(factor))
    else:
        a, b = _segment_ranges(split, placement)
        if placement.segments:
            parts = np.minimum([s.parts or size for s in placement.segments], size)
            _check_parts(placement, size, parts)
    index = np.arange(size)[:, None] * parts // size
    lo, hi = chunk_bounds((b - a)[:, None, :], parts, index)
    return lo + a[:, None, :], hi + a[:, None, :]


def _segment_ranges(split: Split, placement: Shard) -> tuple[Ints, Ints]:
    """Where each segment lies in each coordinate's local array, shape (coordinates, segments)."""
    if not placement.segments:
        return np.zeros((len(split.extents), 1), np.int64), split.extents[:, None]
    ends = np.cumsum([s.size for s in placement.segments])
    below = np.clip(ends - split.start[:, None], 0, (split.stop - split.start)[:, None])
    stop = np.zeros((len(split.extents), len(ends)), np.int64)
    np.add.at(stop, split.coordinate, below)
    return np.concatenate([np.zeros_like(stop[:, :1]), stop[:, :-1]], axis=1), stop


def _check_parts(placement: Shard, size: int, parts: Ints) -> None:
    for segment, n in zip(placement.segments, parts.tolist(), strict=False):
        if size % n:
            raise LayoutError(
                f"expected the parts of each segment to divide the mesh axis of {size} ranks, "
                f"got {segment!r}; give a divisor of {size}, or no parts"
            )


def _joined(split: Split) -> Split:
    """The same split with neighbours in both global and local order made one row."""
    new = np.ones(len(split.start), bool)
    new[1:] = (split.coordinate[1:] != split.coordinate[:-1]) | (split.start[1:] != split.stop[:-1])
    if new.all():
        return split
    last = np.append(np.flatnonzero(new)[1:], len(new)) - 1
    return Split(
        split.axes,
        split.extents,
        split.coordinate[new],
        split.start[new],
        split.stop[last],
        split.local[new],
    )


@dataclass(frozen=True, slots=True)
class Intervals:
    """The distinct intervals of a split dimension and who holds each.

    Intervals are sorted and disjoint. Intervals with the same holders share a *group*.
    """

    start: Ints
    stop: Ints
    group: Ints  # (intervals,)
    counts: Ints  # (groups,) how many coordinates hold it
    coordinates: Ints  # those coordinates, group after group


def distinct_intervals(split: Split) -> Intervals:
    """Cut the rows of a split where any of them starts or stops, and group what has the same holders."""
    points = np.unique(np.concatenate([split.start, split.stop]))
    row, piece, _, _ = overlaps(points[:-1], points[1:], split.start, split.stop)
    order = np.argsort(piece, kind="stable")  # rows ascend by coordinate, so holders stay sorted
    piece, holder = piece[order], split.coordinate[row[order]]
    held, first, counts = np.unique(piece, return_index=True, return_counts=True)
    start, stop = points[:-1][held], points[1:][held]
    if (counts == 1).all():
        names, group = np.unique(holder, return_inverse=True)
        return Intervals(start, stop, group, np.ones_like(names), names)
    groups: dict[bytes, int] = {}
    sets: list[Ints] = []
    group = np.empty(len(held), np.int64)
    for i, (at, n) in enumerate(zip(first.tolist(), counts.tolist(), strict=True)):
        owners = holder[at : at + n]
        group[i] = groups.setdefault(owners.tobytes(), len(sets))
        if group[i] == len(sets):
            sets.append(owners)
    return Intervals(start, stop, group, np.array([len(s) for s in sets], np.int64), np.concatenate(sets))
