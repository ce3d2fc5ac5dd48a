# SPDX-License-Identifier: Apache-2.0
"""The invariants of a plan, proved on its tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nccl_m2n.errors import PlanError
from nccl_m2n.layout import Box
from nccl_m2n.layout.intervals import opens
from nccl_m2n.planning.bundles import stream_cells
from nccl_m2n.planning.tapes import ALIGN
from nccl_m2n.typing import Bools, Ints

if TYPE_CHECKING:
    from nccl_m2n.planning.plan import Plan


def check_plan(plan: Plan) -> None:
    """Prove that a plan does its job; see `Plan.check`."""
    _check_cover(plan)
    _check_senders(plan)
    _check_forwards(plan)
    _check_every_byte_once(plan)
    _check_tiers(plan)


def _fail(plan: Plan, bundle: int, offset: int, rank: int, what: str) -> None:
    """Raise for a byte of a bundle, naming the tensor, the box and the rank."""
    stream = stream_cells(plan.bundles, np.array([bundle]))
    at = int(np.searchsorted(stream.start, offset, side="right")) - 1
    cells = plan.bundles.templates[int(stream.template[at])].cells
    cell = int(stream.cell[at])
    box = Box(tuple(cells.start[cell]), tuple(cells.stop[cell]))
    name = plan.transfers[int(stream.transfer[at])].name
    raise PlanError(f"tensor {name!r}, box {box}, rank {rank}: {what}")


def _check_cover(plan: Plan) -> None:
    """The cells of every transfer are disjoint and as many as what the destination needs."""
    for template in plan.bundles.templates:
        destination = template.destination.partition
        boxes = destination.boxes if hasattr(destination, "boxes") else destination
        wanted = int((boxes.stop - boxes.start).prod(axis=1).sum())
        if wanted != int(template.cells.size.sum()):
            name = plan.transfers[int(template.transfers[0])].name
            raise PlanError(
                f"tensor {name!r}: expected cells of {wanted} elements, got {template.cells.size.sum()}"
            )


def _check_senders(plan: Plan) -> None:
    table, flows = plan.bundles.sets.table(), plan.flows
    for flow in flows[
        _not_in(table.members(plan.bundles.table["holders"]), flows["bundle"], flows["sender"])
    ]:
        _fail(
            plan, int(flow["bundle"]), int(flow["start"]), int(flow["sender"]), "sends what it does not hold"
        )
    size = plan.bundles.table["bytes"][flows["bundle"]]
    cut = (flows["start"] % ALIGN != 0) | ((flows["stop"] % ALIGN != 0) & (flows["stop"] != size))
    for flow in flows[cut | (flows["start"] >= flows["stop"])]:
        _fail(plan, int(flow["bundle"]), int(flow["start"]), int(flow["sender"]), "is cut at a wrong place")


def _not_in(pairs: tuple[Ints, Ints], rows: Ints, ranks: Ints) -> Bools:
    world = 1 + max(int(pairs[1].max(initial=0)), int(ranks.max(initial=0)))
    return np.isin(rows * world + ranks, pairs[0] * world + pairs[1], invert=True)


def _check_forwards(plan: Plan) -> None:
    """Every hop leaves from where the flow has arrived, one round earlier; nobody gets a flow twice."""
    hops, flows = plan.hops, plan.flows
    span = plan.world * (plan.depth + 2)
    arrival = hops["flow"] * span + hops["destination"] * (plan.depth + 2) + hops["depth"] + 1
    departure = hops["flow"] * span + hops["source"] * (plan.depth + 2) + hops["depth"]
    first = (hops["depth"] == 0) & (hops["source"] == flows["sender"][hops["flow"]])
    wrong = ~first & np.isin(departure, arrival, invert=True)
    for hop in hops[wrong]:
        flow = flows[hop["flow"]]
        _fail(
            plan,
            int(flow["bundle"]),
            int(flow["start"]),
            int(hop["source"]),
            "passes on what has not arrived",
        )
    receipt = hops["flow"] * plan.world + hops["destination"]
    _, index, counts = np.unique(receipt, return_index=True, return_counts=True)
    for hop in hops[index[counts > 1]]:
        flow = flows[hop["flow"]]
        _fail(plan, int(flow["bundle"]), int(flow["start"]), int(hop["destination"]), "receives it twice")


def _check_every_byte_once(plan: Plan) -> None:
    """What a needer receives of a bundle follows on without gap or overlap from first byte to last."""
    flows = plan.flows[plan.hops["flow"]]
    rank, bundle = plan.hops["destination"], flows["bundle"]
    wanted = plan.bundles.sets.table().members(plan.bundles.table["remote"])
    needed = ~_not_in(wanted, bundle, rank)
    order = np.flatnonzero(needed)[np.lexsort((flows["start"][needed], rank[needed], bundle[needed]))]
    bundle, rank, start, stop = bundle[order], rank[order], flows["start"][order], flows["stop"][order]
    first = opens(bundle, rank)
    last = np.append(first[1:], True)[: len(order)]
    expected = np.where(first, 0, np.append(0, stop[:-1])[: len(order)])
    bad = (start != expected) | (last & (stop != plan.bundles.table["bytes"][bundle]))
    for i in np.flatnonzero(bad)[:1].tolist():
        _fail(plan, int(bundle[i]), int(expected[i]), int(rank[i]), "is not received exactly once")
    for i in np.flatnonzero(_not_in((bundle[first], rank[first]), *wanted))[:1].tolist():
        _fail(plan, int(wanted[0][i]), 0, int(wanted[1][i]), "is never received")


def _check_tiers(plan: Plan) -> None:
    domain_of = plan.topology.domain_table
    crosses = domain_of[plan.hops["source"]] != domain_of[plan.hops["destination"]]
    if (crosses != plan.hops["network"]).any():
        raise PlanError("expected hops between domains, and no others, to be marked as network")
    traffic = plan.traffic()
    if plan.options.method == "reshard" and traffic.network_bytes != traffic.network_bytes_bound:
        raise PlanError(
            f"expected {traffic.network_bytes_bound} network bytes, the least there can be, "
            f"got {traffic.network_bytes}"
        )
