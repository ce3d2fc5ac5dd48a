# SPDX-License-Identifier: Apache-2.0
"""The cost model: against clocks on a wall, against a naive twin, and where the answer is known."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nccl_m2n import (
    Layout,
    Links,
    Mesh,
    Plan,
    PlanError,
    Replicate,
    Shard,
    Topology,
    Transfer,
    plan,
    simulate,
)
from nccl_m2n.planning.rounds import chunk_table, chunks_in_round
from tests.planning.test_replay import METHODS, topologies, transfers

# Real NCCL 2.32 on emulated hosts: 256 MiB, sharded over the first host, replicated over all the others.
# Hosts, ranks a host, GB/s of a NIC; milliseconds of the scheme, of direct sends, of gather and broadcast.
MEASURED = [
    (2, 4, 0.49, (136, 544, 544)),
    (4, 2, 0.49, (286, 1624, 546)),
    (3, 4, 0.245, (286, 2174, 1090)),
]
EMULATED = Links(nic_gbytes=0.49, nvlink_gbytes=20, round_seconds=50e-6)


def over_hosts(hosts: int, per_host: int, method: str = "reshard", **options) -> Plan:
    """256 MiB from the first host's ranks, sharded, to all others, replicated."""
    ranks = hosts * per_host
    source = Layout((8192, 8192), Mesh.arange((per_host,)), [Shard(0)])
    destination = Layout((8192, 8192), Mesh.arange((ranks - per_host,), start=per_host), [Replicate()])
    transfer = Transfer(source, destination, "float32")
    return plan(transfer, Topology.regular(ranks, per_host), method=method, **options)


@pytest.mark.parametrize(("hosts", "per_host", "nic", "measured"), MEASURED)
def test_it_tells_what_was_measured(hosts: int, per_host: int, nic: float, measured: tuple[int, ...]) -> None:
    links = dataclasses.replace(EMULATED, nic_gbytes=nic)
    told = [1e3 * simulate(over_hosts(hosts, per_host, m), links).seconds for m in METHODS]
    np.testing.assert_allclose(told, measured, rtol=0.05)


def naive(made: Plan, links: Links) -> tuple[float, np.ndarray]:
    """Seconds and busy links of a plan, rank by rank and message by message out of the programs."""
    programs = [made.program(rank) for rank in range(made.world)]
    speed = {True: links.nic_gbytes * 1e9, False: links.nvlink_gbytes * 1e9}
    pack = links.pack_gbytes * 1e9
    local = np.zeros(made.world)
    for rank, program in enumerate(programs):
        sizes = [t.wire_size for t in made.transfers]
        for cell in program.source_cells[np.unique(program.local["source"])]:
            local[rank] += int(cell["extent"].prod()) * sizes[cell["transfer"]]
    rounds = made.rounds
    busy = np.zeros((4, made.world))
    packed, unpacked = np.zeros((2, rounds + 2, made.world))
    load = np.zeros((rounds, 4, made.world))
    pairs: list[set[tuple[int, int]]] = [set() for _ in range(rounds)]
    domain_of = made.topology.domain_of
    for rank, program in enumerate(programs):
        for chunk in program.chunks:
            side = unpacked if chunk["received"] else packed
            side[chunk["round"], rank] += int(chunk["bytes"]) / pack
        for message in program.messages:
            peer, x = int(message["peer"]), int(message["round"])
            network = domain_of(rank) != domain_of(peer)
            row = (0 if network else 2) + (0 if message["send"] else 1)
            load[x, row, rank] += int(program.chunks["bytes"][message["chunk"]]) / speed[network]
            pairs[x].add((rank, peer))
    clock = packed[0].copy()
    for x in range(rounds):
        before = unpacked[x - 1] if x else 0
        after = clock + before + packed[x + 1] + local / pack / rounds
        for a, b in pairs[x]:
            share = max(load[x, :, a].max(), load[x, :, b].max())
            after[a] = max(after[a], max(clock[a], clock[b]) + links.round_seconds + share)
        clock = after
        busy += load[x]
    end = clock + (unpacked[rounds - 1] if rounds else local / pack)
    return float(end.max(initial=0)), busy


@settings(max_examples=60)
@given(
    transfers(),
    topologies(),
    st.sampled_from(METHODS),
    st.sampled_from([None, 1, 16, 100]),
    st.sampled_from([Links(), Links(1e-6, 5e-6, 1e-3, 2e-6), Links(round_seconds=0)]),
)
def test_its_naive_twin_says_the_same(made, topology, method, chunk_bytes, links) -> None:
    made = plan(made, topology, method=method, chunk_bytes=chunk_bytes)
    timeline = simulate(made, links)
    seconds, busy = naive(made, links)
    np.testing.assert_allclose(timeline.seconds, seconds, rtol=1e-9)
    np.testing.assert_allclose(timeline.busy, busy, rtol=1e-9)
    assert timeline.seconds >= timeline.wire_seconds * (1 - 1e-9)
    assert timeline.round_seconds.sum() <= timeline.seconds * (1 + 1e-9)


