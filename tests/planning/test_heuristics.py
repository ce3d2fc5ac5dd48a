# SPDX-License-Identifier: Apache-2.0
"""Every constant and branch of planning's heuristics: each test fails when its own is turned off or doubled.

`python -m tests.mutate` proves that, constant by constant and branch by branch. No test here reads a constant of the
package: numbers stand as they are meant.
"""

from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest

from nccl_m2n import Box, Layout, Mesh, Placement, Plan, Replicate, Shard, Topology, Transfer, plan
from nccl_m2n.planning.bundles import make_bundles
from nccl_m2n.planning.methods import others
from nccl_m2n.planning.options import PlanOptions
from nccl_m2n.planning.rounds import chunk_table, schedule, staging_by_rank
from nccl_m2n.planning.routes import FLOW, HOP, Routes
from nccl_m2n.planning.traffic import nic_bound

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
R, S0, S1 = Replicate(), Shard(0), Shard(1)
ENDLESS = 1 << 50  # staging that bounds nothing


def on(ranks: list[int] | range, shape: tuple[int, ...], placement: Placement) -> Layout:
    return Layout(shape, Mesh(list(ranks)), [placement])


def move(
    size: int, source: range, destination: range, held: Placement = S0, needed: Placement = R, name: str = "t"
) -> Transfer:
    """`size` bytes in one dimension."""
    return Transfer(on(source, (size,), held), on(destination, (size,), needed), "uint8", name)


def apart(ranks: int) -> Topology:
    """Every rank in a domain of its own."""
    return Topology.regular(ranks, 1)


def sizes(made: Plan) -> list[int]:
    return (made.flows["stop"] - made.flows["start"]).tolist()


def fullest_group(made: Plan) -> int:
    """Most messages that a rank has in one round, counted one by one."""
    hops = made.hops
    row, _, _, at = chunk_table(made.flows[hops["flow"]], made.chunk_rounds)
    number = np.zeros((made.world, made.rounds), np.int64)
    for end in ("source", "destination"):
        np.add.at(number, (hops[end][row], at + hops["depth"][row]), 1)
    return int(number.max())


# Cutting tapes.


def test_cuts_fall_on_multiples_of_16_bytes() -> None:
    made = plan(move(3_000_050, range(1), range(1, 4), R), Topology([[0], [1, 2, 3]]))
    assert made.flows["start"].tolist() == [0, 1_000_016, 2_000_032]


def test_what_is_short_is_not_cut_below_64_kib() -> None:
    for size, expected in ((256 * KIB, [64 * KIB] * 4), (128 * KIB, [64 * KIB] * 2), (100, [100])):
        made = plan(move(size, range(1), range(1, 5), R), Topology([[0], [1, 2, 3, 4]]))
        assert sizes(made) == expected


@pytest.mark.parametrize("shift", [-60 * KIB, -16, 16, 60 * KIB])
def test_cuts_near_the_end_of_a_stream_snap_to_it(shift: int) -> None:
    """Two streams that two needers share out evenly, but for less than 64 KiB: a stream for each."""
    tensors = [
        move(MIB + n, range(i, i + 1), range(2, 4), R, name=f"{i}") for i, n in enumerate((shift, -shift))
    ]
    assert len(plan(tensors, Topology([[0, 1], [2, 3]])).flows) == 2


@pytest.mark.parametrize("shift", [-70 * KIB, 70 * KIB])
def test_cuts_farther_off_do_not_snap(shift: int) -> None:
    tensors = [
        move(MIB + n, range(i, i + 1), range(2, 4), R, name=f"{i}") for i, n in enumerate((shift, -shift))
    ]
    assert len(plan(tensors, Topology([[0, 1], [2, 3]])).flows) == 3


def test_short_tapes_start_at_another_member_each() -> None:
    """Three sets of three ranks that all have rank 4 in them."""
    needers = [[4, 5, 6], [4, 5, 7], [4, 6, 7]]
    source = on(range(1), (256,), R)
    tensors = [Transfer(source, on(ranks, (256,), R), "uint8", f"{ranks}") for ranks in needers]
    received = plan(tensors, Topology.regular(8, 4)).traffic().received
    assert sorted(received[4:].tolist()) == [0, 256, 256, 256]


