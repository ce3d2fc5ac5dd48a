# SPDX-License-Identifier: Apache-2.0
"""The verifier's own slicing against layouts', and made-up weights that tell where they belong."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nccl_m2n import Layout, Mesh, Replicate, Segment, Shard, StridedShard, VerificationError
from nccl_m2n.cli.weights import MadeUpWeights
from nccl_m2n.measure.check import count_wrong, wanted_index
from nccl_m2n.models import Manifest

LAYOUTS = [
    Layout((), Mesh([3]), [Replicate()]),
    Layout((10,), Mesh.arange((4,)), [Shard(0)]),
    Layout((5, 7), Mesh.arange((2, 3)), [Shard(1), Shard(0)]),
    Layout((7, 3), Mesh.arange((2, 3)), [Shard(0), Shard(0)]),
    Layout((8, 2), Mesh([[5, 1], [0, 7]]), [StridedShard(0, split_factor=2), Shard(0)]),
    Layout((5, 2), Mesh.arange((2, 2)), [StridedShard(0, split_factor=2), Shard(0)]),
    Layout((12, 3), Mesh.arange((2,)), [Shard(0, segments=(8, 4))]),
    Layout((12, 3), Mesh.arange((4,)), [Shard(0, segments=(Segment(8), Segment(4, parts=2)))]),
    Layout((3, 4, 5), Mesh.arange((2, 1, 2)), [Replicate(), Shard(2), Shard(1)]),
]


def wrong_bytes(weights: MadeUpWeights, name: str, layout: Layout, rank: int, local: Any) -> int:
    return count_wrong(local, layout, rank, partial(weights.read, name))


def expected(layout: Layout, rank: int) -> tuple[Any, Any]:
    whole = np.arange(math.prod(layout.shape)).reshape(layout.shape)
    own = whole
    for dim, index in enumerate(wanted_index(layout, rank)):
        own = own[(slice(None),) * dim + (index,)]
    return own, layout.slice_global(whole, rank)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_slicing_agrees_with_layouts(layout: Layout) -> None:
    for rank in layout.ranks:
        own, theirs = expected(layout, rank)
        assert np.array_equal(own, theirs)
        assert own.shape == theirs.shape


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=3),
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.data(),
)
def test_slicing_agrees_with_layouts_of_any_shape(shape: list[int], mesh: list[int], data) -> None:
    dims = [data.draw(st.integers(-1, len(shape) - 1)) for _ in mesh]
    layout = Layout(shape, Mesh.arange(mesh), [Shard(d) if d >= 0 else Replicate() for d in dims])
    for rank in layout.ranks:
        own, theirs = expected(layout, rank)
        assert np.array_equal(own, theirs)


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "int64", "complex128"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_changed_byte_counts(layout: Layout, dtype: str) -> None:
    weights = MadeUpWeights(Manifest({"w": (layout.shape, dtype)}))
    for rank in layout.ranks:
        shape = (*layout.local_shape(rank), np.dtype("u2" if dtype == "bfloat16" else dtype).itemsize)
        local = np.zeros(shape, np.uint8)
        for piece in layout.pieces(rank):
            local[piece.local_slices] = weights.read("w", piece.box.slices)
        assert wrong_bytes(weights, "w", layout, rank, local) == 0
        for changed in (0, local.size - 1)[: min(2, local.size)]:
            other = local.copy()
            other.reshape(-1)[changed] ^= 1
            assert wrong_bytes(weights, "w", layout, rank, other) == 1


def test_user_made_pieces_are_verified() -> None:
    made = Layout.from_pieces(
        (4, 3), {0: LAYOUTS[2].pieces(0)[:0], 1: [*Layout((4, 3), Mesh([1]), [Replicate()]).pieces(1)]}
    )
    weights = MadeUpWeights(Manifest({"w": ((4, 3), "uint8")}))
    local = weights.read("w", [slice(0, 4), slice(0, 3)]).copy()
    assert wrong_bytes(weights, "w", made, 1, local) == 0
    local[3, 2] += 1
    assert wrong_bytes(weights, "w", made, 1, local) == 1


def test_a_wrong_shape_is_no_match() -> None:
    weights = MadeUpWeights(Manifest({"w": ((10,), "uint8")}))
    with pytest.raises(VerificationError, match="expected a local shape of"):
        wrong_bytes(weights, "w", LAYOUTS[1], 0, np.zeros((2, 1), np.uint8))


def test_made_up_weights_tell_tensors_and_positions_apart() -> None:
    weights = MadeUpWeights(Manifest(dict.fromkeys(("a", "b"), ((64, 64), "float32"))))
    a, b = (weights.read(name, [slice(0, 64), slice(0, 64)]).view("u4")[..., 0] for name in ("a", "b"))
    assert len(np.unique(np.concatenate([a, b]))) > 8100
    assert (a != a.T).sum() > 4000
    part = weights.read("a", [np.array([5, 9]), slice(3, 7)]).view("u4")[..., 0]
    assert np.array_equal(part, a[[5, 9], 3:7])
