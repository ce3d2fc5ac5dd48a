# SPDX-License-Identifier: Apache-2.0
"""Flows and hops: which bytes of which bundle travels which way."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nccl_m2n.layout.intervals import expand, lengths, offsets, opens
from nccl_m2n.planning.bundles import Bundles
from nccl_m2n.planning.feeds import Chains
from nccl_m2n.planning.ranksets import RankTable
from nccl_m2n.planning.tapes import Shares, cut_tapes
from nccl_m2n.planning.topology import Topology
from nccl_m2n.typing import Bools, Ints, Table

FLOW = np.dtype(
    [
        ("bundle", "i8"),
        ("start", "i8"),  # bytes in the bundle's stream
        ("stop", "i8"),
        ("sender", "i8"),  # the holder that sends it first
        ("chunks", "i8"),  # how many chunks it moves in
        ("phase", "i8"),  # chunk j moves in round (j * rounds + phase) // chunks
    ]
)

HOP = np.dtype(
    [
        ("flow", "i8"),
        ("source", "i8"),
        ("destination", "i8"),
        ("depth", "i8"),  # rounds after the flow's first hop
        ("network", "?"),  # between domains
    ],
    align=True,
)


# To so many a rank hands a chunk of one flow in one round; a quarter of what a group may hold (`rounds.MAX_MESSAGES`),
# since it may hand on several flows and receives others meanwhile.
FAN_OUT = 256


@dataclass(frozen=True)
class Routes:
    """Flows by bundle and start; hops by flow, depth and destination."""

    flows: Table  # FLOW, chunks and phase still to be set
    hops: Table  # HOP


def route_chains(bundles: Bundles, topology: Topology, chains: Chains) -> Routes:
    """Cut every bundle in flows so that all ranks of each set carry the same, and route them.

    All chains are laid end to end, each as long as its bundle: a position on this line says which byte of which
    chain is meant. Senders cut it in one way and the entries of each feed in another; between two neighbouring cuts
    of either, one sender and one entry a feed serve all bytes, and that is a flow.
    """
    feeds, table = chains.feeds, bundles.sets.table()
    heads = np.flatnonzero(chains.depth == 0)  # the first feed of each chain
    size = bundles.table["bytes"][feeds.bundle]
    base = offsets(size[heads])
    order = _rails(bundles, table, topology)[feeds.bundle]
    entries = cut_tapes(table, feeds.needers, size, order)
    senders = cut_tapes(table, feeds.senders[heads], size[heads], np.arange(len(heads)))
    sending = base[senders.row] + senders.start
    entering = base[chains.chain[entries.row]] + entries.start
    start = np.sort(np.concatenate([sending, entering]), kind="stable")  # sorted lists merge in linear time
    start = start[opens(start)]
    chain = np.searchsorted(base, start, side="right") - 1
    sender = senders.rank[np.searchsorted(sending, start, side="right") - 1]
    bundle = feeds.bundle[heads][chain]
    lo = start - base[chain]
    stop = np.append(start[1:], base[-1:] + size[heads][-1:])
    flow, flows = _merge(bundle, lo, stop - base[chain], sender)
    hops = _hops(chains, table, entries, entering, start, chain, sender, flow)
    return Routes(flows, hops)


def _rails(bundles: Bundles, table: RankTable, topology: Topology) -> Ints:
    """A number for each bundle that puts those of one sender's rail together on every tape."""
    holders = bundles.table["holders"]
    rail = topology.rail_table[table.single[holders]]
    return np.where(table.counts[holders] == 1, rail, 0) * max(len(holders), 1) + np.arange(len(holders))


def _merge(bundle: Ints, start: Ints, stop: Ints, sender: Ints) -> tuple[Ints, Table]:
    """Number the flows; what one sender feeds to several chains is one flow, packed once, up to `FAN_OUT` of them."""
    sort = np.lexsort((stop, sender, start, bundle))
    key = np.stack([bundle, start, sender, stop])[:, sort]
    new = opens(*key)
    first = np.flatnonzero(new)
    new[expand(lengths(first, len(sort)))[1] % FAN_OUT == 0] = True
    flow = np.empty(len(sort), np.int64)
    flow[sort] = np.cumsum(new) - 1
    flows = np.zeros(int(new.sum()), FLOW)
    flows["bundle"], flows["start"], flows["sender"], flows["stop"] = key[:, new]
    return flow, flows