def test_flows_keep_to_their_rail() -> None:
    """Whatever the order of the shards, the rank at position i of its domain sends to the one at position i."""
    source = on([3, 1, 0, 2], (4 * MIB,), S0)
    made = plan(Transfer(source, on(range(4, 8), (4 * MIB,), R), "uint8"), Topology.regular(8, 4))
    crossing = made.hops[made.hops["network"]]
    assert (crossing["destination"] - crossing["source"]).tolist() == [4] * 4


# Feeding domains.


def test_sources_feed_as_many_domains_as_keep_them_no_busier_than_needers() -> None:
    """200 / 197 is 1.5 % more than a needer receives and 200 / 195 is 2.6 %."""
    for senders, deepest in ((197, 0), (195, 1)):
        near = [range(senders), range(200, 300), range(300, 400)]
        made = plan(move(400 * MIB, near[0], range(200, 400)), Topology(near))
        assert int(made.hops["depth"][made.hops["network"]].max()) == deepest


def test_holders_of_a_domain_serve_it_unless_they_send_more_than_needers_receive() -> None:
    """101 needers and 100 holders are 1 % more, 52 and 50 are 4 %."""
    for holders, needers, deepest in ((100, 101, 0), (50, 52, 1)):
        made = plan(move(100 * MIB, range(holders), range(holders, holders + needers)))
        assert made.depth == deepest


def test_as_many_holders_as_needers_serve_them_directly_in_a_busy_domain() -> None:
    busy = move(8 * MIB, range(1), range(1, 8), R, name="busy")
    even = move(8 * MIB, range(8, 10), range(10, 12), R, name="even")
    made = plan([busy, even])
    assert made.depth == 1
    assert set(made.hops["depth"][made.hops["destination"] >= 10].tolist()) == {0}


def test_chains_differ_by_one_domain_at_most() -> None:
    """Two ranks feed two of five domains of one rank each; the others take it from there."""
    made = plan(move(10 * MIB, range(2), range(2, 7)), Topology([[0, 1], [2], [3], [4], [5], [6]]))
    deepest = [int(made.hops["depth"][made.hops["destination"] == rank].max()) for rank in range(2, 7)]
    assert deepest == [0, 1, 2, 0, 1]


def test_what_a_sender_feeds_to_several_chains_is_packed_once() -> None:
    made = plan(move(8 * MIB, range(4), range(4, 8)), Topology([[0, 1, 2, 3], [4, 5], [6, 7]]))
    assert np.bincount(made.hops["flow"][made.hops["network"]]).tolist() == [2] * len(made.flows)
    packed = [p.chunks["bytes"][~p.chunks["received"]].sum() for p in map(made.program, range(4))]
    assert packed == [2 * MIB] * 4


# Rounds.


def over_network(size: int, replicas: int, **options: int) -> Plan:
    """From as many ranks as there are replicas, all of these in another domain."""
    ranks = range(replicas), range(replicas, 2 * replicas)
    return plan(move(size, *ranks), Topology(ranks), **options)


def test_24_rounds_for_each_crossing_of_a_chain() -> None:
    made = plan(move(256 * MIB, range(1), range(1, 3), R), apart(3))
    assert (made.chunk_rounds, made.depth) == (48, 1)


@pytest.mark.parametrize(("replicas", "rounds"), [(2, 12), (4, 14), (8, 24)])
def test_rounds_hide_what_is_handed_on_last(replicas: int, rounds: int) -> None:
    """3 / 9 / 0.025 is 13.3; twelve rounds at least, 24 at most."""
    assert over_network(replicas * 64 * MIB, replicas).chunk_rounds == rounds


def test_a_round_moves_a_mebibyte_at_least() -> None:
    """Four ranks of 4 MiB hand on 12 MiB each; of 1 MiB, 3 MiB: three rounds."""
    assert over_network(4 * MIB, 4).chunk_rounds == 3


@pytest.mark.parametrize(("size", "rounds"), [(4 * GIB, 8), (384 * MIB, 3), (100 * MIB, 1)])
def test_few_rounds_for_a_single_hop(size: int, rounds: int) -> None:
    made = plan(move(size, range(1), range(1, 2)), apart(2), staging_bytes=ENDLESS)
    assert made.chunk_rounds == rounds


