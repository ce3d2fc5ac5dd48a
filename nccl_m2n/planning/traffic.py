# SPDX-License-Identifier: Apache-2.0
"""Traffic: how many bytes a plan moves, by tier and by rank, against the least there can be."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nccl_m2n.planning.bundles import Bundles
from nccl_m2n.planning.feeds import feeds_by_domain
from nccl_m2n.planning.ranksets import RankTable
from nccl_m2n.planning.routes import Routes
from nccl_m2n.planning.topology import Topology
from nccl_m2n.typing import Ints

MOST_ASKED = 512  # sets of ranks that are compared with one another


@dataclass(frozen=True, eq=False)
class Traffic:
    """Bytes of one run of a plan."""

    network_bytes: int  # between domains, all ranks together
    network_bytes_bound: int  # no plan can do with less
    nvlink_bytes: int  # within domains
    local_bytes: int  # within ranks, without any message
    sent: Ints  # network bytes by rank
    received: Ints  # network bytes by rank
    nvlink_sent: Ints  # bytes within domains by rank
    nvlink_received: Ints

    @property
    def busiest(self) -> int:
        """Network bytes of the busiest NIC, in its busier direction."""
        return int(max(self.sent.max(initial=0), self.received.max(initial=0)))


def count_traffic(bundles: Bundles, routes: Routes, topology: Topology) -> Traffic:
    """Count what every hop carries."""
    hops, flows = routes.hops, routes.flows
    size = (flows["stop"] - flows["start"])[hops["flow"]]
    loads = np.zeros((4, bundles.world), np.int64)
    for tier, network in enumerate((True, False)):
        chosen = hops["network"] == network
        np.add.at(loads[2 * tier], hops["source"][chosen], size[chosen])
        np.add.at(loads[2 * tier + 1], hops["destination"][chosen], size[chosen])
    sent, received, nvlink_sent, nvlink_received = loads
    return Traffic(
        int(sent.sum()),
        network_bound(bundles, topology),
        int(nvlink_sent.sum()),
        _local_bytes(bundles),
        sent,
        received,
        nvlink_sent,
        nvlink_received,
    )


def network_bound(bundles: Bundles, topology: Topology) -> int:
    """The least network bytes: each bundle once into each domain that needs it and has no holder."""
    sets, domain_of = bundles.sets, topology.domain_table
    domains = [frozenset(domain_of[sets[i]].tolist()) for i in range(len(sets))]
    return sum(
        size * len(domains[needers] - domains[holders])
        for size, holders, needers, _ in bundles.table.tolist()
    )


def nic_bound(bundles: Bundles, topology: Topology) -> int:
    """The least bytes of the busiest NIC when holders send and needers receive, as far as can be told quickly.

    What only some ranks can send, or receive, leaves each of them a mean share at least. The ranks asked about are
    each set of holders, each set of needers in a domain, each domain, and all together.
    """
    feeds, table = feeds_by_domain(bundles, topology), bundles.sets.table()
    size = bundles.table["bytes"]
    far = np.flatnonzero(feeds.network)
    leaving = np.unique(feeds.bundle[far])  # at least once, whoever hands it on
    sent = _least_load(table, bundles.table["holders"][leaving], size[leaving], topology)
    return max(sent, _least_load(table, feeds.needers[far], size[feeds.bundle[far]], topology))


def _least_load(table: RankTable, sets: Ints, amounts: Ints, topology: Topology) -> int:
    """Bytes of the busiest rank, at least, when each set's amount falls on its members as evenly as can be."""
    used, which = np.unique(sets, return_inverse=True)
    if not len(used):
        return 0
    amount = np.bincount(which, amounts.astype(float), minlength=len(used))
    row, rank = table.members(used)
    held = np.zeros((len(used), int(rank.max()) + 1), bool)
    held[row, rank] = True
    asked = [np.any(held, axis=0, keepdims=True)]
    for domain in np.unique(topology.domain_table[rank]).tolist():
        inside = held[:, topology.domain_table[: held.shape[1]] == domain].sum(axis=1) == table.counts[used]
        asked.append(np.any(held[inside], axis=0, keepdims=True))
    if len(used) <= MOST_ASKED:
        asked.append(held)
    groups = np.concatenate(asked)
    outside = (~groups).astype(np.float32) @ held.T.astype(
        np.float32
    )  # (groups, sets) members out of the group
    loads = np.equal(outside, 0) @ amount / np.maximum(groups.sum(axis=1), 1)
    return int(np.ceil(loads.max()))


def _local_bytes(bundles: Bundles) -> int:
    counts = bundles.sets.table().counts
    copies = counts[bundles.table["needers"]] - counts[bundles.table["remote"]]
    return int((bundles.table["bytes"] * copies).sum())
