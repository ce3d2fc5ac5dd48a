# SPDX-License-Identifier: Apache-2.0
"""The cost model: a clock for each rank, moved on round by round.

A rank's messages of one round share its links and end together. A message starts when both of its ends
have reached the round, and takes as long as the busier of the two needs for all that it has to move there.
Packing for the next round and unpacking of the last one run beside a round, as the executors do it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nccl_m2n.checks import made_by
from nccl_m2n.errors import PlanError
from nccl_m2n.layout.intervals import opens
from nccl_m2n.planning import Plan
from nccl_m2n.planning.rounds import chunks_in_round
from nccl_m2n.simulation.links import Links
from nccl_m2n.simulation.timeline import Timeline
from nccl_m2n.typing import Floats, Ints, Table

GB = 1e9  # bytes


def simulate(plan: Plan, links: Links | None = None) -> Timeline:
    """Predict how long one run of a plan takes.

    Pure: nothing is sent, and no more ranks are needed than there are on paper.

    Args:
        plan: The plan.
        links: Speed of the links; None takes a 400 Gbit/s NIC a rank and the NVLink of an H100.

    Example:
        >>> from nccl_m2n import Layout, Links, Mesh, Replicate, Shard, Topology, Transfer, plan, simulate
        >>> source = Layout((8192, 8192), Mesh.arange((4,)), [Shard(0)])
        >>> destination = Layout((8192, 8192), Mesh.arange((4,), start=4), [Replicate()])
        >>> made = plan(Transfer(source, destination, "float32"), Topology.regular(8, 4))
        >>> timeline = simulate(made, Links(nic_gbytes=0.5))
        >>> f"{timeline.seconds:.3f} s, of which {timeline.wire_seconds:.3f} s for the bytes"
        '0.135 s, of which 0.134 s for the bytes'
    """
    made_by(plan, Plan, "the plan", error=PlanError, hint="make one with plan(transfers, topology)")
    speeds = (
        Links() if links is None else made_by(links, Links, "links", error=PlanError, hint="write Links(…)")
    )
    local = _local_bytes(plan) / (speeds.pack_gbytes * GB)
    if not plan.rounds:
        return Timeline(plan, speeds, simulate, np.zeros((0, plan.world)), local, np.zeros((4, plan.world)))
    hops = _Hops.of(plan)
    beside = local / plan.rounds  # local copies are spread over the rounds
    ends, busy = np.zeros((plan.rounds, plan.world)), np.zeros((4, plan.world))
    load = hops.load(0, speeds)
    unpacked, clock = np.zeros(plan.world), load.packed
    for x in range(plan.rounds):
        following = hops.load(x + 1, speeds)
        copied = clock + unpacked + following.packed + beside
        ends[x] = clock = np.maximum(load.finish(clock, speeds.round_seconds), copied)
        busy += load.links
        unpacked, load = load.unpacked, following
    return Timeline(plan, speeds, simulate, ends, clock + unpacked, busy)


@dataclass(frozen=True)
class _Round:
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


@dataclass(frozen=True)
class _Hops:
    """The hops of a plan, column by column."""

    plan: Plan
    flows: Table  # the flow of each hop
    source: Ints
    destination: Ints
    depth: Ints
    network: npt.NDArray[np.bool_]
    opens: npt.NDArray[np.bool_]  # first hop of its flow: the one that is packed for

    @classmethod
    def of(cls, plan: Plan) -> _Hops:
        hops = plan.hops
        source, destination, depth, network = (
            np.ascontiguousarray(hops[name]) for name in ("source", "destination", "depth", "network")
        )
        return cls(plan, plan.flows[hops["flow"]], source, destination, depth, network, opens(hops["flow"]))

    def load(self, number: int, links: Links) -> _Round:
        """What round `number` asks of every rank."""
        row, size = chunks_in_round(self.flows, self.plan.chunk_rounds, number - self.depth)
        source, destination, network = self.source[row], self.destination[row], self.network[row]
        loads = np.zeros((4, self.plan.world))
        for tier, (chosen, speed) in enumerate(
            ((network, links.nic_gbytes), (~network, links.nvlink_gbytes))
        ):
            for side, ranks in enumerate((source, destination)):
                loads[2 * tier + side] = self._by_rank(ranks[chosen], size[chosen]) / (speed * GB)
        opens = self.opens[row]
        packed = self._by_rank(source[opens], size[opens]) / (links.pack_gbytes * GB)
        unpacked = self._by_rank(destination, size) / (links.pack_gbytes * GB)
        return _Round(source, destination, loads, packed, unpacked)

    def _by_rank(self, ranks: Ints, size: Ints) -> Floats:
        return np.bincount(ranks, size, minlength=self.plan.world).astype(float, copy=False)


def _local_bytes(plan: Plan) -> Floats:
    """Bytes that each rank copies within its own arrays."""
    table, sets = plan.bundles.table, plan.bundles.sets.table()
    load = np.zeros(plan.world)
    for needers, sign in (("needers", 1), ("remote", -1)):
        row, rank = sets.members(table[needers])
        load += sign * np.bincount(rank, table["bytes"][row], minlength=plan.world)
    return load
