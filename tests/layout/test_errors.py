# SPDX-License-Identifier: Apache-2.0
"""Descriptions that cannot be: what was expected, what came, and what to do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nccl_m2n import Box, Layout, LayoutError, M2nError, Mesh, Replicate, Segment, Shard, StridedShard

MESH = Mesh([[0, 1, 2], [3, 4, 5]], names=("dp", "tp"))


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (
            [0, 1, 1, 2, 0],
            r"expected distinct ranks in a mesh, got rank 0, 1 more than once.*\(5,\); list each",
        ),
        ([[0, 1], [2]], r"expected mesh rows of equal length, got \[\[0, 1\], \[2\]\]; pad or regroup"),
        ([], r"expected at least one rank in a mesh, got \[\]"),
        ([[]], r"expected at least one rank"),
        ([0.0, 1.0], r"expected integer ranks in a mesh, got \[0\.0, 1\.0\] of dtype float64"),
        ([True, False], r"expected integer ranks in a mesh.*bool"),
        (["0"], r"expected integer ranks in a mesh"),
        (None, r"expected integer ranks in a mesh, got None"),
        ([2**70], r"expected integer ranks in a mesh"),
        ([3, -2], r"expected ranks from 0 to 1048575 in a mesh, got -2; count ranks from 0"),
    ],
)
def test_meshes(ranks: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Mesh(ranks)


def test_names_of_a_mesh() -> None:
    with pytest.raises(
        LayoutError, match=r"one name for each of the 2 mesh axes, got \('dp',\); give 2 names"
    ):
        Mesh([[0, 1]], names=("dp",))


def test_a_rank_elsewhere() -> None:
    with pytest.raises(LayoutError, match=r"expected a rank of Mesh\.arange.*got 6.*; its ranks are 0-5"):
        MESH.coordinate(6)
    layout = Layout((6,), MESH, [Shard(0), Replicate()])
    assert layout.pieces(6) == ()
    with pytest.raises(LayoutError, match="expected a rank of .*, got 6; its"):
        layout.local_shape(6)
    with pytest.raises(LayoutError, match="expected a rank of .*, got 6; its"):
        layout.slice_global(np.arange(6), 6)


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        ([], r"expected 2 placements, one for each axis of a mesh of shape \(2, 3\), got 0"),
        ([Shard(0)], r"expected 2 placements.*got 1: \[Shard\(0\)\]"),
        ([Shard(0)] * 3, r"expected 2 placements.*got 3"),
        (
            [Shard(2), Replicate()],
            r"dimension of Shard\(2\) to be one of a tensor of rank 2, got 2; use 0 to 1",
        ),
        ([Replicate(), Shard(-3)], r"got -3; use 0 to 1"),
        ([StridedShard(5, 2), Shard(0)], r"StridedShard\(5, split_factor=2\).*rank 2, got 5"),
        ([0, Replicate()], r"expected a placement, got 0; write Shard\(0\) or Replicate\(\)"),
        ([True, Replicate()], r"expected a placement, got True"),
        ([None, Replicate()], r"expected Replicate, Shard or StridedShard, got None of type NoneType"),
        (["R", Replicate()], r"expected Replicate, Shard or StridedShard, got 'R' of type str"),
        (
            [Shard(0, segments=(4, 3)), Replicate()],
            r"segments of Shard\(0, segments=\(4, 3\)\) to add up to the extent 8 of dimension 0, "
            r"got 7; list the length of every segment",
        ),
        (
            [Replicate(), Shard(0, segments=(Segment(8, parts=2),))],
            r"divide the mesh axis of 3 ranks, got Segment\(8, parts=2\); take ranks .* a multiple of 2",
        ),
    ],
)
def test_placements(placements: list[Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Layout((8, 4), MESH, placements)


def fake(name: str, **attributes: object) -> object:
    """An object of a class that only has the name of one of DTensor's."""
    return type(name, (), attributes)()


