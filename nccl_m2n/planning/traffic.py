# SPDX-License-Identifier: Apache-2.0
"""Traffic: how many bytes a plan moves, by tier and by rank, against the least there can be."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nccl_m2n.planning.bundles import Bundles
from nccl_m2n.planning.routes import Routes
from nccl_m2n.planning.topology import Topology
from nccl_m2n.typing import Ints


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
    return Traffic(
        int(loads[0].sum()),
        network_bound(bundles, topology),
        int(loads[2].sum()),
        _local_bytes(bundles),
        *loads,
    )


def network_bound(bundles: Bundles, topology: Topology) -> int:
    """The least network bytes: each bundle once into each domain that needs it and has no holder."""
    sets, domain_of = bundles.sets, topology.domain_table
    domains = [frozenset(domain_of[sets[i]].tolist()) for i in range(len(sets))]
    return sum(
        size * len(domains[needers] - domains[holders])
        for size, holders, needers, _ in bundles.table.tolist()
    )


def _local_bytes(bundles: Bundles) -> int:
    counts = bundles.sets.table().counts
    copies = counts[bundles.table["needers"]] - counts[bundles.table["remote"]]
    return int((bundles.table["bytes"] * copies).sum())
