# SPDX-License-Identifier: Apache-2.0
"""Ways to route bundles: ours, and the two that it is compared with."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from nccl_m2n.planning.bundles import Bundles
from nccl_m2n.planning.feeds import make_chains, single_feeds
from nccl_m2n.planning.options import METHOD_NAMES
from nccl_m2n.planning.ranksets import RankTable
from nccl_m2n.planning.routes import FLOW, HOP, Routes, hand_out, hop_rows, route_chains, sort_hops
from nccl_m2n.planning.topology import Topology
from nccl_m2n.typing import Ints, Table

MAX_COMPARED_HOPS = 50_000  # of some hundred messages each: more would make printing slower than planning


def reshard(bundles: Bundles, topology: Topology) -> Routes:
    """Once into each domain, all NICs sharing evenly, replicas exchanging within."""
    return route_chains(bundles, topology, make_chains(bundles, topology))


def direct(bundles: Bundles, topology: Topology) -> Routes:
    """A holder serves every needer by itself: no byte is ever handed on."""
    return route_chains(bundles, topology, single_feeds(bundles, topology))


def gather_broadcast(bundles: Bundles, topology: Topology) -> Routes:
    """Every bundle goes to the first source rank and from there, whole, to every destination rank.

    Domains are entered by their first destination rank, one after another, as a ring would.
    """
    table, sets, domain_of = bundles.table, bundles.sets.table(), topology.domain_table
    if not len(table):
        return Routes(np.zeros(0, FLOW), np.zeros(0, HOP))
    root = int(sets.members(table["holders"])[1].min())
    everyone = np.unique(sets.members(table["needers"])[1])
    flows = np.zeros(len(table), FLOW)
    flows["bundle"], flows["stop"] = np.arange(len(table)), table["bytes"]
    has_root = sets.containing(root)[table["holders"]]
    flows["sender"] = np.where(has_root, root, sets.flat[sets.first[table["holders"]]])
    gather = np.flatnonzero(~has_root)
    made = [_between(gather, flows["sender"][gather], root, 0, domain_of)]
    late = np.where(has_root, 0, 1)
    domains = np.unique(domain_of[everyone])
    home = domain_of[root]
    order = [home, *[d for d in domains.tolist() if d != home]] if home in domains else domains.tolist()
    every, last, depth = np.arange(len(table)), root, late
    for domain in order:
        members = everyone[domain_of[everyone] == domain]
        inside = domain == home
        entry = root if inside else int(members[0])
        if not inside:
            made.append(_between(every, np.full(len(every), last), entry, depth, domain_of))
            depth = depth + 1
        group = np.union1d(members, [entry])
        whole = RankTable(np.array([len(group)]), group)
        made.append(hand_out(whole, np.zeros_like(every), every, np.full_like(every, entry), depth))
        last = entry
    hops = np.concatenate(made)
    hops = hops[hops["destination"] != hops["source"]]
    hops = hops[(hops["destination"] != root) | (hops["depth"] == 0)]  # the root has it by now
    used, hops["flow"] = np.unique(hops["flow"], return_inverse=True)  # some go from the root to itself
    return Routes(flows[used], sort_hops(hops))


def _between(flow: Ints, source: Ints, destination: Ints | int, depth: Ints | int, domain_of: Ints) -> Table:
    """Hops that are network where their ends are in different domains."""
    return hop_rows(flow, source, destination, depth, domain_of[source] != domain_of[destination])


METHODS: dict[str, Callable[[Bundles, Topology], Routes]] = dict(
    zip(METHOD_NAMES, (reshard, direct, gather_broadcast), strict=True)
)


def others(bundles: Bundles) -> list[str]:
    """The methods that ours is compared with, as far as they make no more hops than can be looked at."""
    counts, table = bundles.sets.table().counts, bundles.table
    needers = {rank for t in bundles.templates for rank in t.destination.ranks}
    hops = {"direct": int(counts[table["remote"]].sum()), "gather_broadcast": len(table) * len(needers)}
    return [method for method, amount in hops.items() if amount <= MAX_COMPARED_HOPS]
