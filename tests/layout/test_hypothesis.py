# SPDX-License-Identifier: Apache-2.0
"""Layouts that are larger than the exhaustive tests go."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import example, given, settings

from nccl_m2n import Layout, Mesh, Shard
from tests import naive, strategies
from tests.layout import checks


@settings(max_examples=300)
@given(strategies.mesh_layouts())
@example(Layout((), Mesh(3), []))  # boxes of a scalar could not be listed
@example(Layout((3, 0, 2), Mesh([1, 0]), [Shard(1)]))
def test_mesh_layouts(layout: Layout) -> None:
    checks.check(layout)


@settings(max_examples=300)
@given(strategies.piece_layouts())
def test_piece_layouts(layout: Layout) -> None:
    checks.check_partition(layout)
    checks.check_locate(layout)
    array = naive.distinct(layout.shape)
    for rank in layout.ranks:
        local = layout.slice_global(array, rank)
        assert local.shape == layout.local_shape(rank)
        for piece in layout.pieces(rank):
            np.testing.assert_array_equal(local[piece.local_slices], array[piece.box.slices])
        assert np.count_nonzero(local) == sum(piece.box.size for piece in layout.pieces(rank))
    assert checks.boxes(layout.partition).holder.size or not math.prod(layout.shape)
