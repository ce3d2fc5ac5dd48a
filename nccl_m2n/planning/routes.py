# SPDX-License-Identifier: Apache-2.0
"""Flows and hops: which stretch of which bundle travels which way."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nccl_m2n.layout.intervals import Ints
from nccl_m2n.planning.bundles import Bundles
from nccl_m2n.planning.feeds import Feeds
from nccl_m2n.planning.ranksets import RankTable
from nccl_m2n.planning.tapes import Stretches, cut_tapes
from nccl_m2n.planning.topology import Topology

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


@dataclass(frozen=True)
class Routes:
    """Flows by bundle and start; hops by flow, depth and destination."""

    flows: np.ndarray  # FLOW, chunks and phase still to be set
    hops: np.ndarray  # HOP


def route_feeds(bundles: Bundles, topology: Topology, feeds: Feeds) -> Routes:
    """Cut every bundle in flows so that all ranks of each set carry the same, and route them."""
    table = bundles.sets.table()
    opens = np.flatnonzero(feeds.depth == 0)  # the first feed of each strand
    size = bundles.table["bytes"][feeds.bundle]
    base = np.cumsum(size[opens]) - size[opens]  # all strands laid end to end
    order = _rails(bundles, table, topology)[feeds.bundle]
    entries = cut_tapes(table, feeds.group, size, order)
    senders = cut_tapes(table, feeds.senders[opens], size[opens], np.arange(len(opens)))
    sending = base[senders.row] + senders.start
    entering = base[feeds.strand[entries.row]] + entries.start
    start = np.sort(np.concatenate([sending, entering]), kind="stable")  # runs merge in linear time
    start = start[np.append(True, start[1:] != start[:-1])[: len(start)]]
    strand = np.searchsorted(base, start, side="right") - 1
    sender = senders.rank[np.searchsorted(sending, start, side="right") - 1]
    bundle = feeds.bundle[opens][strand]
    lo = start - base[strand]
    stop = np.append(start[1:], base[-1:] + size[opens][-1:])
    flow, flows = _merge(bundle, lo, stop - base[strand], sender)
    hops = _hops(feeds, table, entries, entering, start, strand, sender, flow)
    return Routes(flows, hops)


def _rails(bundles: Bundles, table: RankTable, topology: Topology) -> Ints:
    """A number for each bundle that puts those of one sender's rail together on every tape."""
    holders = bundles.table["holders"]
    rail = topology.rail_table[table.single[holders]]
    return np.where(table.counts[holders] == 1, rail, 0) * max(len(holders), 1) + np.arange(len(holders))


def _merge(bundle: Ints, start: Ints, stop: Ints, sender: Ints) -> tuple[Ints, np.ndarray]:
    """Number the flows; what one sender feeds to several strands is one flow, packed once."""
    sort = np.lexsort((stop, sender, start, bundle))
    key = np.stack([bundle, start, sender, stop])[:, sort]
    new = np.append(True, (key[:, 1:] != key[:, :-1]).any(axis=0))[: len(sort)]
    flow = np.empty(len(sort), np.int64)
    flow[sort] = np.cumsum(new) - 1
    flows = np.zeros(int(new.sum()), FLOW)
    flows["bundle"], flows["start"], flows["sender"], flows["stop"] = key[:, new]
    return flow, flows


def _hops(
    feeds: Feeds,
    table: RankTable,
    entries: Stretches,
    position: Ints,
    start: Ints,
    strand: Ints,
    sender: Ints,
    flow: Ints,
) -> np.ndarray:
    """One row a message: along the chain from entry to entry, in each group from the entry to all others."""
    depth_of_entry = feeds.depth[entries.row]
    source, alive, made = sender, np.arange(len(start)), []
    for depth in range(int(feeds.depth.max(initial=-1)) + 1):
        here = np.flatnonzero(depth_of_entry == depth)
        found = here[(np.searchsorted(position[here], start[alive], side="right") - 1).clip(min=0)]
        reached = feeds.strand[entries.row[found]] == strand[alive]  # other strands end before this depth
        alive, found = alive[reached], found[reached]
        entry, feed = entries.rank[found], entries.row[found]
        made.append(hop_rows(flow[alive], source[alive], entry, depth, feeds.network[feed]))
        row, member = table.members(feeds.group[feed])
        other = member != entry[row]
        row, member = row[other], member[other]
        made.append(hop_rows(flow[alive][row], entry[row], member, depth + 1, np.zeros(len(row), bool)))
        source = source.copy()
        source[alive] = entry
    return sort_hops(np.concatenate([np.zeros(0, HOP), *made]))


def sort_hops(hops: np.ndarray) -> np.ndarray:
    """Hops by flow, depth and destination: the order in which both ends of a pair list them."""
    return hops[np.lexsort((hops["destination"], hops["depth"], hops["flow"]))]


def hop_rows(
    flow: Ints, source: Ints, destination: Ints | int, depth: Ints | int, network: np.ndarray
) -> np.ndarray:
    """A table of hops out of its columns."""
    hops = np.zeros(len(flow), HOP)
    hops["flow"], hops["source"], hops["destination"] = flow, source, destination
    hops["depth"], hops["network"] = depth, network
    return hops
