# SPDX-License-Identifier: Apache-2.0
"""A few plans written out: a change of any of them should be meant."""

from __future__ import annotations

import textwrap

import pytest

from nccl_m2n import Layout, Mesh, Plan, Replicate, Shard, Topology, Transfer, plan


def replicated_tensor_parallel() -> Plan:
    """Four row shards to four replicas on another host: a quarter over each NIC, the rest over NVLink."""
    source = Layout((4096, 4096), Mesh.arange((4,)), [Shard(0)])
    destination = Layout((4096, 4096), Mesh.arange((4,), start=4), [Replicate()])
    return plan(Transfer(source, destination, "bfloat16", "w"), Topology.regular(8, 4))


def chain() -> Plan:
    """One rank to two other hosts of two: the first hands on to the second."""
    source = Layout((1 << 20,), Mesh([0]), [Replicate()])
    destination = Layout((1 << 20,), Mesh([2, 3, 4, 5]), [Replicate()])
    return plan(Transfer(source, destination, "uint8", "w"), Topology.regular(6, 2))


def uneven() -> Plan:
    """10 rows over 3 and then over 4 ranks, every rank on a host of its own."""
    source = Layout((10, 3), Mesh.arange((3,)), [Shard(0)])
    destination = Layout((10, 3), Mesh.arange((4,), start=3), [Shard(0)])
    return plan(Transfer(source, destination, "float32", "w"), Topology.regular(7, 1))


def identity() -> Plan:
    layout = Layout((8, 8), Mesh([0, 1]), [Shard(0)])
    return plan(Transfer(layout, layout, "uint8", "w"))


# fmt: off
FLOWS = {
    replicated_tensor_parallel: [
        (0, 0, 8 << 20, 0, [(0, 4), (4, 5), (4, 6), (4, 7)]),
        (1, 0, 8 << 20, 1, [(1, 5), (5, 4), (5, 6), (5, 7)]),
        (2, 0, 8 << 20, 2, [(2, 6), (6, 4), (6, 5), (6, 7)]),
        (3, 0, 8 << 20, 3, [(3, 7), (7, 4), (7, 5), (7, 6)]),
    ],
    chain: [
        (0, 0, 1 << 19, 0, [(0, 2), (2, 3), (2, 4), (4, 5)]),
        (0, 1 << 19, 1 << 20, 0, [(0, 3), (3, 2), (3, 5), (5, 4)]),
    ],
    uneven: [
        (0, 0, 36, 0, [(0, 3)]),
        (1, 0, 12, 0, [(0, 4)]),
        (2, 0, 24, 1, [(1, 4)]),
        (3, 0, 24, 1, [(1, 5)]),
        (4, 0, 12, 2, [(2, 5)]),
        (5, 0, 12, 2, [(2, 6)]),
    ],
    identity: [],
}
# fmt: on


@pytest.mark.parametrize("make", FLOWS)
def test_flows(make) -> None:
    """Bundle, first byte, end, sender, and (from, to) of every hop."""
    made = make()
    made.check()
    found = [
        (
            *flow.tolist()[:4],
            [(h["source"].item(), h["destination"].item()) for h in made.hops[made.hops["flow"] == i]],
        )
        for i, flow in enumerate(made.flows)
    ]
    assert found == FLOWS[make]


def table(text: str) -> str:
    return textwrap.dedent(text).strip("\n")


def test_printed() -> None:
    assert str(replicated_tensor_parallel()) == table("""
        1 tensor, 32.0 MiB, from ranks 0-3 to ranks 4-7; 8 ranks in 2 domains of 4
                                reshard     direct  gather+broadcast
        flows                         4          4                 4
        network                32.0 MiB  128.0 MiB          32.0 MiB
          least there can be   32.0 MiB   32.0 MiB          32.0 MiB
        NVLink                 96.0 MiB        0 B         120.0 MiB
        local copies                0 B        0 B               0 B
        busiest NIC             8.0 MiB   32.0 MiB          32.0 MiB
          layouts allow         8.0 MiB    8.0 MiB           8.0 MiB
        rounds                       15          1                50
        messages                    224         16               768
        staging, busiest rank   4.6 MiB   64.0 MiB           2.3 MiB
    """)


def test_printed_when_nothing_moves() -> None:
    assert str(identity()) == table("""
        1 tensor, 64 B, from ranks 0-1 to ranks 0-1; 2 ranks in 1 domain of 2
                               reshard  direct  gather+broadcast
        flows                        0       0                 2
        network                    0 B     0 B               0 B
          least there can be       0 B     0 B               0 B
        NVLink                     0 B     0 B              96 B
        local copies              64 B    64 B              64 B
        busiest NIC                0 B     0 B               0 B
          layouts allow            0 B     0 B               0 B
        rounds                       0       0                 2
        messages                     0       0                 3
        staging, busiest rank      0 B     0 B             192 B
    """)


def test_only_reshard_is_compared() -> None:
    source = Layout((8,), Mesh([0]), [Replicate()])
    transfers = [Transfer(source, Layout((8,), Mesh([1]), [Replicate()]), "uint8", n) for n in "ab"]
    text = str(plan(transfers, method="direct"))
    assert text.startswith("2 tensors, 16 B, from ranks 0 to ranks 1; 2 ranks in 1 domain of 2\n")
    assert "reshard" not in text
    assert "gather+broadcast" not in text
