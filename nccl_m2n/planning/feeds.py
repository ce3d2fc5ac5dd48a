# SPDX-License-Identifier: Apache-2.0
"""Feeds: which groups of ranks each bundle enters, from which senders, in which chains.

A *feed* is one group of needers, in one domain, that takes in a bundle's stream once, each member
an entry of its own share. Feeds of a *strand* form a chain: the senders feed the first, the entries of
each feed the next.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nccl_m2n.layout.intervals import Ints, expand
from nccl_m2n.planning.bundles import Bundles
from nccl_m2n.planning.ranksets import RankSets, RankTable
from nccl_m2n.planning.topology import Topology

# A source that sends this much more than the busiest needer receives is spared by handing on.
TOLERANCE = 1.02


@dataclass(frozen=True)
class Feeds:
    """One row a feed, by bundle; the feeds of a strand follow each other in chain order."""

    bundle: Ints
    group: Ints  # rank set whose members share the stream out
    senders: Ints  # rank set that feeds the strand
    strand: Ints  # ascending
    depth: Ints  # place in the strand's chain
    network: np.ndarray  # bool: enters over the network, else within the domain


@dataclass(frozen=True)
class _Sites:
    """Needers of each bundle by domain."""

    bundle: Ints
    group: Ints
    senders: Ints
    network: np.ndarray


def make_feeds(bundles: Bundles, topology: Topology) -> Feeds:
    """Decide how every bundle reaches every domain that needs it: once over the network, if at all."""
    sites = _split_by_domain(bundles, topology)
    sites = _spread_within_domains(bundles, topology, sites)
    table = bundles.sets.table()
    fed = _sources_feed(bundles, table, sites, topology)
    return _chain(sites, fed)


def single_feeds(bundles: Bundles, topology: Topology) -> Feeds:
    """Every needer fed by itself, by the holders of its domain where there are any."""
    sites = _split_by_domain(bundles, topology)
    sites = _one_by_one(bundles, sites, np.ones(len(sites.bundle), bool))
    return _chain(sites, len(sites.bundle))


def _split_by_domain(bundles: Bundles, topology: Topology) -> _Sites:
    """The needers of each bundle, domain by domain, with the ranks that may send to them."""
    sets, domain_of = bundles.sets, topology.domain_table
    used, which = np.unique(bundles.table["remote"], return_inverse=True)
    first, domains, groups = _by_domain(sets, used, domain_of)
    row, k = expand(np.diff(first)[which])
    domain, group = domains[first[which[row]] + k], groups[first[which[row]] + k]
    holders = bundles.table["holders"][row]
    used, which = np.unique(holders, return_inverse=True)
    first, domains, groups = _by_domain(sets, used, domain_of)
    inside = np.full((len(used), len(topology.domains)), -1, np.int64)
    inside[np.repeat(np.arange(len(used)), np.diff(first)), domains] = groups
    local = inside[which, domain]
    network = local < 0
    return _Sites(row, group, np.where(network, holders, local), network)


def _by_domain(sets: RankSets, numbers: Ints, domain_of: Ints) -> tuple[Ints, Ints, Ints]:
    """The parts of some rank sets that lie in each domain.

    Returns:
        Where the parts of each set start (and end), and the domain and the rank set of each part.
    """
    row, ranks = sets.table().members(numbers)
    order = np.lexsort((domain_of[ranks], row))
    ranks, domains = ranks[order], domain_of[ranks[order]]
    new = np.append(True, (row[1:] != row[:-1]) | (domains[1:] != domains[:-1]))[: len(row)]
    opens = np.flatnonzero(new)
    counts = np.diff(np.append(opens, len(row)))
    parts = np.bincount(row[opens], minlength=len(numbers))
    group = numbers[row[opens]]  # of a set that is in one domain as a whole
    cut = parts[row[opens]] > 1
    group[cut] = sets.numbers(ranks[np.repeat(cut, counts)], counts[cut])
    return np.append(0, np.cumsum(parts)), domains[opens], group


def _spread_within_domains(bundles: Bundles, topology: Topology, sites: _Sites) -> _Sites:
    """Within a domain, let holders serve every needer, unless they would send more than needers receive.

    Where they would, needers of a bundle stay one group: each takes a share and hands it on.
    """
    world, table = len(topology.domain_table), bundles.sets.table()
    inside = np.flatnonzero(~sites.network & (table.counts[sites.group] > 1))
    if not len(inside):
        return sites
    near = np.flatnonzero(~sites.network)
    size, copies = bundles.table["bytes"][sites.bundle[near]], table.counts[sites.group[near]]
    sent = table.spread(sites.senders[near], size * copies, world)
    received = table.spread(sites.group[near], size * copies, world)
    domain = np.minimum(topology.domain_table, len(topology.domains) - 1)
    most = np.zeros((2, len(topology.domains)), np.int64)
    for load, loads in zip(most, (sent, received), strict=True):
        np.maximum.at(load, domain, loads)
    calm = most[0] <= TOLERANCE * most[1]
    split = ~sites.network & calm[domain[table.flat[table.first[sites.group]]]]
    split |= ~sites.network & (table.counts[sites.group] <= table.counts[sites.senders])
    return _one_by_one(bundles, sites, split)


def _one_by_one(bundles: Bundles, sites: _Sites, split: np.ndarray) -> _Sites:
    """Make each needer of the sites in `split` a site of its own."""
    table = bundles.sets.table()
    alone = np.unique(table.members(sites.group[split])[1])
    singles = np.zeros(int(alone.max(initial=-1)) + 1, np.int64)
    singles[alone] = bundles.sets.numbers(alone, np.ones_like(alone))
    row, k = expand(np.where(split, table.counts[sites.group], 1))
    group, chosen = sites.group[row], split[row]
    group[chosen] = singles[table.flat[table.first[group[chosen]] + k[chosen]]]
    return _Sites(sites.bundle[row], group, sites.senders[row], sites.network[row])


def _sources_feed(bundles: Bundles, table: RankTable, sites: _Sites, topology: Topology) -> int:
    """How many domains the sources feed themselves: as many as keep them no busier than any needer."""
    world = len(topology.domain_table)
    sets, size = bundles.table["holders"], bundles.table["bytes"]
    domains = np.bincount(sites.bundle[sites.network], minlength=len(size))
    most = int(domains.max(initial=0))
    far = np.flatnonzero(sites.network)
    received = table.spread(sites.group[far], size[sites.bundle[far]], world).max(initial=0)
    lo, hi = 1, max(most, 1)
    while lo < hi:
        middle = (lo + hi + 1) // 2
        sent = table.spread(sets, size * np.minimum(domains, middle), world).max(initial=0)
        lo, hi = (middle, hi) if sent <= TOLERANCE * received else (lo, middle - 1)
    return lo


def _chain(sites: _Sites, fed: int) -> Feeds:
    """Link the network sites of each bundle in at most `fed` chains of nearly equal length."""
    new = np.append(True, sites.bundle[1:] != sites.bundle[:-1])[: len(sites.bundle)]
    order = np.cumsum(sites.network) - sites.network
    opens = np.flatnonzero(new)
    nth = order - np.repeat(order[opens], np.diff(np.append(opens, len(new))))
    count = np.bincount(sites.bundle[sites.network], minlength=int(sites.bundle.max(initial=-1)) + 1)[
        sites.bundle
    ]
    chains = np.maximum(np.minimum(count, fed), 1)
    chain = nth * chains // np.maximum(count, 1)
    depth = np.where(sites.network, nth - -(-chain * count // chains), 0)
    # Sites within domains stand alone; those of the network come first, so that a chain is not interrupted.
    sort = np.lexsort((~sites.network, sites.bundle)) if sites.network.any() else np.arange(len(new))
    starts = (depth == 0)[sort]
    return Feeds(
        sites.bundle[sort],
        sites.group[sort],
        sites.senders[sort],
        np.cumsum(starts) - 1,
        depth[sort],
        sites.network[sort],
    )
