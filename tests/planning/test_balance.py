# SPDX-License-Identifier: Apache-2.0
"""No NIC works much harder than the others."""

from __future__ import annotations

import numpy as np
import pytest

from nccl_m2n import Layout, Mesh, Placement, Plan, Replicate, Shard, Topology, Transfer, plan

R, S0, S1 = Replicate(), Shard(0), Shard(1)


def layout(shape: tuple[int, ...], start: int, *axes: tuple[int, Placement]) -> Layout:
    sizes, placements = zip(*axes, strict=True)
    return Layout(shape, Mesh.arange(sizes, start), placements)


def worst(made: Plan) -> float:
    """Bytes of the busiest NIC against the mean of those that must carry any."""
    traffic = made.traffic()
    used = np.maximum(traffic.sent, traffic.received)
    return float(used.max() / used[used > 0].mean())


LARGE = (256, 2048, 7168)
SYMMETRIC = {
    "TP4 to DP4": ((4096, 4096), [(4, S0)], [(4, R)], 4),
    "TP4 to TP2 x DP2": ((4096, 4096), [(4, S0)], [(2, R), (2, S0)], 4),
    "DP4 to TP4": ((4096, 4096), [(4, R)], [(4, S1)], 4),
    "TP4 to TP4 of the other dimension": ((4096, 4096), [(4, S0)], [(4, S1)], 4),
    "TP8 to DP8, domains of 4": ((4096, 4096), [(8, S0)], [(8, R)], 4),
    "TP8 to TP2 x DP4, domains of 2": ((4096, 4096), [(8, S0)], [(4, R), (2, S0)], 2),
    "TP4 to DP16": ((4096, 4096), [(4, S0)], [(16, R)], 4),
    "EP16 x DP8 to TP8 x DP16": (LARGE, [(8, R), (16, S0)], [(16, R), (8, S1)], 8),
    "EP64 x DP2 to TP32 x DP4": (LARGE, [(2, R), (64, S0)], [(4, R), (32, S1)], 8),
}


@pytest.mark.parametrize("name", SYMMETRIC)
def test_symmetric_cases(name: str) -> None:
    shape, source, destination, per_domain = SYMMETRIC[name]
    ranks = int(np.prod([n for n, _ in source]))
    others = int(np.prod([n for n, _ in destination]))
    one = layout(shape, 0, *source)
    two = layout(shape, ranks, *destination)
    made = plan(Transfer(one, two, "bfloat16"), Topology.regular(ranks + others, per_domain))
    made.check()
    assert worst(made) <= 1.05


def test_many_small_tensors_balance_as_one_large_one_does() -> None:
    tensors = [
        Transfer(layout((256, 64), 0, (4, S0)), layout((256, 64), 4, (2, R), (2, S0)), "bfloat16", f"t{i}")
        for i in range(500)
    ]
    made = plan(tensors, Topology.regular(8, 4))
    made.check()
    assert worst(made) <= 1.05
    assert len(made.flows) <= 16


def test_tensors_of_all_sizes_between_different_ranks() -> None:
    rng = np.random.default_rng(5)
    tensors = [
        Transfer(
            layout((rows, 128), 0, (2, R), (4, S0)), layout((rows, 128), 8, (2, S0), (4, R)), "int16", f"t{i}"
        )
        for i, rows in enumerate(rng.integers(8, 4000, 60).tolist())
    ]
    made = plan(tensors, Topology.regular(16, 4))
    made.check()
    assert worst(made) <= 1.05


def test_tiny_tensors_do_not_all_fall_on_one_rank() -> None:
    """What is too small to be cut starts at another rank each time."""
    tensors = [
        Transfer(
            Layout((64,), Mesh([i % 4]), [R]), Layout((64,), Mesh.arange((4,), 4), [R]), "float32", f"t{i}"
        )
        for i in range(64)
    ]
    traffic = plan(tensors, Topology.regular(8, 4)).traffic()
    assert traffic.sent[:4].tolist() == [16 * 256] * 4
    assert traffic.received[4:].tolist() == [16 * 256] * 4


def test_short_flows_are_spread_over_the_rounds_of_long_ones() -> None:
    """One long flow takes 64 rounds; a short one to each of 63 other ranks goes in a round of its own."""
    long = Transfer(layout((64 << 16,), 0, (1, R)), layout((64 << 16,), 1, (1, R)), "uint8", "long")
    short = [
        Transfer(layout((9,), 0, (1, R)), layout((9,), 2 + i, (1, R)), "uint8", f"{i}") for i in range(63)
    ]
    made = plan([long, *short], Topology.regular(65, 1), chunk_bytes=1 << 16)
    assert made.rounds == 64
    assert np.bincount(made.program(0).messages["round"]).max() <= 3