def _hops(
    chains: Chains,
    table: RankTable,
    entries: Shares,
    entering: Ints,
    start: Ints,
    chain: Ints,
    sender: Ints,
    flow: Ints,
) -> Table:
    """One row a message: along the chain from entry to entry, in each feed from the entry to all others.

    The chains' feeds are gone through depth by depth. At each depth, `entering` of its entries ascends, since chains
    lie end to end, so the entry of a flow is the last one that starts at or before it. That entry may be one of an
    earlier chain, where the flow's own chain has no feed at this depth: such a flow has reached its end.

    Args:
        chains: The feeds in the order of their chains.
        table: The rank sets.
        entries: Who takes in which share of each feed.
        entering: (entries,) where each share starts, on the line of all chains laid end to end.
        start: (flows of chains,) where each starts on that line.
        chain: The chain of each.
        sender: Who sends each first.
        flow: The number of each; one flow may go along several chains.
    """
    feeds = chains.feeds
    depth_of_entry, chain_of_entry = chains.depth[entries.row], chains.chain[entries.row]
    source, made = sender.copy(), []
    going = np.arange(len(start))  # flows whose chains have a feed at this depth
    for depth in range(int(chains.depth.max(initial=-1)) + 1):
        here = np.flatnonzero(depth_of_entry == depth)
        found = here[(np.searchsorted(entering[here], start[going], side="right") - 1).clip(min=0)]
        reached = chain_of_entry[found] == chain[going]
        going, found = going[reached], found[reached]
        entry, feed = entries.rank[found], entries.row[found]
        made.append(hop_rows(flow[going], source[going], entry, depth, feeds.network[feed]))
        made.append(hand_out(table, feeds.needers[feed], flow[going], entry, depth + 1))
        source[going] = entry
    return sort_hops(np.concatenate([np.zeros(0, HOP), *made]))


def hand_out(table: RankTable, sets: Ints, flow: Ints, entry: Ints, depth: Ints | int) -> Table:
    """Hops of each flow from its entry to all other members of a set within a domain.

    In sets too large for one group of messages, the members that follow the entry hand on to the rest: the entry and
    the members after it are the nodes of a tree in which node i hands to the nodes ``i * FAN_OUT + 1`` and on. Each
    entry has other ranks after it, so that all ranks hand on the same.

    Args:
        table: The rank sets.
        sets: (flows,) the set of each.
        flow: (flows,) their numbers.
        entry: (flows,) the member that has it.
        depth: Rounds after the flow's first hop in which the entry hands it on.
    """
    row, member = table.members(sets)
    position = np.flatnonzero(member == entry[row]) - offsets(table.counts[sets])
    other = member != entry[row]
    row, member = row[other], member[other]
    depth = np.broadcast_to(depth, len(sets))[row]
    inside = np.zeros(len(row), bool)
    most = int(table.counts[sets].max(initial=1)) - 1
    if most <= FAN_OUT:
        return hop_rows(flow[row], entry[row], member, depth, inside)
    counts = table.counts[sets] - 1
    node = 1 + (expand(counts)[1] - position[row]) % counts[row]
    by_node = np.empty_like(member)
    by_node[offsets(counts)[row] + node - 1] = member
    above = (node - 1) // FAN_OUT
    source = np.where(above > 0, by_node[offsets(counts)[row] + np.maximum(above, 1) - 1], entry[row])
    while above.any():
        depth = depth + (above > 0)
        above = (above - 1).clip(min=0) // FAN_OUT
    return hop_rows(flow[row], source, member, depth, inside)


def sort_hops(hops: Table) -> Table:
    """Hops by flow, depth and destination: the order in which both ends of a pair list them."""
    return hops[np.lexsort((hops["destination"], hops["depth"], hops["flow"]))]


def hop_rows(flow: Ints, source: Ints, destination: Ints | int, depth: Ints | int, network: Bools) -> Table:
    """A table of hops out of its columns."""
    hops = np.zeros(len(flow), HOP)
    hops["flow"], hops["source"], hops["destination"] = flow, source, destination
    hops["depth"], hops["network"] = depth, network
    return hops