def test_placements_are_known_by_the_names_of_their_classes() -> None:
    mesh = Mesh([[[0, 1]]])
    layout = Layout(
        (8, 4), mesh, [fake("_StridedShard", dim=-2, split_factor=2), fake("Shard", dim=1), fake("Replicate")]
    )
    assert layout.placements == (StridedShard(0, 2), Shard(1), Replicate())
    with pytest.raises(LayoutError, match=r"got <.*Shard object.*> of type Shard"):
        Layout((8, 4), mesh, [fake("Shard"), Replicate(), Replicate()])


@pytest.mark.parametrize("name", ["Partial", "_Partial"])
def test_partial_is_refused(name: str) -> None:
    with pytest.raises(
        LayoutError, match=r"got Partial: its values are still to be summed.*reduce them first"
    ):
        Layout((8, 4), MESH, [fake(name), Replicate()])


def test_a_scalar_is_not_sharded() -> None:
    with pytest.raises(LayoutError, match="a tensor of rank 0, got 0; a scalar can only be replicated"):
        Layout((), Mesh([0, 1]), [Shard(0)])


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1,) * 9, r"expected at most 8 dimensions, got 9: \(1, 1, .*; merge some"),
        ((4, -1), r"expected extents of 0 or more, got shape \(4, -1\)"),
        ((2**30, 2**30), r"expected fewer than 2\*\*59 elements, so that bytes fit 64 bits"),
        ((2**40, 0, 2**40), r"expected fewer than 2\*\*59 elements"),
        ((2.5,), r"expected integers as the extents of a shape, got \(2\.5,\)"),
        (8, r"expected integers as the extents of a shape, got 8"),
        ("ab", r"expected integers as the extents of a shape, got 'ab'"),
    ],
)
def test_shapes(shape: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Layout(shape, Mesh([0]), [Replicate()])


def test_a_list_is_no_mesh() -> None:
    with pytest.raises(
        LayoutError,
        match=r"expected a Mesh as the mesh of a layout, got \[0, 1\] of type list; write Mesh\(\.\.\.\)",
    ):
        Layout((4,), [0, 1], [Shard(0)])


def test_arrays_of_another_shape() -> None:
    layout = Layout((4, 2), Mesh([0, 1]), [Shard(0)])
    with pytest.raises(LayoutError, match=r"expected a global array of shape \(4, 2\), got \(2, 4\)"):
        layout.slice_global(np.zeros((2, 4)), 0)


def test_boxes() -> None:
    with pytest.raises(LayoutError, match=r"as many starts as stops in a box, got \(0, 0\) and \(4,\)"):
        Box((0, 0), (4,))
    with pytest.raises(LayoutError, match=r"expected integers as stops of a box, got \(1\.5,\)"):
        Box((0,), (1.5,))


@pytest.mark.parametrize(("size", "parts"), [(-1, None), (4, 0), (4, -2)])
def test_segments(size: int, parts: int | None) -> None:
    with pytest.raises(
        LayoutError,
        match=rf"expected a whole number of . or more as .* segment, got {size if size < 0 else parts}",
    ):
        Segment(size, parts)


@pytest.mark.parametrize("factor", [0, -1])
def test_split_factors(factor: int) -> None:
    with pytest.raises(
        LayoutError, match=rf"expected a whole number of 1 or more as split_factor, got {factor}"
    ):
        StridedShard(0, split_factor=factor)


@pytest.mark.parametrize("make", [lambda: Shard("0"), lambda: StridedShard(0, 1.5), lambda: Segment(2.0)])
def test_what_is_no_integer(make: Any) -> None:
    with pytest.raises(LayoutError, match="expected a whole number.* as .*, got "):
        make()


def test_errors_are_the_built_in_ones() -> None:
    assert issubclass(LayoutError, M2nError)
    assert issubclass(LayoutError, ValueError)


def test_what_nvidia_calls_a_mesh() -> None:
    """`nccl.m2n.Mesh` takes dimensions and a first rank; here they would be ranks and names."""
    for call in (lambda: Mesh([2, 3], 4), lambda: Mesh([2, 3], start_rank=4)):  # type: ignore[arg-type]
        with pytest.raises(
            LayoutError, match=r"nccl.m2n's Mesh\(dims, start_rank\) is Mesh.arange\(dims, start"
        ):
            call()
