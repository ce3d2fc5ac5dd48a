# SPDX-License-Identifier: Apache-2.0
"""Boxes, sweeps and partitions, each against all pairs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nccl_m2n import Box, Layout, Mesh, Piece, Replicate, Segment, Shard
from nccl_m2n.layout.intervals import overlaps, shard_bounds
from nccl_m2n.layout.partition import BoxPartition, GridPartition, box_overlaps, box_partition
from tests import naive, strategies
from tests.layout import checks


def test_a_box() -> None:
    box = Box((1, 2), (4, 6))
    assert (box.shape, box.size) == ((3, 4), 12)
    assert box.slices == (slice(1, 4), slice(2, 6))
    assert Piece(box, (5, 0)).local_slices == (slice(5, 8), slice(0, 4))
    assert Box((3,), (1,)).shape == (0,)
    assert (Box((), ()).shape, Box((), ()).size, Box((), ()).slices) == ((), 1, ())


def test_boxes_meet_where_index_sets_do() -> None:
    spans = [(a, b) for a in range(4) for b in range(a, 4)]
    for one in spans:
        for two in spans:
            both = set(range(*one)) & set(range(*two))
            meet = Box(one[:1], one[1:]).intersect(Box(two[:1], two[1:]))
            assert (set(range(meet.start[0], meet.stop[0])) if meet else set()) == both
    assert Box((), ()).intersect(Box((), ())) == Box((), ())
    assert Box((0, 0), (2, 2)).intersect(Box((0, 2), (2, 4))) is None


@pytest.mark.parametrize("extent", range(12))
def test_chunks(extent: int) -> None:
    for parts in range(1, 14):
        start, stop = shard_bounds(np.array([extent]), parts, np.arange(parts))
        expected = naive.ceil_chunks(list(range(extent)), parts)
        assert [list(range(a, b)) for a, b in zip(start, stop, strict=True)] == expected


pairs = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=8)


@given(pairs, st.lists(st.integers(0, 20), unique=True, max_size=12).map(sorted))
def test_overlaps(ranges: list[tuple[int, int]], points: list[int]) -> None:
    starts, stops = np.array(points[0:-1:2], np.int64), np.array(points[1::2], np.int64)
    lo, hi = np.array(ranges, np.int64).reshape(-1, 2).T
    expected = [
        (r, k, max(a, c), min(b, d))
        for r, (a, b) in enumerate(ranges)
        for k, (c, d) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True))
        if max(a, c) < min(b, d)
    ]
    assert list(zip(*(found.tolist() for found in overlaps(starts, stops, lo, hi)), strict=True)) == expected


@given(st.data())
def test_box_overlaps(data: st.DataObject) -> None:
    shape = data.draw(strategies.shapes(max_ndim=3))
    one, two = (checks.boxes(data.draw(strategies.layouts(shape, universe=8)).partition) for _ in range(2))

    def listed(partition: BoxPartition) -> list[Box]:
        return [Box(tuple(a), tuple(b)) for a, b in zip(partition.start, partition.stop, strict=True)]

    expected = [
        (i, j) for i, a in enumerate(listed(one)) for j, b in enumerate(listed(two)) if a.intersect(b)
    ]
    assert list(zip(*(found.tolist() for found in box_overlaps(one, two)), strict=True)) == expected


def test_a_mesh_layout_lists_no_boxes() -> None:
    """Its partition is a product of intervals: 2²⁰ boxes take 2¹¹ rows."""
    partition = Layout((1024, 1024), Mesh.arange((1024,)), [Shard(0)]).partition
    assert isinstance(partition, GridPartition)
    assert partition.group_shape == (1024, 1)
    two = Layout((4096, 4096), Mesh.arange((32, 32)), [Shard(0), Shard(1)]).partition
    assert isinstance(two, GridPartition)
    assert two.group_shape == (32, 32)
    assert len(two.holders) == 1024


def test_intervals_with_the_same_holders_are_one_group() -> None:
    """What one coordinate holds in two segments is one group; so is what the same ranks repeat."""
    fused = Layout((16,), Mesh.arange((4,)), [Shard(0, segments=(8, 8))]).partition
    assert isinstance(fused, GridPartition)
    assert fused.dims[0].group.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    heads = Segment(4, parts=2)
    packed = Layout((16,), Mesh.arange((4,)), [Shard(0, segments=(8, heads, heads))]).partition
    assert isinstance(packed, GridPartition)
    assert packed.dims[0].group.tolist() == [0, 1, 2, 3, 4, 5, 4, 5]
    assert [h.tolist() for h in packed.holders] == [[0], [1], [2], [3], [0, 1], [2, 3]]


def test_a_replica_on_another_axis() -> None:
    partition = Layout((4, 6), Mesh([[5, 1], [0, 9], [2, 7]]), [Replicate(), Shard(1)]).partition
    assert [h.tolist() for h in partition.holders] == [[0, 2, 5], [1, 7, 9]]


def test_the_boxes_of_equal_pieces_are_not_cut() -> None:
    box, rest = Box((0, 0), (2, 3)), Box((2, 0), (4, 3))
    found = box_partition(2, {3: [box], 1: [box, rest]})
    assert found.start.tolist() == [[0, 0], [2, 0]]
    assert found.stop.tolist() == [[2, 3], [4, 3]]
    assert [found.holders[number].tolist() for number in found.holder] == [[1, 3], [1]]


def test_no_pieces_make_no_boxes() -> None:
    found = box_partition(2, {0: [Box((1, 1), (1, 2))]})
    assert found.start.shape == found.stop.shape == (0, 2)
    assert found.holders == ()
