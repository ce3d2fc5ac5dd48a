# SPDX-License-Identifier: Apache-2.0
"""The cost model: a clock for each rank, moved on round by round.

A rank's messages of one round share its links and end together. A message starts when both of its ends
have reached the round, and takes as long as the busier of the two needs for all that it has to move there.
Packing for the next round and unpacking of the last one run beside a round, as the executors do it.
"""

from __future__ import annotations

import numpy as np

from nccl_m2n.checks import made_by, real_number
from nccl_m2n.errors import PlanError
from nccl_m2n.planning import Plan
from nccl_m2n.simulation.links import Links
from nccl_m2n.simulation.rounds import PlanHops, WideHops
from nccl_m2n.simulation.timeline import Timeline
from nccl_m2n.typing import Floats

GB = 1e9  # bytes


def simulate(plan: Plan, links: Links | None = None, *, changed: float | None = None) -> Timeline:
    """Predict how long one run of a plan takes.

    Pure: nothing is sent, and no more ranks are needed than there are on paper.

    Args:
        plan: The plan.
        links: Speed of the links; None takes a 400 Gbit/s NIC a rank and the NVLink of an H100.
        changed: Share of the elements that changed since the last run, where only these are sent, as with
            ``plan.bind(…, delta=True)``; spread evenly. None sends everything.

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
    if changed is not None:
        changed = real_number(changed, "changed", zero=True)
    if not plan.rounds:
        return Timeline(
            plan, speeds, simulate, 0, np.zeros((0, plan.world)), local, np.zeros((4, plan.world))
        )
    hops: PlanHops | WideHops = PlanHops.of(plan) if changed is None else WideHops.of(plan, changed)
    beside = local / hops.rounds  # local copies are spread over the rounds
    ends, busy = np.zeros((hops.rounds, plan.world)), np.zeros((4, plan.world))
    load = hops.load(0, speeds)
    unpacked, clock = np.zeros(plan.world), hops.compared(speeds) + load.packed
    for x in range(hops.rounds):
        following = hops.load(x + 1, speeds)
        copied = clock + unpacked + following.packed + beside
        ends[x] = clock = np.maximum(load.finish(clock, speeds.round_seconds), copied)
        busy += load.links
        unpacked, load = load.unpacked, following
    return Timeline(plan, speeds, simulate, hops.network_bytes, ends, clock + unpacked, busy)


def _local_bytes(plan: Plan) -> Floats:
    """Bytes that each rank copies within its own arrays."""
    table, sets = plan.bundles.table, plan.bundles.sets.table()
    load = np.zeros(plan.world)
    for needers, sign in (("needers", 1), ("remote", -1)):
        row, rank = sets.members(table[needers])
        load += sign * np.bincount(rank, table["bytes"][row], minlength=plan.world)
    return load
