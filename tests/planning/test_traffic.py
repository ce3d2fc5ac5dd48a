# SPDX-License-Identifier: Apache-2.0
"""What a plan is measured against: the least there can be."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings

from nccl_m2n import Layout, Mesh, PlanError, Replicate, Shard, Topology, Transfer, plan
from nccl_m2n.planning.traffic import nic_bound
from tests.planning.test_replay import topologies, transfers

R, S0 = Replicate(), Shard(0)


def naive_bound(made) -> float:
    """All sets of ranks asked: what only they can send, or receive, shared out among them."""
    domain_of = made.topology.domain_of
    sends: dict[frozenset[int], int] = {}
    receives: dict[frozenset[int], int] = {}
    for size, holders, needers, _ in made.bundles.table.tolist():
        held, needed = (frozenset(made.bundles.sets[i].tolist()) for i in (holders, needers))
        far = {domain_of(r) for r in needed} - {domain_of(r) for r in held}
        if far:
            sends[held] = sends.get(held, 0) + size
        for domain in far:
            near = frozenset(r for r in needed if domain_of(r) == domain)
            receives[near] = receives.get(near, 0) + size

    def groups() -> Iterator[frozenset[int]]:
        for n in range(1, len(made.ranks) + 1):
            yield from map(frozenset, itertools.combinations(made.ranks, n))

    return max(
        sum(size for ranks, size in amounts.items() if ranks <= group) / len(group)
        for group in groups()
        for amounts in (sends, receives)
    )


@settings(max_examples=40, deadline=None)
@given(transfers(), topologies())
def test_the_bound_of_nics_is_one(made, topology) -> None:
    one = plan(made, topology)
    bound = nic_bound(one.bundles, one.topology)
    assert bound <= one.traffic().busiest
    assert bound <= plan(made, topology, method="direct").traffic().busiest
    if 0 < len(one.ranks) <= 8:
        assert bound <= naive_bound(one) + 1


def move(rows: int, source: list[int], destination: list[int], name: str) -> Transfer:
    return Transfer(*(Layout((rows,), Mesh(r), [R]) for r in (source, destination)), "uint8", name)


def test_the_bound_asks_each_set_each_domain_and_all() -> None:
    topology = Topology.regular(8, 4)
    for tensors, least in (
        ([move(1000, [0], [4], "a"), move(400, [0, 1], [5, 6, 7], "b")], 1000),  # rank 0 alone
        (
            [move(600, [0, 1], [4, 5], "a"), move(500, [0], [6], "b")],
            550,
        ),  # ranks 0 and 1, and a set within them
        (
            [move(900, [0, 1], [4, 5], "a"), move(900, [1, 2], [5, 6], "b"), move(900, [0, 2], [4, 6], "c")],
            900,
        ),
    ):
        made = plan(tensors, topology)
        assert nic_bound(made.bundles, topology) == least


def test_what_stays_within_domains_bounds_no_nic() -> None:
    made = plan(move(1000, [0], [1, 2], "a"), Topology.regular(4, 4))
    assert nic_bound(made.bundles, made.topology) == 0


def test_uneven_pipeline_stages_are_what_the_layouts_allow() -> None:
    """One stage has three times the other's bytes: no plan can spread them over the other's ranks."""

    def stage(rows: int, first: int, name: str) -> Transfer:
        source, destination = Mesh.arange((2,), first), Mesh.arange((4,), 4)
        return Transfer(
            Layout((rows, 64), source, [S0]), Layout((rows, 64), destination, [S0]), "float32", name
        )

    made = plan([stage(12000, 0, "a"), stage(4000, 2, "b")], Topology.regular(8, 4))
    rows = {row[0]: row[1:] for row in made.rows()}
    assert rows["busiest NIC"][0] == rows["  layouts allow"][0] == "1.5 MiB"
    assert rows["  layouts allow"] == ["1.5 MiB"] * 3


def test_bytes_that_do_not_fit_64_bits_are_refused() -> None:
    """2**57 elements of 16 bytes fit once; needed by several ranks their sums would not."""

    def problem(ranks: int) -> Transfer:
        return Transfer(
            Layout((2**57,), Mesh([0]), [R]), Layout((2**57,), Mesh.arange((ranks,), 1), [R]), "complex128"
        )

    traffic = plan(problem(1), staging_bytes=2**61).traffic()
    assert traffic.nvlink_bytes == 2**61
    with pytest.raises(PlanError, match="fewer than 2..62 bytes in all"):
        plan(problem(3))
