# SPDX-License-Identifier: Apache-2.0
"""Layouts of user-made pieces."""

from __future__ import annotations

import numpy as np
import pytest

from nccl_m2n import Box, Layout, LayoutError, Mesh, Piece, Replicate, Shard, StridedShard
from tests import naive
from tests.layout import checks


def test_one_box_a_rank() -> None:
    layout = Layout.from_pieces((8, 8), {5: [Box((3, 0), (8, 8))], 0: [Box((0, 0), (3, 8))]})
    assert layout.ranks == (0, 5)
    assert layout.pieces(5) == (Piece(Box((3, 0), (8, 8)), (0, 0)),)
    assert (layout.local_shape(0), layout.local_shape(5)) == ((3, 8), (5, 8))
    assert layout.pieces(1) == ()


@pytest.mark.parametrize(
    ("boxes", "offsets", "local_shape"),
    [
        ([Box((0, 0), (2, 8)), Box((5, 0), (8, 8))], [(0, 0), (2, 0)], (5, 8)),
        ([Box((5, 0), (8, 8)), Box((0, 0), (2, 8))], [(0, 0), (3, 0)], (5, 8)),  # in the order given
        ([Box((0, 0), (2, 3)), Box((6, 4), (8, 8))], [(0, 0), (0, 3)], (2, 7)),
        ([Box((0, 0), (2, 2)), Box((6, 4), (8, 6))], [(0, 0), (2, 0)], (4, 2)),  # both fit: the first does
        ([Box((0, 0), (1, 8)), Box((1, 0), (1, 8)), Box((7, 0), (8, 8))], [(0, 0), (1, 0), (1, 0)], (2, 8)),
    ],
)
def test_boxes_lie_end_to_end(boxes: list[Box], offsets: list[tuple[int, ...]], local_shape) -> None:
    layout = Layout.from_pieces((8, 8), {0: boxes})
    assert layout.pieces(0) == tuple(map(Piece, boxes, offsets))
    assert layout.local_shape(0) == local_shape


def test_pieces_lie_where_they_say() -> None:
    """A local array with the halves swapped, a hole between them and room behind."""
    pieces = [Piece(Box((0,), (3,)), (4,)), Piece(Box((3,), (6,)), (0,))]
    layout = Layout.from_pieces((6,), {2: pieces}, local_shapes={2: (9,)})
    assert layout.local_shape(2) == (9,)
    local = layout.slice_global(np.arange(1, 7), 2)
    np.testing.assert_array_equal(local, [4, 5, 6, 0, 1, 2, 3, 0, 0])
    assert Layout.from_pieces((6,), {2: pieces}).local_shape(2) == (7,)


def test_a_rank_may_hold_a_box_twice() -> None:
    box = Box((1,), (3,))
    layout = Layout.from_pieces((4,), {0: [box, box], 1: [Box((0,), (4,))]})
    np.testing.assert_array_equal(layout.slice_global(np.arange(4), 0), [1, 2, 1, 2])
    row, at = layout.locate(0, np.array([[1], [2]]))
    assert row.tolist() == [0, 0, 1, 1]
    assert at.tolist() == [[0], [2], [1], [3]]
    checks.check_partition(layout)


def test_a_rank_may_hold_nothing() -> None:
    layout = Layout.from_pieces((4, 2), {0: [Box((0, 0), (4, 2))], 1: [], 2: [Box((4, 0), (4, 2))]})
    assert layout.ranks == (0, 1, 2)
    assert layout.local_shape(1) == (0, 0)
    assert layout.local_shape(2) == (0, 2)
    assert layout.slice_global(np.ones((4, 2)), 1).shape == (0, 0)
    checks.check_partition(layout)


def test_overlapping_boxes_are_cut_along_their_faces() -> None:
    layout = Layout.from_pieces((4, 4), {0: [Box((0, 0), (3, 4))], 1: [Box((2, 1), (4, 4))]})
    found = checks.boxes(layout.partition)
    both = [i for i, number in enumerate(found.holder) if found.holders[number].tolist() == [0, 1]]
    assert [(found.start[i].tolist(), found.stop[i].tolist()) for i in both] == [([2, 1], [3, 4])]
    checks.check_partition(layout)


def test_a_hole_stays_a_hole() -> None:
    """Layouts may hold a part of a tensor only; whether that will do is the plan's question."""
    layout = Layout.from_pieces((4, 4), {0: [Box((0, 0), (2, 2))], 1: [Box((2, 2), (4, 4))]})
    assert len(layout.partition.start) == 2
    checks.check_partition(layout)


