# SPDX-License-Identifier: Apache-2.0
"""How one dimension of a tensor is split over the mesh axes that shard it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nccl_m2n.errors import LayoutError
from nccl_m2n.layout.intervals import offsets, overlaps
from nccl_m2n.layout.placement import Placement
from nccl_m2n.typing import Ints


@dataclass(frozen=True, slots=True)
class Split:
    """One dimension, split: which intervals of it each coordinate of the sharding mesh axes holds.

    A *coordinate* is a row-major number over the mesh axes in `axes`. The rows are ordered by
    coordinate, then by position in the local array; global starts ascend within a coordinate too.
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


def split_dimension(extent: int, axes: Sequence[tuple[int, int, Placement]]) -> Split:
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


def _cut(split: Split, axis: int, size: int, placement: Placement) -> Split:
    # In each coordinate's local array, shape (coordinates, ranks on the axis, ranges).
    lo, hi = placement.ranges(_extents(split, placement.cut_at), size)
    if (lo[..., 1:] < hi[..., :-1]).any():
        raise LayoutError(f"expected {placement!r} to give ranges that ascend, got {lo} to {hi}")
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


def _extents(split: Split, cut_at: Sequence[int]) -> Ints:
    """How much of each range of the dimension each coordinate has, shape (coordinates, ranges).

    Rows ascend in the dimension and in the local array alike, so what a coordinate has of a range is what it has
    below the range's end less what it has below its start.
    """
    if not cut_at:
        return split.extents[:, None]
    below = np.clip(np.array(cut_at) - split.start[:, None], 0, (split.stop - split.start)[:, None])
    stop = np.zeros((len(split.extents), len(cut_at)), np.int64)
    np.add.at(stop, split.coordinate, below)
    return np.diff(stop, axis=1, prepend=0)


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
