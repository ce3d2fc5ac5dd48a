# SPDX-License-Identifier: Apache-2.0
"""Every layout that is small: meshes up to 2 × 3, shapes up to (5, 4, 3)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from nccl_m2n import Layout, Mesh, Placement, Replicate, Segment, Shard, StridedShard
from tests.layout import checks

MESHES = [(1,), (2,), (3,), (1, 2), (1, 3), (2, 1), (2, 2), (2, 3)]


def placements(shape: tuple[int, ...], *, strided: bool = True) -> list[Placement]:
    made: list[Placement] = [Replicate()]
    for dim in range(len(shape)):
        made.append(Shard(dim))
        if strided:
            made += [StridedShard(dim, split_factor=factor) for factor in (2, 3)]
    return made


def layouts(shape: tuple[int, ...], mesh_shape: tuple[int, ...], **kinds: bool) -> Iterator[Layout]:
    mesh = Mesh.arange(mesh_shape)
    for combination in itertools.product(placements(shape, **kinds), repeat=len(mesh_shape)):
        yield Layout(shape, mesh, combination)


@pytest.mark.parametrize("mesh_shape", [*MESHES, (2, 2, 2), (2, 1, 3)])
def test_rank_0_and_1(mesh_shape: tuple[int, ...]) -> None:
    for shape in [(), *((n,) for n in range(6))]:
        for layout in layouts(shape, mesh_shape):
            checks.check(layout)


@pytest.mark.parametrize("mesh_shape", MESHES)
def test_rank_2(mesh_shape: tuple[int, ...]) -> None:
    for shape in itertools.product(range(6), range(5)):
        for layout in layouts(shape, mesh_shape):
            checks.check(layout)


@pytest.mark.parametrize("mesh_shape", MESHES)
def test_rank_3(mesh_shape: tuple[int, ...]) -> None:
    for shape in itertools.product(range(6), range(5), range(4)):
        for layout in layouts(shape, mesh_shape, strided=shape[2] == 3):
            checks.check_pieces(layout)
    for layout in layouts((5, 4, 3), mesh_shape):
        checks.check(layout)


def segmentations(extent: int) -> Iterator[tuple[Segment, ...]]:
    """Every way to write `extent` as one to three segments, each with no parts given, or 1 or 2."""
    for count in (1, 2, 3):
        for sizes in itertools.product(range(extent + 1), repeat=count):
            if sum(sizes) == extent:
                for parts in itertools.product((None, 1, 2), repeat=count):
                    yield tuple(map(Segment, sizes, parts))


@pytest.mark.parametrize("other", [Replicate(), Shard(0), StridedShard(0, split_factor=2)])
@pytest.mark.parametrize("extent", range(6))
def test_segments(extent: int, other: Placement) -> None:
    """Segments on either axis, beside every other placement and beside segments of their own kind."""
    mesh = Mesh.arange((2, 2))
    for segments in segmentations(extent):
        fused = Shard(0, segments=segments)
        checks.check_pieces(Layout((extent,), mesh, [fused, other]))
        checks.check_pieces(Layout((extent,), mesh, [other, fused]))


@pytest.mark.parametrize("extent", range(5))
def test_segments_over_segments(extent: int) -> None:
    mesh = Mesh.arange((2, 2))
    for left, right in itertools.product(segmentations(extent), repeat=2):
        if len(left) + len(right) < 5:
            checks.check_pieces(Layout((extent,), mesh, [Shard(0, segments=left), Shard(0, segments=right)]))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_segments_with_fewer_parts_than_ranks(ranks: int) -> None:
    for a, b in itertools.product(range(6), repeat=2):
        for parts in (n for n in range(1, ranks + 1) if ranks % n == 0):
            checks.check(Layout((a + b,), Mesh.arange((ranks,)), [Shard(0, segments=(a, Segment(b, parts)))]))
