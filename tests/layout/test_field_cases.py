# SPDX-License-Identifier: Apache-2.0
"""Shardings that went wrong in the field, with the right rows written out."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from nccl_m2n import Box, Layout, Mesh, Piece, Replicate, Segment, Shard, StridedShard
from tests import naive
from tests.layout import checks


def rows(layout: Layout, dim: int = 0) -> list[list[tuple[int, int]]]:
    """Global intervals in one dimension that each rank holds, in local order."""
    return [
        [(piece.box.start[dim], piece.box.stop[dim]) for piece in layout.pieces(rank)]
        for rank in layout.mesh.ranks
    ]


def sharded(extent: int, *mesh_shape: int) -> Layout:
    return Layout((extent, 2), Mesh.arange(mesh_shape), [Shard(0)] * len(mesh_shape))


@pytest.mark.parametrize(
    ("extent", "ranks", "expected"),
    [
        (10, 4, [3, 3, 3, 1]),
        (5, 4, [2, 2, 1, 0]),
        (7, 3, [3, 3, 1]),
        (7, 5, [2, 2, 2, 1, 0]),
        (10, 3, [4, 4, 2]),
        (2, 4, [1, 1, 0, 0]),
        (0, 2, [0, 0]),
        (1, 1, [1]),
        (4096, 30, [137] * 29 + [123]),
        (32, 30, [2] * 16 + [0] * 14),
        (4096, 120, [35] * 117 + [1, 0, 0]),
    ],
)
def test_rows_run_out_at_the_end(extent: int, ranks: int, expected: list[int]) -> None:
    layout = sharded(extent, ranks)
    assert [layout.local_shape(rank) for rank in range(ranks)] == [(n, 2) for n in expected]
    ends = np.cumsum([0, *expected]).tolist()
    assert rows(layout) == [[(a, b)] if b > a else [] for a, b in itertools.pairwise(ends)]


def test_an_empty_shard_is_no_replica() -> None:
    layout = sharded(4096, 120)
    assert layout.pieces(119) == ()
    assert layout.slice_global(np.ones((4096, 2)), 119).shape == (0, 2)
    assert 119 in layout.ranks
    assert all(119 not in holders for holders in layout.partition.holders)


def test_strided_is_not_nested() -> None:
    mesh = Mesh.arange((2, 2), names=("fsdp", "tp"))
    nested = Layout((8,), mesh, [Shard(0), Shard(0)])
    strided = Layout((8,), mesh, [StridedShard(0, split_factor=2), Shard(0)])
    assert rows(nested) == [[(0, 2)], [(2, 4)], [(4, 6)], [(6, 8)]]
    assert rows(strided) == [[(0, 2)], [(4, 6)], [(2, 4)], [(6, 8)]]


def test_strided_and_uneven() -> None:
    layout = Layout((5,), Mesh.arange((2, 2)), [StridedShard(0, split_factor=2), Shard(0)])
    assert rows(layout) == [[(0, 2)], [(3, 4)], [(2, 3)], [(4, 5)]]
    assert [layout.local_shape(rank) for rank in range(4)] == [(2,), (1,), (1,), (1,)]


def test_strided_alone_leaves_several_pieces() -> None:
    layout = Layout((2, 8), Mesh([3, 1]), [StridedShard(1, split_factor=2)])
    assert layout.pieces(1) == (
        Piece(Box((0, 2), (2, 4)), (0, 0)),
        Piece(Box((0, 6), (2, 8)), (0, 2)),
    )
    array = naive.distinct((2, 8))
    np.testing.assert_array_equal(layout.slice_global(array, 1), [[3, 4, 7, 8], [11, 12, 15, 16]])


@pytest.mark.parametrize("ranks", [8, 4, 2, 1])
def test_fused_gate_and_up(ranks: int) -> None:
    gate = 11008
    layout = Layout((2 * gate, 4), Mesh.arange((ranks,)), [Shard(0, segments=(gate, gate))])
    n = gate // ranks
    expected = [[(r * n, (r + 1) * n), (gate + r * n, gate + (r + 1) * n)] for r in range(ranks)]
    assert rows(layout) == ([[(0, 2 * gate)]] if ranks == 1 else expected)
    assert [layout.local_shape(rank) for rank in range(ranks)] == [(2 * n, 4)] * ranks


def test_a_plain_cut_would_cross_a_segment() -> None:
    """A packed input projection of 5152 rows: cut in the middle, 2576 lies inside the second segment."""
    layout = Layout((5152, 3), Mesh([0, 1]), [Shard(0, segments=(2048, 2048, 512, 512, 32))])
    assert rows(layout) == [
        [(0, 1024), (2048, 3072), (4096, 4352), (4608, 4864), (5120, 5136)],
        [(1024, 2048), (3072, 4096), (4352, 4608), (4864, 5120), (5136, 5152)],
    ]
    assert [piece.offset[0] for piece in layout.pieces(1)] == [0, 1024, 2048, 2304, 2560]
    assert rows(Layout((5152, 3), Mesh([0, 1]), [Shard(0)])) == [[(0, 2576)], [(2576, 5152)]]


def test_few_kv_heads_are_held_by_neighbours() -> None:
    """64 query and 2 key and value heads of 128, packed, over TP8: four ranks hold each KV head."""
    head = 128
    kv = Segment(2 * head, parts=2)
    layout = Layout((68 * head, 5), Mesh.arange((8,)), [Shard(0, segments=(64 * head, kv, kv))])
    for rank, held in enumerate(rows(layout)):
        k, v = (64 + rank // 4) * head, (66 + rank // 4) * head
        assert held == [(rank * 8 * head, (rank + 1) * 8 * head), (k, k + head), (v, v + head)]
    checks.check_partition(Layout((68, 5), Mesh.arange((8,)), [Shard(0, segments=(64, Segment(4, parts=4)))]))


def test_8_kv_heads_over_16_ranks() -> None:
    layout = Layout((8 * 128,), Mesh.arange((16,)), [Shard(0, segments=(Segment(8 * 128, parts=8),))])
    assert rows(layout) == [[(rank // 2 * 128, rank // 2 * 128 + 128)] for rank in range(16)]
    assert [h.tolist() for h in layout.partition.holders] == [[2 * i, 2 * i + 1] for i in range(8)]


def test_experts_and_then_fsdp_on_another_dimension() -> None:
    mesh = Mesh.arange((8, 32), names=("ep", "fsdp"))
    layout = Layout((64, 2048, 7), mesh, [Shard(0), Shard(1)])
    rank = 5 * 32 + 9
    assert layout.pieces(rank) == (Piece(Box((40, 576, 0), (48, 640, 7)), (0, 0, 0)),)
    assert {layout.local_shape(rank) for rank in layout.ranks} == {(8, 64, 7)}


def test_fewer_expert_rows_than_ranks() -> None:
    """384 experts over 8 × 32 on the same dimension: 48 over 32 is 24 times 2 rows."""
    layout = Layout((384, 2), Mesh.arange((8, 32)), [Shard(0), Shard(0)])
    for ep in range(8):
        mine = rows(layout)[32 * ep : 32 * ep + 32]
        assert mine == [[(48 * ep + 2 * i, 48 * ep + 2 * i + 2)] for i in range(24)] + [[]] * 8


def test_a_trillion_elements() -> None:
    layout = Layout((2**20, 2**20), Mesh.arange((4, 2)), [Shard(0), Shard(1)])
    assert layout.pieces(7) == (Piece(Box((3 * 2**18, 2**19), (2**20, 2**20)), (0, 0)),)
    long = Layout((2**40,), Mesh.arange((3,)), [Shard(0)])
    assert rows(long)[2] == [(733007751852, 2**40)]
    strided = Layout((2**40,), Mesh.arange((2,)), [StridedShard(0, split_factor=2)])
    assert [p.offset for p in strided.pieces(1)] == [(0,), (2**38,)]


def test_a_scalar() -> None:
    layout = Layout((), Mesh([4, 2]), [Replicate()])
    assert [layout.local_shape(rank) for rank in (2, 4)] == [(), ()]
    assert layout.pieces(4) == (Piece(Box((), ()), ()),)
    assert layout.slice_global(np.array(7.0), 2) == 7.0
    checks.check(layout)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (4, 0, 2)])
def test_nothing_to_hold(shape: tuple[int, ...]) -> None:
    layout = Layout(shape, Mesh([0, 1]), [Shard(0)])
    assert [layout.pieces(rank) for rank in (0, 1)] == [(), ()]
    checks.check(layout)


def test_eight_dimensions_on_a_mesh_of_four_axes() -> None:
    layout = Layout(
        (2, 3, 2, 3, 2, 3, 2, 3), Mesh.arange((2, 3, 2, 2)), [Shard(7), Shard(1), Shard(4), Shard(7)]
    )
    assert layout.ndim == 8
    assert layout.local_shape(0) == (2, 1, 2, 3, 1, 3, 2, 1)
    checks.check(layout)


def test_ranks_in_any_order() -> None:
    layout = Layout((4,), Mesh([[7, 0], [3, 5]]), [Shard(0), Replicate()])
    assert rows(layout) == [[(0, 2)], [(0, 2)], [(2, 4)], [(2, 4)]]
    assert layout.ranks == (0, 3, 5, 7)
    assert [h.tolist() for h in layout.partition.holders] == [[0, 7], [3, 5]]


def test_negative_dimensions_count_from_the_end() -> None:
    mesh = Mesh([0, 1])
    assert Layout((4, 6), mesh, [Shard(-1)]) == Layout((4, 6), mesh, [Shard(1)])
    assert Layout((4, 6), mesh, [Shard(-2, segments=(1, 3))]).placements == (Shard(0, segments=(1, 3)),)
    assert Layout((4, 6), mesh, [StridedShard(-1, 3)]).placements == (StridedShard(1, 3),)


def test_more_chunks_than_rows() -> None:
    """Chunks beyond the last row are empty, however many there are said to be."""
    layout = Layout((3,), Mesh([0, 1]), [StridedShard(0, split_factor=10**12)])
    assert rows(layout) == [[(0, 3)], []]
