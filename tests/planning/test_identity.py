# SPDX-License-Identifier: Apache-2.0
"""What is there already does not travel."""

from __future__ import annotations

import pytest
from hypothesis import given

from nccl_m2n import Layout, Mesh, Plan, Replicate, Shard, Topology, Transfer, plan
from tests import strategies
from tests.planning import replay


@given(strategies.mesh_layouts())
def test_from_a_layout_to_itself(layout: Layout) -> None:
    made = plan(Transfer(layout, layout, "int16"), Topology.regular(24, 3))
    assert (len(made.flows), len(made.hops), made.rounds) == (0, 0, 0)
    assert all(len(made.program(rank).messages) == 0 for rank in layout.ranks)
    assert made.traffic().network_bytes == made.traffic().nvlink_bytes == 0
    assert not made.staging.any()


def test_replicas_keep_what_they_have() -> None:
    """Of replicas that become shards, every rank copies its part; nobody sends."""
    mesh = Mesh.arange((2, 3))
    source = Layout((12, 5), mesh, [Replicate(), Replicate()])
    destination = Layout((12, 5), mesh, [Shard(0), Shard(1)])
    made = plan(Transfer(source, destination, "float32"))
    assert made.rounds == 0
    assert made.traffic().local_bytes == 12 * 5 * 4
    replay.check(made)


def test_a_rank_in_neither_layout_does_nothing() -> None:
    source = Layout((8,), Mesh([0, 1]), [Shard(0)])
    destination = Layout((8,), Mesh([3, 4]), [Replicate()])
    program = plan(Transfer(source, destination), Topology.regular(6, 2)).program(2)
    tables = (program.chunks, program.messages, program.spans, program.local)
    assert [len(table) for table in tables] == [0, 0, 0, 0]
    assert program.staging_bytes == 0


def test_several_holders_of_one_tensor_share_the_sending() -> None:
    source = Layout((4 << 20,), Mesh.arange((4,)), [Replicate()])
    destination = Layout((4 << 20,), Mesh.arange((4,), start=4), [Replicate()])
    traffic = plan(Transfer(source, destination, "uint8"), Topology.regular(8, 4)).traffic()
    assert traffic.sent.tolist() == [1 << 20] * 4 + [0] * 4
    assert traffic.received.tolist() == [0] * 4 + [1 << 20] * 4


@pytest.mark.parametrize("method", ["reshard", "direct", "gather_broadcast"])
def test_no_transfers_at_all(method: str) -> None:
    made = plan([], method=method)
    made.check()
    assert (made.rounds, made.ranks, made.traffic().network_bytes) == (0, (), 0)
    assert isinstance(made, Plan)
    assert str(made)