def test_staging_of_256_mib_where_none_is_said() -> None:
    staging = int(Plan.of([move(8 * GIB, range(1), range(1, 2))], apart(2), PlanOptions()).staging.max())
    assert 128 * MIB < staging <= 256 * MIB


def test_no_more_rounds_than_staging_asks_for() -> None:
    """Where the first guess does not fit, rounds grow little by little."""
    long, short = (
        move(n, range(i, i + 1), range(2, 3), name=f"{n}") for i, n in enumerate((64 * MIB, 48 * MIB))
    )
    staging = int(plan([long, short], apart(3), staging_bytes=20 * MIB).staging.max())
    assert 16 * MIB < staging <= 20 * MIB


def test_short_flows_get_a_chunk_for_each_64_kib() -> None:
    """Beside a flow of 64 MiB in 64 chunks, one of 256 KiB is spread over four rounds."""
    tensors = [
        move(n, range(2 * i, 2 * i + 1), range(2 * i + 1, 2 * i + 2), name=f"{i}")
        for i, n in enumerate((64 * MIB, 256 * KIB))
    ]
    made = plan(tensors, apart(4), chunk_bytes=MIB)
    assert sorted(zip(sizes(made), made.flows["chunks"].tolist(), strict=True)) == [
        (256 * KIB, 4),
        (64 * MIB, 64),
    ]


def test_receivers_are_served_one_after_another() -> None:
    """Eight short flows of one sender beside a long one: one in every eighth round, not all in the first."""
    long = move(64 * MIB, range(9, 10), range(10, 11), name="long")
    short = [move(KIB, range(1), range(i, i + 1), name=f"{i}") for i in range(1, 9)]
    made = plan([long, *short], apart(11), chunk_bytes=MIB)
    assert np.bincount(made.program(0).messages["round"]).max() == 1
    back = [Transfer(t.destination, t.source, "uint8", t.name) for t in short]
    made = plan([long, *back], apart(11), chunk_bytes=MIB)
    assert np.bincount(made.program(0).messages["round"]).max() == 1


# Groups of messages.


def test_a_group_has_1024_messages_at_most() -> None:
    made = plan(move(1500 * KIB, range(1), range(1, 1501), R, S0))
    assert made.chunk_rounds == 2
    assert 512 < fullest_group(made) <= 1024


@pytest.mark.parametrize("method", ["reshard", "direct", "gather_broadcast"])
def test_1500_replicas_in_a_domain(method: str) -> None:
    """The largest group obeys, not their mean; and a rank hands a chunk to 256 others at most."""
    made = plan(move(4 * MIB, range(1), range(1, 1501), R), method=method)
    assert fullest_group(made) <= 1024
    _, at_once = np.unique(made.hops["flow"] * made.world + made.hops["source"], return_counts=True)
    assert at_once.max() == 256


def test_handing_on_through_others_reaches_everyone_once_and_evenly() -> None:
    made = plan(move(100 * MIB, range(300), range(300, 600)), Topology([range(300), range(300, 600)]))
    made.check()
    assert made.depth == 2
    sent = made.traffic().nvlink_sent[300:]
    assert sent.max() <= 1.05 * sent.mean()


def meeting(flows: int, size: int) -> Routes:
    """Every flow has another sender and another entry, and all are handed on to one rank."""
    number = np.arange(flows)
    made, hops = np.zeros(flows, FLOW), np.zeros(2 * flows, HOP)
    made["bundle"], made["stop"], made["sender"] = number, size, number
    hops["flow"], hops["depth"] = np.repeat(number, 2), np.tile([0, 1], flows)
    hops["source"] = np.stack([number, flows + number], axis=1).ravel()
    hops["destination"] = np.stack([flows + number, np.full(flows, 2 * flows)], axis=1).ravel()
    hops["network"] = hops["depth"] == 0
    return Routes(made, hops)


def test_flows_that_take_no_turns_do_not_meet_in_one_group() -> None:
    """1,100 pairs of ranks know nothing of each other; their flows are spread over rounds all the same."""
    routes = meeting(1100, 16)
    rounds = schedule(routes, 2201, None, ENDLESS)
    _, _, _, at = chunk_table(routes.flows, rounds)
    assert np.bincount(at).max() <= 1024
    assert rounds <= 4


