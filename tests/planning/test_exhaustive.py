# SPDX-License-Identifier: Apache-2.0
"""All pairs of small layouts, carried out byte by byte."""

from __future__ import annotations

import itertools

import pytest

from nccl_m2n import Layout, Mesh, Placement, Replicate, Shard, StridedShard, Topology, Transfer, plan
from tests.planning import replay

MESHES = [(1,), (2,), (3,), (2, 2), (2, 3)]
# Destination ranks start here, source ranks at 6: disjoint before and behind, overlapping, equal.
STARTS = [0, 12, 8, 6, 5]
TOPOLOGIES = [None, Topology.regular(18, 6), Topology.regular(18, 2), Topology.regular(18, 4)]


def every_layout(shape: tuple[int, ...], kinds: list[Placement], start: int) -> list[Layout]:
    return [
        Layout(shape, Mesh.arange(mesh_shape, start), placements)
        for mesh_shape in MESHES
        for placements in itertools.product(kinds, repeat=len(mesh_shape))
    ]


@pytest.mark.parametrize("number", range(4))
def test_three_dimensions(number: int) -> None:
    """Plain shards of a (5, 4, 3) tensor; places of the meshes and topologies take turns."""
    kinds: list[Placement] = [Replicate(), Shard(0), Shard(1), Shard(2)]
    turns = itertools.product(STARTS, TOPOLOGIES)
    sources = every_layout((5, 4, 3), kinds, 6)[number::4]
    for source, (i, (start, topology)) in zip(itertools.cycle(sources), enumerate(turns), strict=False):
        for destination in every_layout((5, 4, 3), kinds, start)[i % 4 :: 4]:
            replay.check(plan(Transfer(source, destination, "int16"), topology))


KINDS = [
    Replicate(),
    Shard(0),
    Shard(0, segments=(3, 4)),
    StridedShard(0, split_factor=2),
    StridedShard(0, split_factor=3),
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_one_dimension(kind: Placement) -> None:
    """7 elements of 16 bytes, so that every element may go its own way."""
    turns = itertools.cycle(itertools.product(STARTS, TOPOLOGIES))
    for other, (start, topology) in zip(itertools.product(KINDS, repeat=3), turns, strict=False):
        source = Layout((7,), Mesh.arange((2, 2), 6), [kind, other[0]])
        destination = Layout((7,), Mesh.arange((2, 3), start), other[1:])
        replay.check(plan(Transfer(source, destination, "complex128"), topology))


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0)])
def test_little(shape: tuple[int, ...]) -> None:
    kinds = [Replicate(), Shard(0)] if shape else [Replicate()]
    for start, topology in itertools.product(STARTS, TOPOLOGIES):
        for source, destination in itertools.product(
            every_layout(shape, kinds, 6)[::2], every_layout(shape, kinds, start)[::2]
        ):
            replay.check(plan(Transfer(source, destination, "uint8"), topology))
