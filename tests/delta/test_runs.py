# SPDX-License-Identifier: Apache-2.0
"""Bindings that send what changed: what they say, what they forget, what they refuse."""

from __future__ import annotations

import numpy as np
import pytest

from nccl_m2n import (
    Layout,
    LocalTransport,
    Mesh,
    PlanError,
    Replicate,
    Shard,
    StridedShard,
    Topology,
    Transfer,
    plan,
)
from nccl_m2n.planning.delta import WIDE_BYTES, Chunks, WideRun

ROWS = Layout((4096, 64), Mesh([0, 1]), [Shard(0)])
COLUMNS = Layout((4096, 64), Mesh([[2, 3], [4, 5]]), [Replicate(), Shard(1)])
TOPOLOGY = Topology([[0, 1], [2, 3], [4, 5]])


class Pair:
    """Rows on two ranks, columns twice on two others, bound to send what changed."""

    def __init__(self) -> None:
        self.values = np.arange(4096 * 64, dtype=np.uint16).reshape(4096, 64)
        self.source = {r: ROWS.slice_global(self.values, r).copy() for r in (0, 1)}
        self.destination = {r: np.zeros((4096, 32), np.uint16) for r in (2, 3, 4, 5)}
        made = plan(Transfer(ROWS, COLUMNS, "uint16", "w"), TOPOLOGY)
        self.bound = made.bind(LocalTransport(6), {"w": self.source}, {"w": self.destination}, delta=True)

    def change(self, count: int, by: int = 1) -> None:
        """Change the first elements of every row."""
        self.values[:, :count] += np.uint16(by % 65536)
        for rank, array in self.source.items():
            array[...] = ROWS.slice_global(self.values, rank)

    def run(self) -> None:
        self.bound.run()
        self.bound.wait()

    def wrong(self) -> int:
        return sum(
            int((array != COLUMNS.slice_global(self.values, r)).sum())
            for r, array in self.destination.items()
        )


def test_the_first_run_sends_all_and_the_next_what_changed() -> None:
    pair = Pair()
    whole = 2 * pair.values.nbytes
    pair.run()
    assert pair.bound.changes is not None
    assert (pair.bound.changes.changed, pair.bound.changes.network_bytes) == (1.0, whole)
    pair.run()
    assert (pair.bound.changes.changed, pair.bound.changes.network_bytes) == (0.0, 0)
    pair.change(1)
    pair.run()
    assert pair.bound.changes.changed == 1 / 64
    assert pair.bound.changes.dense_bytes == whole
    assert pair.bound.changes.network_bytes < 0.04 * whole
    assert pair.wrong() == 0
    pair.bound.close()


def test_a_change_that_is_taken_back_is_no_change() -> None:
    pair = Pair()
    pair.run()
    pair.change(2)
    pair.change(2, by=-1)
    pair.run()
    assert pair.bound.changes is not None and pair.bound.changes.network_bytes == 0


def test_what_others_wrote_stays_until_it_is_forgotten() -> None:
    pair = Pair()
    pair.run()
    pair.destination[3][...] = 7
    pair.destination[4][...] = 7
    pair.run()
    assert pair.wrong() > 0  # nobody told
    pair.bound.forget([3])
    pair.run()
    assert (pair.destination[3] == COLUMNS.slice_global(pair.values, 3)).all()
    pair.bound.forget()
    pair.run()
    assert pair.wrong() == 0
    assert pair.bound.changes is not None and pair.bound.changes.changed == 1.0


def test_the_baseline_is_one_copy_of_the_model_over_all_holders() -> None:
    source = Layout((512, 64), Mesh([[0, 1], [2, 3]]), [Replicate(), Shard(0)])
    target = Layout((512, 64), Mesh.arange((4,), start=4), [Replicate()])
    made = plan(Transfer(source, target, "float32", "w"), Topology.regular(8, 4))
    sources = {r: np.zeros((256, 64), np.float32) for r in range(4)}
    targets = {r: np.zeros((512, 64), np.float32) for r in range(4, 8)}
    with made.bind(LocalTransport(8), {"w": sources}, {"w": targets}, delta=True) as bound:
        assert bound.baseline_bytes == 512 * 64 * 4
    with made.bind(LocalTransport(8), {"w": sources}, {"w": targets}) as bound:
        assert bound.baseline_bytes == 0


@pytest.mark.parametrize("delta", ["yes", 2, None, [True]])
def test_delta_is_true_false_or_host(delta: object) -> None:
    made = plan(Transfer(ROWS, ROWS, "uint16", "w"))
    with pytest.raises(PlanError, match="expected delta to be True, False or 'host', got"):
        made.bind(LocalTransport(6), {}, {}, delta=delta)  # type: ignore[arg-type]