@pytest.mark.parametrize(
    "layout",
    [
        Layout((5, 4), Mesh.arange((2, 3)), [Shard(0), Shard(1)]),
        Layout((5, 4), Mesh([[4, 1], [0, 2]]), [Replicate(), Shard(0, segments=(2, 3))]),
        Layout((8, 4), Mesh([1, 3]), [StridedShard(0, split_factor=4)]),
        Layout((), Mesh([1, 0]), [Replicate()]),
    ],
    ids=str,
)
def test_the_pieces_of_a_mesh_layout_make_it_again(layout: Layout) -> None:
    pieces = {rank: layout.pieces(rank) for rank in layout.ranks}
    local_shapes = {rank: layout.local_shape(rank) for rank in layout.ranks}
    again = Layout.from_pieces(layout.shape, pieces, local_shapes)
    array = naive.distinct(layout.shape)
    assert again != layout
    assert again.ranks == layout.ranks
    for rank in layout.ranks:
        assert again.pieces(rank) == layout.pieces(rank)
        np.testing.assert_array_equal(again.slice_global(array, rank), layout.slice_global(array, rank))
    checks.check_partition(again)


def test_order_of_ranks_is_no_part_of_the_value() -> None:
    a, b = [Box((0,), (1,))], [Box((1,), (2,))]
    one, two = Layout.from_pieces((2,), {0: a, 1: b}), Layout.from_pieces((2,), {1: b, 0: a})
    assert one == two
    assert hash(one) == hash(two)
    assert one != Layout.from_pieces((2,), {0: b, 1: a})


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ({}, r"expected at least one rank in a mesh"),
        ({-1: []}, r"expected a whole number from 0 to .* as a rank of pieces, got -1"),
        ({0: [Box((0, 0), (9, 4))]}, r"expected pieces inside shape \(8, 4\), got \[0:9, 0:4\].*on rank 0"),
        ({0: [Box((-1, 0), (2, 4))]}, r"expected pieces inside shape \(8, 4\), got \[-1:2, 0:4\]"),
        ({0: [Box((3, 0), (2, 4))]}, r"expected pieces inside shape \(8, 4\), got \[3:2, 0:4\]"),
        (
            {0: [Piece(Box((0, 0), (2, 4)), (0, -1))]},
            r"expected pieces inside.* at \(0, -1\)",
        ),
        ({3: [Box((0,), (2,))]}, r"expected pieces of rank 2 for shape \(8, 4\), got \[0:2\].*on rank 3"),
        ({0: [Box((0, 0), (2, 4)), Piece(Box((2, 0), (4, 4)), (2, 0))]}, r"expected only Box or only Piece"),
        (
            {0: [((0, 0), (2, 4))]},
            r"expected only Box or only Piece for rank 0, got \[\(\(0, 0\)",
        ),
        (
            {0: [Box((0, 0), (2, 4)), Box((2, 0), (3, 2))]},
            r"boxes of rank 0 that agree in all extents but one.*\[\(2, 4\), \(1, 2\)\]; give a Piece",
        ),
        (
            {2: [Piece(Box((0, 0), (2, 4)), (0, 0)), Piece(Box((4, 0), (6, 4)), (1, 0))]},
            r"expected pieces of rank 2 apart in its local array, "
            r"got \[0:2, 0:4\] at \(0, 0\) over \[4:6, 0:4\] at \(1, 0\)",
        ),
    ],
)
def test_pieces_that_cannot_be(pieces: dict, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Layout.from_pieces((8, 4), pieces)


def test_two_scalars_cannot_lie_end_to_end() -> None:
    with pytest.raises(LayoutError, match="agree in all extents but one"):
        Layout.from_pieces((), {0: [Box((), ()), Box((), ())]})


@pytest.mark.parametrize(
    ("local_shapes", "message"),
    [
        ({0: (3,)}, r"expected a local shape of at least \(4,\) on rank 0, got \(3,\)"),
        ({0: (4, 1)}, r"expected a local shape of at least \(4,\) on rank 0, got \(4, 1\)"),
        ({1: (4,)}, r"expected local shapes only of the ranks \[0\].*got some of \[1\]; give a rank"),
    ],
)
def test_local_shapes_that_cannot_be(local_shapes: dict, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Layout.from_pieces((4,), {0: [Box((0,), (4,))]}, local_shapes)


def test_a_rank_elsewhere_has_no_local_shape() -> None:
    layout = Layout.from_pieces((4,), {0: [Box((0,), (4,))]})
    with pytest.raises(LayoutError, match=r"expected a rank of Mesh\(\[0\]\), got 7; its ranks are 0"):
        layout.local_shape(7)
    with pytest.raises(LayoutError, match="expected a rank of .*, got 7; its"):
        layout.slice_global(np.arange(4), 7)