@settings(max_examples=60)
@given(transfers(), st.sampled_from([None, 1, 16, 100]))
def test_the_chunks_of_a_round_are_those_of_the_table(made, chunk_bytes) -> None:
    made = plan(made, chunk_bytes=chunk_bytes)
    row, lo, hi, at = chunk_table(made.flows, max(made.chunk_rounds, 1))
    for x in range(-1, made.chunk_rounds + 1):
        rows, size = chunks_in_round(made.flows, max(made.chunk_rounds, 1), np.full(len(made.flows), x))
        assert rows.tolist() == row[at == x].tolist()
        assert size.tolist() == (hi - lo)[at == x].tolist()


def test_busy_links_are_the_traffic() -> None:
    made = over_hosts(3, 4)
    timeline, traffic = simulate(made, EMULATED), made.traffic()
    np.testing.assert_allclose(timeline.network_sent * 0.49e9, traffic.sent)
    np.testing.assert_allclose(timeline.network_received * 0.49e9, traffic.received)
    np.testing.assert_allclose(timeline.nvlink_sent * 20e9, traffic.nvlink_sent)
    np.testing.assert_allclose(timeline.nvlink_received * 20e9, traffic.nvlink_received)
    assert timeline.wire_seconds == timeline.network_sent[timeline.busiest]
    assert timeline.ends.shape == (made.rounds, 12)
    assert timeline.gbytes * 1e9 * timeline.seconds == pytest.approx(
        traffic.network_bytes + traffic.nvlink_bytes
    )


@pytest.mark.parametrize("method", METHODS)
def test_faster_links_never_take_longer(method: str) -> None:
    made = over_hosts(3, 4, method)
    for name in ("nic_gbytes", "nvlink_gbytes", "pack_gbytes"):
        times = [simulate(made, Links(**{name: speed})).seconds for speed in (0.1, 1, 10, 100)]
        assert times == sorted(times, reverse=True)
    assert simulate(made, Links(round_seconds=0)).seconds < simulate(made, Links(round_seconds=1)).seconds


def test_rounds_fill_the_pipeline() -> None:
    """Two hops: in n chunks they take (n + 1) / n of the bytes' time, where the slower is the network."""
    links = Links(nic_gbytes=1, nvlink_gbytes=1, round_seconds=0, pack_gbytes=1e9)
    made = over_hosts(2, 2, chunk_bytes=16 << 20)
    assert made.chunk_rounds == 8
    hop = (128 << 20) / 1e9
    assert simulate(made, links).seconds == pytest.approx(hop * 9 / 8, rel=1e-6)


def test_nothing_takes_no_time() -> None:
    assert simulate(plan([])).seconds == 0
    layout = Layout((0, 4), Mesh.arange((2,)), [Shard(1)])
    timeline = simulate(plan(Transfer(layout, layout)))
    assert timeline.seconds == timeline.wire_seconds == timeline.gbytes == timeline.busiest == 0
    assert "seconds" in str(timeline)


def test_copies_within_a_rank_take_the_time_of_packing() -> None:
    layout = Layout((1000, 1000), Mesh.arange((2,)), [Shard(0)])
    timeline = simulate(plan(Transfer(layout, layout, "uint8")), Links(pack_gbytes=1))
    assert timeline.seconds == pytest.approx(500e-6)
    assert timeline.round_seconds.tolist() == []


def test_it_prints_beside_the_other_methods() -> None:
    timeline = simulate(over_hosts(2, 4), EMULATED)
    lines = str(timeline).splitlines()
    assert lines[1] == "NIC 0.49 GB/s, NVLink 20 GB/s each way; a round 50 µs, packing 1000 GB/s"
    assert lines[2].split() == ["reshard", "direct", "gather+broadcast"]
    seconds = [f"{1e3 * t.seconds:.0f} ms" for t in (timeline, *timeline.compare())]
    assert lines[3].split() == " ".join(["seconds", *seconds]).split()
    assert "direct" not in str(simulate(over_hosts(2, 4, "gather_broadcast"), EMULATED))
    assert repr(timeline) == f"<Timeline: {seconds[0]} in {timeline.plan.rounds} rounds>"


@pytest.mark.parametrize("name", ["nic_gbytes", "nvlink_gbytes", "round_seconds", "pack_gbytes"])
@pytest.mark.parametrize("value", [-1, float("nan")])
def test_links_without_sense_are_refused(name: str, value: float) -> None:
    with pytest.raises(PlanError, match=name):
        Links(**{name: value})


def test_a_thousand_ranks_take_no_minute() -> None:
    shape = (256, 2048, 7168)
    source = Layout(shape, Mesh.arange((16, 64)), [Replicate(), Shard(0)])
    destination = Layout(shape, Mesh.arange((32, 32), start=1024), [Replicate(), Shard(1)])
    made = plan(Transfer(source, destination, "bfloat16"), Topology.regular(2048, 8))
    timeline = simulate(made)
    assert len(made.hops) == 65536
    assert timeline.seconds == pytest.approx(timeline.wire_seconds, rel=0.1)
    assert timeline.busy[:, 1024:].max() == pytest.approx(timeline.network_received[1024:].min(), rel=0.01)
