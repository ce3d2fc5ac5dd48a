# SPDX-License-Identifier: Apache-2.0
"""A placement kind is one file: block-cyclic, as an exercise, is known everywhere once it is entered."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nccl_m2n import (
    Layout,
    LayoutError,
    Links,
    LocalTransport,
    Mesh,
    Placement,
    Plan,
    PlanError,
    Replicate,
    Shard,
    StridedShard,
    Topology,
    Transfer,
    plan,
    reshard,
    simulate,
)
from nccl_m2n.layout.placement import KINDS, placement_kind, read_placement
from nccl_m2n.show import svg_layout, text_layout
from nccl_m2n.typing import Ints, Json
from tests.layout import checks
from tests.planning import replay


@dataclass(frozen=True, slots=True)
class BlockCyclic(Placement):
    """Blocks of `block` elements are dealt out to the ranks of the mesh axis in turn, as ScaLAPACK does it."""

    kind: ClassVar[str] = "cyclic"
    dim: int
    block: int

    def ranges(self, extents: Ints, size: int) -> tuple[Ints, Ints]:
        turns = -(-int(extents.max()) // (self.block * size)) or 1
        block = np.arange(turns) * size + np.arange(size)[:, None]  # (ranks, turns)
        lo = np.minimum(block * self.block, extents[:, :, None])
        return lo, np.minimum(lo + self.block, extents[:, :, None])

    def data(self) -> list[Json]:
        return [self.kind, self.dim, self.block]

    @classmethod
    def from_dtensor(cls, value: Any, name: str) -> Placement | None:
        return cls(value.dim, value.block) if name == "Dealt" else None


@pytest.fixture(autouse=True)
def entered() -> Iterator[None]:
    placement_kind(BlockCyclic)
    yield
    del KINDS["cyclic"]


def dealt(extent: int, block: int, size: int, rank: int) -> list[int]:
    """Naive: the indices of one rank."""
    return [i for i in range(extent) if i // block % size == rank]


@pytest.mark.parametrize(
    ("extent", "block", "size"), [(10, 2, 3), (7, 3, 2), (0, 2, 2), (5, 9, 3), (12, 1, 4)]
)
def test_layout(extent: int, block: int, size: int) -> None:
    layout = Layout((extent, 3), Mesh.arange((size,)), [BlockCyclic(-2, block)])
    assert layout.placements == (BlockCyclic(0, block),)
    everything = np.arange(extent * 3).reshape(extent, 3)
    for rank in range(size):
        rows = dealt(extent, block, size, rank)
        np.testing.assert_array_equal(layout.slice_global(everything, rank), everything[rows])
    checks.check_partition(layout)
    checks.check_locate(layout)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 40), st.integers(1, 7), st.sampled_from(["outer", "inner"]))
def test_it_nests_with_other_kinds(extent: int, block: int, where: str) -> None:
    placements: list[Placement] = [BlockCyclic(0, block), Shard(0)]
    layout = Layout((extent,), Mesh.arange((2, 3)), placements if where == "outer" else placements[::-1])
    for rank in range(6):
        a, b = layout.mesh.coordinate(rank)
        held = np.arange(extent)
        for placement, size, at in zip(layout.placements, (2, 3), (a, b), strict=True):
            if isinstance(placement, BlockCyclic):
                held = held[dealt(len(held), block, size, at)]
            else:
                step = -(-len(held) // size)
                held = held[at * step : (at + 1) * step]
        assert layout.slice_global(np.arange(extent), rank).tolist() == held.tolist()


def problem() -> Plan:
    source = Layout((12, 5), Mesh.arange((2, 2), names=("x", "y")), [BlockCyclic(0, 2), BlockCyclic(1, 1)])
    destination = Layout((12, 5), Mesh.arange((3,), start=4), [StridedShard(0, 2)])
    back = Transfer(destination, source, "int16", "back")
    return plan([Transfer(source, destination, "float32", "there"), back], Topology.regular(7, 2))


def test_plan_replay_digest_json_pickle_table_and_timeline() -> None:
    made = problem()
    made.check()
    replay.check(made)
    again = Plan.from_json(made.to_json())
    assert (again.digest, again.transfers) == (made.digest, made.transfers)
    other = Layout((12, 5), Mesh.arange((2, 2)), [BlockCyclic(0, 3), BlockCyclic(1, 1)])
    changed = Transfer(other, made.transfers[0].destination, "float32", "there")
    assert plan([changed, made.transfers[1]], made.topology).digest != made.digest
    assert pickle.loads(pickle.dumps(other)) == other
    assert "reshard" in str(made)
    assert simulate(made, Links()).seconds > 0


def test_show() -> None:
    layout = problem().transfers[0].source
    assert svg_layout(layout).count("<rect") >= 4
    assert "[0:2, 0:1] at (0, 0)" in text_layout(layout)


def test_reshard_in_one_call_with_a_placement_of_another_package() -> None:
    """A foreign class is told by its name, as DTensor's are."""
    foreign = type("Dealt", (SimpleNamespace,), {})(dim=0, block=2)
    everything = np.arange(40, dtype="int32").reshape(8, 5)
    mesh = Mesh.arange((2,))
    source = Layout((8, 5), mesh, [foreign])
    destination = Layout((8, 5), mesh, [Shard(1)])
    src = {r: source.slice_global(everything, r) for r in range(2)}
    dst = {r: np.zeros(destination.local_shape(r), "int32") for r in range(2)}
    reshard(
        src, dst, LocalTransport(ranks=2), src_mesh=mesh, src_placements=[foreign], dst_mesh=mesh,
        dst_placements=[Shard(1)], global_shape=(8, 5),
    )  # fmt: skip
    for rank in range(2):
        np.testing.assert_array_equal(dst[rank], destination.slice_global(everything, rank))


def test_what_no_one_entered_is_refused() -> None:
    """Neither taken for a replica when it is described or read, nor laid out."""
    del KINDS["cyclic"]
    try:
        with pytest.raises(LayoutError, match=r"expected Replicate, Shard or StridedShard, got BlockCyclic"):
            Layout((8,), Mesh([0, 1]), [BlockCyclic(0, 2)])
        with pytest.raises(
            LayoutError, match="expected a placement out of replicate, shard, strided, got 'cyclic'"
        ):
            read_placement(["cyclic", 0, 2])
        text = plan(Transfer(*[Layout((8,), Mesh([0, 1]), [Replicate()])] * 2)).to_json()
        with pytest.raises((LayoutError, PlanError), match="got 'replica'"):
            Plan.from_json(text.replace('"replicate"', '"replica"'))
        with pytest.raises(TypeError):
            Placement(0)  # type: ignore[abstract]
    finally:
        placement_kind(BlockCyclic)


def test_one_name_one_kind() -> None:
    class Other(BlockCyclic):
        __slots__ = ()

    with pytest.raises(LayoutError, match="expected a new name for the placement Other, got 'cyclic' again"):
        placement_kind(Other)


def test_ranges_that_do_not_ascend_are_refused() -> None:
    @dataclass(frozen=True, slots=True)
    class Backwards(BlockCyclic):
        kind: ClassVar[str] = "backwards"

        def ranges(self, extents: Ints, size: int) -> tuple[Ints, Ints]:
            lo, hi = BlockCyclic.ranges(self, extents, size)
            return lo[..., ::-1], hi[..., ::-1]

    placement_kind(Backwards)
    try:
        with pytest.raises(LayoutError, match="to give ranges that ascend"):
            Layout((8,), Mesh([0, 1]), [Backwards(0, 2)]).local_shape(0)
    finally:
        del KINDS["backwards"]
