# SPDX-License-Identifier: Apache-2.0
"""What each round asks of every rank: of a plan that sends everything, or only what changed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from nccl_m2n.layout.intervals import opens
from nccl_m2n.planning import Plan
from nccl_m2n.planning.delta import Chunks, WideRun
from nccl_m2n.planning.rounds import chunks_in_round
from nccl_m2n.simulation.links import Links
from nccl_m2n.typing import Bools, Floats, Ints, Table

GB = 1e9  # bytes


@dataclass(frozen=True)
class RoundLoad:
    """What one round asks of every rank, in seconds."""

    source: Ints  # of each message
    destination: Ints
    links: Floats  # (4, world) network sent and received, NVLink sent and received
    packed: Floats  # (world,)
    unpacked: Floats  # (world,)

    def finish(self, clock: Floats, launch: float) -> Floats:
        """When each rank is through with the round that it reaches at `clock`."""
        share = self.links.max(axis=0, initial=0.0)
        begin = np.maximum(clock[self.source], clock[self.destination]) + launch
        end = begin + np.maximum(share[self.source], share[self.destination])
        over = clock.copy()
        np.maximum.at(over, self.source, end)
        np.maximum.at(over, self.destination, end)
        return over


def round_load(
    source: Ints, destination: Ints, network: Bools, first: Bools, size: Ints, world: int, links: Links
) -> RoundLoad:
    """The load of some messages.

    Args:
        source: Of each message.
        destination: Of each message.
        network: Whether it crosses domains.
        first: Whether it is the first hop of its flow: the one that is packed for.
        size: Its bytes.
        world: One more than the highest rank.
        links: Speed of the links.
    """

    def by_rank(ranks: Ints, nbytes: Ints) -> Floats:
        return np.bincount(ranks, nbytes, minlength=world).astype(float, copy=False)

    loads = np.zeros((4, world))
    for tier, (chosen, speed) in enumerate(((network, links.nic_gbytes), (~network, links.nvlink_gbytes))):
        for side, ranks in enumerate((source, destination)):
            loads[2 * tier + side] = by_rank(ranks[chosen], size[chosen]) / (speed * GB)
    packed = by_rank(source[first], size[first]) / (links.pack_gbytes * GB)
    unpacked = by_rank(destination, size) / (links.pack_gbytes * GB)
    return RoundLoad(source, destination, loads, packed, unpacked)


@dataclass(frozen=True)
class PlanHops:
    """The hops of a plan, column by column."""

    plan: Plan
    flows: Table  # the flow of each hop
    source: Ints
    destination: Ints
    depth: Ints
    network: Bools
    opens: Bools  # first hop of its flow: the one that is packed for

    @classmethod
    def of(cls, plan: Plan) -> PlanHops:
        """The hops of a plan."""
        hops = plan.hops
        source, destination, depth, network = (
            np.ascontiguousarray(hops[name]) for name in ("source", "destination", "depth", "network")
        )
        return cls(plan, plan.flows[hops["flow"]], source, destination, depth, network, opens(hops["flow"]))

    def load(self, number: int, links: Links) -> RoundLoad:
        """What round `number` asks of every rank."""
        row, size = chunks_in_round(self.flows, self.plan.chunk_rounds, number - self.depth)
        source, destination, network = self.source[row], self.destination[row], self.network[row]
        return round_load(source, destination, network, self.opens[row], size, self.plan.world, links)

    @property
    def rounds(self) -> int:
        """How many rounds there are."""
        return self.plan.rounds

    @property
    def network_bytes(self) -> int:
        """Bytes that cross the network."""
        return self.plan.traffic().network_bytes

    def compared(self, links: Links) -> float:
        """Seconds before the first round is packed."""
        return 0.0


@dataclass(frozen=True)
class WideHops:
    """The hops of a plan that sends what changed, in its wide rounds."""

    run: WideRun
    source: Ints  # of each hop of each chunk
    at: Ints  # its wide round

    @classmethod
    def of(cls, plan: Plan, changed: float) -> WideHops:
        """Where the same share of every chunk changed."""
        chunks = Chunks.of(plan)
        entries = np.round(chunks.nbytes // chunks.unit * changed).astype(np.int64)
        run = WideRun.of(
            chunks, np.where(chunks.whole, chunks.nbytes // chunks.unit, entries), chunks.dense_slots()
        )
        at = run.wide[chunks.start[chunks.hop_chunk]] + chunks.hop_depth
        return cls(run, chunks.hop_source, at)

    @property
    def rounds(self) -> int:
        """How many wide rounds there are."""
        return self.run.rounds

    @property
    def network_bytes(self) -> int:
        """Bytes that cross the network."""
        chunks = self.run.chunks
        return int(self.run.sizes.nbytes[chunks.hop_chunk[chunks.hop_network]].sum())

    @cached_property
    def _outgoing(self) -> Ints:
        """Bytes that each rank packs of the whole plan."""
        chunks = self.run.chunks
        return np.bincount(chunks.sender, chunks.nbytes, minlength=chunks.world).astype(np.int64)

    def compared(self, links: Links) -> Floats:
        """Seconds in which each rank packs and compares everything, and hears of the others' counts."""
        rate = 1 / links.pack_gbytes + 1 / links.compare_gbytes
        busiest = float(self._outgoing.max(initial=0))
        return np.full(self.run.chunks.world, busiest * rate / GB + links.round_seconds)

    def load(self, number: int, links: Links) -> RoundLoad:
        """What wide round `number` asks of every rank."""
        chunks, row = self.run.chunks, np.flatnonzero(self.at == number)
        size = self.run.sizes.nbytes[chunks.hop_chunk[row]]
        return round_load(
            self.source[row],
            chunks.hop_destination[row],
            chunks.hop_network[row],
            chunks.hop_depth[row] == 0,
            size,
            chunks.world,
            links,
        )
