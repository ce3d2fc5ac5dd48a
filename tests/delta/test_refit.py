# SPDX-License-Identifier: Apache-2.0
"""Refits that send what changed: baselines through subsets, versions, failures and forgetful ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from nccl_m2n import (
    Layout,
    LocalTransport,
    Mesh,
    Parameter,
    Refit,
    Replicate,
    Shard,
    StridedShard,
    Topology,
)

SIDES = {
    "rows": (
        Layout((24, 10), Mesh([0, 1, 2]), [Shard(0)]),
        Layout((24, 10), Mesh([[3, 4], [5, 6]]), [Replicate(), Shard(1)]),
    ),
    "strided": (
        Layout((13, 3), Mesh([[0, 1], [2, 3]]), [StridedShard(0, 2), Shard(0)]),
        Layout((13, 3), Mesh([4, 5]), [Shard(0)]),
    ),
    "fused": (
        Layout((12, 4), Mesh([0, 1]), [Shard(0, segments=(8, 4))]),
        Layout((12, 4), Mesh([6, 5, 4, 2]), [Shard(0)]),
    ),
    "everywhere": (
        Layout((7,), Mesh([0, 1]), [Replicate()]),
        Layout((7,), Mesh.arange((7,)), [Replicate()]),
    ),
}
RANKS = 7


class Sides:
    """Both sides of a small model in one process, and the values that its sources hold."""

    def __init__(self) -> None:
        self.values = {
            name: np.arange(np.prod(source.shape), dtype=np.int16).reshape(source.shape) * 10
            for name, (source, _) in SIDES.items()
        }
        self.arrays = {
            side: {
                rank: {
                    name: np.zeros(pair[side].local_shape(rank), np.int16)
                    for name, pair in SIDES.items()
                    if rank in pair[side].ranks
                }
                for rank in range(RANKS)
            }
            for side in (0, 1)
        }
        self.fill()
        given = [
            {
                r: [Parameter(n, SIDES[n][side], a) for n, a in held.items()]
                for r, held in self.arrays[side].items()
            }
            for side in (0, 1)
        ]
        topology = Topology([[0, 1, 2, 3], [4, 5, 6]])
        self.refit = Refit(LocalTransport(RANKS), *given, topology, delta=True)

    def fill(self) -> None:
        for rank, held in self.arrays[0].items():
            for name, array in held.items():
                array[...] = SIDES[name][0].slice_global(self.values[name], rank)

    def wrong(self, names: set[str]) -> list[str]:
        return [
            f"{name} on rank {rank}"
            for rank, held in self.arrays[1].items()
            for name, array in held.items()
            if name in names and (array != SIDES[name][1].slice_global(self.values[name], rank)).any()
        ]


class Baselines(RuleBasedStateMachine):
    """Whatever happens in between, what a run moves is then equal everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.sides = Sides()
        self.spoilt: set[int] = set()
        self.checked: set[str] = set()

    @rule(
        name=st.sampled_from(sorted(SIDES)), seed=st.integers(0, 99), share=st.sampled_from([0.02, 0.3, 1.0])
    )
    def change(self, name: str, seed: int, share: float) -> None:
        random = np.random.default_rng(seed)
        values = self.sides.values[name]
        values[random.random(values.shape) < share] = seed % 5  # few values: they come back
        self.sides.fill()
        self.checked.discard(name)

    @rule(
        only=st.none() | st.sets(st.sampled_from(sorted(SIDES)), min_size=1),
        version=st.none() | st.integers(0, 9),
    )
    def run(self, only: set[str] | None, version: int | None) -> None:
        if self.spoilt:
            self.sides.refit.forget(self.spoilt)
            self.spoilt = set()
        self.sides.refit.run(only=only, version=version)
        self.sides.refit.wait()
        assert self.sides.refit.version == version
        self.checked |= only or set(SIDES)

    @rule(rank=st.integers(0, RANKS - 1))
    def spoil(self, rank: int) -> None:
        for name, array in self.sides.arrays[1][rank].items():
            array[...] = -1
            self.checked.discard(name)
        self.spoilt.add(rank)

    @rule()
    def fail(self) -> None:
        """A version that is none: everything arrives, and is stamped nowhere."""
        self.sides.refit.run(version="new")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="version"):
            self.sides.refit.wait()

    @rule()
    def release(self) -> None:
        self.sides.refit.release()

    @invariant()
    def all_is_right(self) -> None:
        if not self.spoilt:
            assert self.sides.wrong(self.checked) == []

    def teardown(self) -> None:
        self.sides.refit.close()


Baselines.TestCase.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
test_baselines = Baselines.TestCase


def test_a_subset_that_brought_older_values_back_is_not_taken_for_the_latest() -> None:
    sides = Sides()
    sides.refit.run()
    sides.refit.wait()
    before = sides.values["rows"].copy()
    sides.values["rows"] += 1
    sides.fill()
    sides.refit.run(only=["rows"])
    sides.refit.wait()
    sides.values["rows"][...] = before  # as the binding of all parameters sent it last
    sides.fill()
    sides.refit.run()
    sides.refit.wait()
    assert sides.wrong(set(SIDES)) == []
    sides.refit.close()


def test_the_report_says_what_changed() -> None:
    sides = Sides()
    for share in (1.0, 0.0):
        sides.refit.run(version=1)
        sides.refit.wait()
        assert sides.refit.report is not None
        assert sides.refit.report.changed == share
        padding = sides.refit.report.network_bytes - share * sides.refit.report.dense_bytes
        assert 0 <= padding < share * 16 * len(sides.refit.plan.hops) + 1
    assert "0.00% changed" in str(sides.refit.report)
    assert sides.refit.verify() == []
    sides.arrays[1][4]["rows"][0, 0] += 1
    assert sides.refit.verify() == ["rows"]
    sides.refit.close()


def test_what_is_forgotten_is_the_same_on_all_ranks() -> None:
    sides = Sides()
    with pytest.raises(ValueError, match="as rank to forget, got .x."):
        sides.refit.forget(["x"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="expected a sequence of ranks to forget"):
        sides.refit.forget(3)  # type: ignore[arg-type]
    sides.refit.forget([3])
    sides.refit.close()
