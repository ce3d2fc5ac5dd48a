# SPDX-License-Identifier: Apache-2.0
"""What must hold for every layout."""

from __future__ import annotations

import itertools

import numpy as np

from nccl_m2n import Box, Layout, Piece
from nccl_m2n.layout.partition import BoxPartition, GridPartition
from tests import naive


def boxes(partition: BoxPartition | GridPartition) -> BoxPartition:
    return partition.boxes if isinstance(partition, GridPartition) else partition


def check_pieces(layout: Layout) -> None:
    """Every rank of a mesh layout holds what the twin says, laid out as the twin says."""
    for rank, held in naive.layout_indices(layout).items():
        assert layout.local_shape(rank) == tuple(map(len, held))
        expected = []
        for combination in itertools.product(*map(naive.runs, held)):
            start, stop, offset = zip(*combination, strict=True) if combination else ((), (), ())
            expected.append(Piece(Box(start, stop), offset))
        assert layout.pieces(rank) == tuple(expected)


def check_slices(layout: Layout) -> None:
    """`slice_global` is NumPy's own indexing with the twin's lists."""
    array = naive.distinct(layout.shape)
    for rank, held in naive.layout_indices(layout).items():
        np.testing.assert_array_equal(layout.slice_global(array, rank), array[np.ix_(*held)], strict=True)


def check_partition(layout: Layout) -> None:
    """The boxes hold every element that somebody holds exactly once, with exactly its holders."""
    times = np.zeros(layout.shape, np.int64)
    holders = np.zeros(layout.shape, object)  # one bit a rank
    for rank in layout.ranks:
        for piece in layout.pieces(rank):
            holders[piece.box.slices] |= 1 << rank
    found = boxes(layout.partition)
    seen = np.zeros(layout.shape, object)
    for start, stop, number in zip(found.start, found.stop, found.holder, strict=True):
        box, ranks = Box(tuple(start), tuple(stop)), found.holders[number].tolist()
        assert ranks == sorted(set(ranks))
        assert box.size
        times[box.slices] += 1
        seen[box.slices] = sum(1 << rank for rank in ranks)
    assert (times == (holders != 0)).all()
    assert (seen == holders).all()


def check_locate(layout: Layout) -> None:
    """Every box of the partition is found in each holder's local array, at every place where it lies."""
    array = naive.distinct(layout.shape)
    found = boxes(layout.partition)
    for rank in layout.ranks:
        mine = [i for i, number in enumerate(found.holder) if rank in found.holders[number]]
        local = layout.slice_global(array, rank)
        places = np.zeros(local.shape, np.int64)
        row, at = layout.locate(rank, found.start[mine])
        for i, offset in zip(row.tolist(), at.tolist(), strict=True):
            box = Box(tuple(found.start[mine[i]]), tuple(found.stop[mine[i]]))
            there = Piece(box, tuple(offset)).local_slices
            np.testing.assert_array_equal(local[there], array[box.slices], strict=True)
            places[there] += 1
        assert (places == (local != 0)).all()


def check(layout: Layout) -> None:
    check_pieces(layout)
    check_slices(layout)
    check_partition(layout)
    check_locate(layout)
