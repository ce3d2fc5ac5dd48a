# SPDX-License-Identifier: Apache-2.0
"""DTensor's own splitting as a second oracle."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from nccl_m2n import Layout, Mesh, Placement, Replicate, Shard, StridedShard
from tests import naive, strategies

torch = pytest.importorskip("torch")
dtensor = pytest.importorskip("torch.distributed.tensor.placement_types")
utils = pytest.importorskip("torch.distributed.tensor._utils")


def theirs(placement: Placement) -> Any:
    if isinstance(placement, Shard):
        return dtensor.Shard(placement.dim)
    if isinstance(placement, StridedShard):
        return dtensor._StridedShard(placement.dim, split_factor=placement.split_factor)
    return dtensor.Replicate()


def local_tensor(layout: Layout, at: tuple[int, ...]) -> np.ndarray:
    """What DTensor's placements leave of the global tensor at a mesh coordinate."""
    local = torch.from_numpy(naive.distinct(layout.shape))
    for size, i, placement in zip(layout.mesh.shape, at, map(theirs, layout.placements), strict=True):
        if not placement.is_replicate():
            local = placement._split_tensor(local, size, with_padding=False, contiguous=True)[0][i]
    return local.numpy()


def check(layout: Layout) -> None:
    array = naive.distinct(layout.shape)
    placements = list(map(theirs, layout.placements))
    assert Layout(layout.shape, layout.mesh, placements) == layout
    for rank, at in zip(layout.mesh.ranks, itertools.product(*map(range, layout.mesh.shape)), strict=True):
        shape, offset = utils._compute_local_shape_and_global_offset(
            layout.shape, layout.mesh.shape, list(at), placements
        )
        assert layout.local_shape(rank) == tuple(shape)
        pieces = layout.pieces(rank)
        assert bool(pieces) == (0 not in shape)
        if pieces:
            assert pieces[0].box.start == tuple(offset)
        np.testing.assert_array_equal(layout.slice_global(array, rank), local_tensor(layout, at), strict=True)


@pytest.mark.parametrize("extent", range(8))
@pytest.mark.parametrize("mesh_shape", [(2,), (3,), (2, 2), (2, 3), (3, 2), (2, 2, 2)])
def test_one_dimension(extent: int, mesh_shape: tuple[int, ...]) -> None:
    kinds = [Replicate(), Shard(0), StridedShard(0, split_factor=2), StridedShard(0, split_factor=3)]
    for placements in itertools.product(kinds, repeat=len(mesh_shape)):
        check(Layout((extent,), Mesh.arange(mesh_shape), placements))


@pytest.mark.parametrize("shape", [(5, 4, 3), (3, 0, 2), (1, 7, 2)])
def test_three_dimensions(shape: tuple[int, ...]) -> None:
    kinds = [Replicate(), *map(Shard, range(3)), *(StridedShard(d, split_factor=2) for d in range(3))]
    for placements in itertools.product(kinds, repeat=2):
        check(Layout(shape, Mesh.arange((2, 3)), placements))


@given(strategies.mesh_layouts())
def test_any(layout: Layout) -> None:
    plain = [Shard(p.dim) if isinstance(p, Shard) else p for p in layout.placements]  # it has no segments
    check(Layout(layout.shape, layout.mesh, plain))


def test_the_fsdp_over_tp_of_torch() -> None:
    """The table in the docstring of torch's ``_StridedShard``."""
    layout = Layout(
        (8, 8), Mesh([[0, 1], [2, 3]]), [dtensor._StridedShard(0, split_factor=2), dtensor.Shard(0)]
    )
    assert [layout.pieces(rank)[0].box.start[0] for rank in range(4)] == [0, 4, 2, 6]


def test_partial_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"expected Shard.*, got Partial: .* still to be summed.*reduce them"
    ):
        Layout((8,), Mesh([0, 1]), [dtensor.Partial()])