def test_casts_are_compared_after_the_cast() -> None:
    source = {0: np.full((8, 8), 1.0, np.float32)}
    target = {1: np.zeros((8, 8), np.float16)}
    one, other = Layout((8, 8), Mesh([0]), [Shard(0)]), Layout((8, 8), Mesh([1]), [Shard(0)])
    made = plan(Transfer(one, other, "float32", "w", "float16"))
    with made.bind(LocalTransport(2), {"w": source}, {"w": target}, delta=True) as bound:
        bound.run()
        bound.wait()
        source[0] += 1e-6  # less than a step of float16
        bound.run()
        bound.wait()
        assert bound.changes is not None and bound.changes.changed == 0.0
        source[0][3, 3] = 2.0
        bound.run()
        bound.wait()
        assert target[1][3, 3] == 2.0


def test_chunks_of_several_sizes_take_the_smallest_unit_and_go_whole_where_larger_ones_are_cast() -> None:
    one, other = Layout((7,), Mesh([0]), [Shard(0)]), Layout((7,), Mesh([1]), [Shard(0)])
    kinds = [("float64", "float32"), ("uint16", None), ("uint8", None)]
    transfers = [Transfer(one, other, a, f"t{i}", b) for i, (a, b) in enumerate(kinds)]
    for some, unit, whole in ((transfers, 1, True), (transfers[:1], 4, False), (transfers[1:], 1, False)):
        chunks = Chunks.of(plan(some))
        assert (chunks.unit.tolist(), chunks.whole.tolist()) == ([unit], [whole])


def test_wide_rounds_are_as_wide_as_there_is_use_in_and_staging_for() -> None:
    source = Layout((64, 1 << 20), Mesh.arange((4,)), [Shard(0)])
    target = Layout((64, 1 << 20), Mesh.arange((4,), start=4), [Replicate()])
    made = plan(Transfer(source, target, "bfloat16", "w"), Topology.regular(8, 4), staging_bytes=64 << 20)
    chunks = Chunks.of(made)
    slots = chunks.dense_slots()
    units = chunks.nbytes // chunks.unit
    widths = {}
    for share in (0.0, 0.01, 0.05, 0.1, 1.0):
        run = WideRun.of(chunks, np.round(units * share).astype(np.int64), slots)
        packed, received = chunks.loads(run.wide, run.sizes.nbytes)
        assert (packed.max(axis=1) <= slots[0]).all() and (received.max(axis=1) <= slots[1]).all()
        widths[share] = int(run.wide.max()) + 1
        if 1 < widths[share] < chunks.rounds:
            assert int((packed + received).max()) >= WIDE_BYTES / 2
    assert widths[0.0] == 1
    assert widths[0.01] < widths[0.05] < widths[0.1] <= chunks.rounds
    assert widths[1.0] == chunks.rounds


def test_a_strided_shard_changes_where_it_is() -> None:
    source = Layout((13, 5), Mesh([[0, 1], [2, 3]]), [StridedShard(0, 2), Shard(0)])
    target = Layout((13, 5), Mesh([4]), [Replicate()])
    values = np.arange(65, dtype=np.int64).reshape(13, 5)
    sources = {r: source.slice_global(values, r).copy() for r in range(4)}
    targets = {4: np.zeros((13, 5), np.int64)}
    made = plan(Transfer(source, target, "int64", "w"))
    with made.bind(LocalTransport(5), {"w": sources}, {"w": targets}, delta=True) as bound:
        for step in range(5):
            values[step::3, step % 5] += 100
            for r, array in sources.items():
                array[...] = source.slice_global(values, r)
            bound.run()
            bound.wait()
            assert (targets[4] == values).all()


def test_elements_that_are_cast_arrive_whole_beside_smaller_ones() -> None:
    """A message is compared in units of its smallest elements, of which a part of a larger one may change."""
    one, other = (Layout((64,), Mesh([rank]), [Replicate()]) for rank in (0, 1))
    made = plan([Transfer(one, other, "float16", "cast", "float64"), Transfer(one, other, "uint8", "bytes")])
    source = {"cast": {0: np.full(64, 7, np.float16)}, "bytes": {0: np.zeros(64, np.uint8)}}
    got = {"cast": {1: np.zeros(64)}, "bytes": {1: np.ones(64, np.uint8)}}
    with made.bind(LocalTransport(2), source, got, delta=True) as bound:
        bound.run()
        bound.wait()
        for value in (7.5, -23.0):  # another low byte, and both bytes
            source["cast"][0][5] = value
            bound.run()
            bound.wait()
            assert np.array_equal(got["cast"][1], source["cast"][0])