def test_counting_loads_takes_little_memory() -> None:
    """Of a million chunks, some 260,000 at once."""
    routes = meeting(1 << 14, MIB)
    routes.flows["chunks"] = 64
    for end in ("source", "destination"):
        routes.hops[end] %= 128
    routes.flows["sender"] %= 128
    tracemalloc.start()
    staging_by_rank(routes, 128, 100)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 * MIB


# Turns of big flows, and rounds for those that take none.


def all_pairs(ranks: int, size: int) -> Plan:
    """Each of some ranks sends `size` bytes to each of as many others."""
    pairs = [(i, j) for i in range(ranks) for j in range(ranks)]
    tensors = [
        move(size, range(i, i + 1), range(ranks + j, ranks + j + 1), name=f"{i}.{j}") for i, j in pairs
    ]
    return plan(tensors, apart(2 * ranks), staging_bytes=ENDLESS)


def test_flows_of_an_eighth_of_a_nic_take_turns() -> None:
    """A quarter each: in one of four rounds. A sixteenth each: in all eight, though turns would be perfect."""
    assert set(all_pairs(4, 128 * MIB).flows["chunks"].tolist()) == {1}
    assert set(all_pairs(16, 128 * MIB).flows["chunks"].tolist()) == {8}


def test_turns_that_leave_nics_idle_are_not_taken() -> None:
    """Seven flows in eight rounds would take 1.14 times what the NIC needs; 64 rounds of 33 MiB instead."""
    made = all_pairs(7, 300 * MIB)
    assert (made.chunk_rounds, set(made.flows["chunks"].tolist())) == (64, {64})


def test_the_fill_of_a_chain_is_no_fault_of_turns() -> None:
    """Six domains one after the other take 5 of 32 rounds more, with turns or without."""
    shape = (1 << 12, 1 << 12)
    destination = Layout(shape, Mesh.arange((6, 4), start=4), [R, S0])
    transfer = Transfer(Layout(shape, Mesh.arange((4,)), [S1]), destination, "float64")
    made = plan(transfer, Topology.regular(28, 4), staging_bytes=ENDLESS)
    assert (made.chunk_rounds, set(made.flows["chunks"].tolist())) == (32, {8})


def test_where_senders_meet_rounds_are_gentle() -> None:
    """4 MiB a round for the busiest receiver would be 270 / 4; but 64 rounds are the most."""
    amounts = {(0, 0): 6, (1, 0): 5, (2, 0): 7, (1, 1): 8}
    tensors = [
        move(n * 15 * MIB, range(i, i + 1), range(3 + j, 4 + j), name=f"{i}.{j}")
        for (i, j), n in amounts.items()
    ]
    made = plan(tensors, apart(5), staging_bytes=ENDLESS)
    assert made.traffic().busiest == 270 * MIB
    assert made.chunk_rounds == 64


def test_a_sender_alone_needs_no_gentle_rounds() -> None:
    tensors = [move(n * MIB, range(1), range(j, j + 1), name=f"{j}") for j, n in ((1, 300), (2, 1))]
    assert plan(tensors, apart(3), staging_bytes=ENDLESS).chunk_rounds == 2


# What is printed.


@pytest.mark.parametrize(("replicas", "names"), [(220, ["direct", "gather_broadcast"]), (260, [])])
def test_other_methods_are_compared_as_far_as_they_make_50_000_hops(replicas: int, names: list[str]) -> None:
    bundles = make_bundles([move(MIB, range(200), range(200, 200 + replicas))])
    assert others(bundles) == names


@pytest.mark.parametrize(("ranks", "least"), [(500, 9000), (600, 16)])
def test_up_to_512_sets_of_ranks_are_asked_for_the_bound_of_nics(ranks: int, least: int) -> None:
    """One of many pairs has much more to move than the others; beyond, only their mean is told."""
    ends = [0, *range(9000, 9000 + ranks)]
    boxes = [Box((a,), (b,)) for a, b in itertools.pairwise(ends)]
    source, destination = (
        Layout.from_pieces((ends[-1],), {first + i: [box] for i, box in enumerate(boxes)})
        for first in (0, ranks)
    )
    sides = Topology([range(ranks), range(ranks, 2 * ranks)])
    assert nic_bound(make_bundles([Transfer(source, destination, "uint8")]), sides) == least
