# SPDX-License-Identifier: Apache-2.0
"""Feeds: which needers take each bundle in together, from which senders, in which chains.

A *feed* is the needers of one bundle in one domain (or one of them): together they take the bundle's stream in
once, each its own share. Feeds in other domains than the holders' form *chains*: the senders feed the first, the
entries of each feed the next.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nccl_m2n.layout.intervals import expand, lengths, offsets, opens
from nccl_m2n.planning.bundles import Bundles
from nccl_m2n.planning.ranksets import RankSets, RankTable
from nccl_m2n.planning.topology import Topology
from nccl_m2n.typing import Bools, Ints

# A source that sends this much more than the busiest needer receives is spared by handing on.
TOLERANCE = 1.02


@dataclass(frozen=True)
class Feeds:
    """One row a feed, by bundle."""

    bundle: Ints
    needers: Ints  # rank set whose members share the stream out
    senders: Ints  # rank set that may send to them: the holders in their domain, or else all
    network: Bools  # enters over the network, else within the domain

    def take(self, rows: Ints) -> Feeds:
        """Some of the rows, in the order given."""
        return Feeds(self.bundle[rows], self.needers[rows], self.senders[rows], self.network[rows])


@dataclass(frozen=True)
class Chains:
    """Feeds in the order of their chains; the feeds of a chain follow each other."""

    feeds: Feeds
    chain: Ints  # (feeds,) ascending
    depth: Ints  # (feeds,) how many feeds of its chain come before


def make_chains(bundles: Bundles, topology: Topology) -> Chains:
    """Decide how every bundle reaches every domain that needs it: once over the network, if at all."""
    feeds = feeds_by_domain(bundles, topology)
    feeds = _spread_within_domains(bundles, topology, feeds)
    return _link(feeds, _fed_by_sources(bundles, bundles.sets.table(), feeds, topology))


def single_feeds(bundles: Bundles, topology: Topology) -> Chains:
    """Every needer fed by itself, by the holders of its domain where there are any."""
    feeds = feeds_by_domain(bundles, topology)
    feeds = _one_by_one(bundles, feeds, np.ones(len(feeds.bundle), bool))
    return _link(feeds, len(feeds.bundle))


def feeds_by_domain(bundles: Bundles, topology: Topology) -> Feeds:
    """The needers of each bundle, domain by domain, with the ranks that may send to them."""
    sets, domain_of = bundles.sets, topology.domain_table
    used, which = np.unique(bundles.table["remote"], return_inverse=True)
    first, domains, members = _by_domain(sets, used, domain_of)
    row, k = expand(np.diff(first)[which])
    domain, needers = domains[first[which[row]] + k], members[first[which[row]] + k]
    holders = bundles.table["holders"][row]
    used, which = np.unique(holders, return_inverse=True)
    first, domains, members = _by_domain(sets, used, domain_of)
    inside = np.full((len(used), len(topology.domains)), -1, np.int64)
    inside[np.repeat(np.arange(len(used)), np.diff(first)), domains] = members
    local = inside[which, domain]
    network = local < 0
    return Feeds(row, needers, np.where(network, holders, local), network)


def _by_domain(sets: RankSets, numbers: Ints, domain_of: Ints) -> tuple[Ints, Ints, Ints]:
    """The subsets of some rank sets that lie in each domain.

    Returns:
        Where the subsets of each set start (and end), and the domain and the rank set of each subset.
    """
    row, ranks = sets.table().members(numbers)
    order = np.lexsort((domain_of[ranks], row))
    ranks, domains = ranks[order], domain_of[ranks[order]]
    first = np.flatnonzero(opens(row, domains))
    counts = lengths(first, len(row))
    subsets = np.bincount(row[first], minlength=len(numbers))
    made = numbers[row[first]]  # of a set that is in one domain as a whole
    cut = subsets[row[first]] > 1
    made[cut] = sets.numbers(ranks[np.repeat(cut, counts)], counts[cut])
    return np.append(0, np.cumsum(subsets)), domains[first], made


def _spread_within_domains(bundles: Bundles, topology: Topology, feeds: Feeds) -> Feeds:
    """Within a domain, let holders serve every needer, unless they would send more than needers receive.

    Where they would, needers of a bundle stay one feed: each takes a share and hands it on.
    """
    world, table = len(topology.domain_table), bundles.sets.table()
    inside = np.flatnonzero(~feeds.network & (table.counts[feeds.needers] > 1))
    if not len(inside):
        return feeds
    near = np.flatnonzero(~feeds.network)
    size, copies = bundles.table["bytes"][feeds.bundle[near]], table.counts[feeds.needers[near]]
    sent = table.spread(feeds.senders[near], size * copies, world)
    received = table.spread(feeds.needers[near], size * copies, world)
    domain = np.minimum(topology.domain_table, len(topology.domains) - 1)
    most = np.zeros((2, len(topology.domains)), np.int64)
    for load, loads in zip(most, (sent, received), strict=True):
        np.maximum.at(load, domain, loads)
    calm = most[0] <= TOLERANCE * most[1]
    split = ~feeds.network & calm[domain[table.flat[table.first[feeds.needers]]]]
    split |= ~feeds.network & (table.counts[feeds.needers] <= table.counts[feeds.senders])
    return _one_by_one(bundles, feeds, split)


def _one_by_one(bundles: Bundles, feeds: Feeds, split: Bools) -> Feeds:
    """Make each needer of the feeds in `split` a feed of its own."""
    table = bundles.sets.table()
    alone = np.unique(table.members(feeds.needers[split])[1])
    singles = np.zeros(int(alone.max(initial=-1)) + 1, np.int64)
    singles[alone] = bundles.sets.numbers(alone, np.ones_like(alone))
    row, k = expand(np.where(split, table.counts[feeds.needers], 1))
    made, chosen = feeds.take(row), split[row]
    needers = made.needers.copy()
    needers[chosen] = singles[table.flat[table.first[needers[chosen]] + k[chosen]]]
    return Feeds(made.bundle, needers, made.senders, made.network)


def _fed_by_sources(bundles: Bundles, table: RankTable, feeds: Feeds, topology: Topology) -> int:
    """How many domains the sources feed themselves: as many as keep them no busier than any needer."""
    world = len(topology.domain_table)
    sets, size = bundles.table["holders"], bundles.table["bytes"]
    domains = np.bincount(feeds.bundle[feeds.network], minlength=len(size))
    most = int(domains.max(initial=0))
    far = np.flatnonzero(feeds.network)
    received = table.spread(feeds.needers[far], size[feeds.bundle[far]], world).max(initial=0)
    lo, hi = 1, max(most, 1)
    while lo < hi:
        middle = (lo + hi + 1) // 2
        sent = table.spread(sets, size * np.minimum(domains, middle), world).max(initial=0)
        lo, hi = (middle, hi) if sent <= TOLERANCE * received else (lo, middle - 1)
    return lo


def _link(feeds: Feeds, fed: int) -> Chains:
    """Link the network feeds of each bundle in at most `fed` chains of nearly equal length.

    Feed `nth` of `count` goes to chain ``nth * chains // count``: so the chains differ by one feed at most, and a
    chain's first feed is ``ceil(chain * count / chains)``, the least `nth` that this formula takes to it.
    """
    first = np.flatnonzero(opens(feeds.bundle))
    order = offsets(feeds.network.astype(np.int64))
    nth = order - np.repeat(order[first], lengths(first, len(order)))  # among the network feeds of the bundle
    count = np.bincount(feeds.bundle[feeds.network], minlength=int(feeds.bundle.max(initial=-1)) + 1)[
        feeds.bundle
    ]
    chains = np.maximum(np.minimum(count, fed), 1)
    chain = nth * chains // np.maximum(count, 1)
    depth = np.where(feeds.network, nth - -(-chain * count // chains), 0)
    # Feeds within domains stand alone; those of the network come first, so that a chain is not interrupted.
    sort = np.lexsort((~feeds.network, feeds.bundle)) if feeds.network.any() else np.arange(len(order))
    depth = depth[sort]
    return Chains(feeds.take(sort), np.cumsum(depth == 0) - 1, depth)
