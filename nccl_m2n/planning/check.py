# SPDX-License-Identifier: Apache-2.0
"""The invariants of a plan, proved on its tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nccl_m2n.errors import PlanError
from nccl_m2n.layout import Box
from nccl_m2n.layout.intervals import opens
from nccl_m2n.planning.bundles import Bundles, stream_cells
from nccl_m2n.planning.routes import Routes
from nccl_m2n.planning.tapes import ALIGN
from nccl_m2n.planning.topology import Topology
from nccl_m2n.planning.traffic import count_traffic
from nccl_m2n.typing import Bools, Ints, Table


@dataclass(frozen=True)
class _Checked:
    """What is looked at."""

    names: Sequence[str]  # of the transfers
    bundles: Bundles
    flows: Table
    hops: Table

    def fail(self, bundle: int, offset: int, rank: int, what: str) -> None:
        """Raise for a byte of a bundle, naming the tensor, the box and the rank."""
        stream = stream_cells(self.bundles, np.array([bundle]))
        at = int(np.searchsorted(stream.start, offset, side="right")) - 1
        cells = self.bundles.templates[int(stream.template[at])].cells
        cell = int(stream.cell[at])
        box = Box(tuple(cells.start[cell]), tuple(cells.stop[cell]))
        name = self.names[int(stream.transfer[at])]
        raise PlanError(f"tensor {name!r}, box {box}, rank {rank}: {what}")


def check_routes(
    names: Sequence[str], bundles: Bundles, routes: Routes, topology: Topology, *, least: bool
) -> None:
    """Prove that routes do their job.

    Args:
        names: Of the transfers, for errors.
        bundles: What is to be moved.
        routes: How it is moved.
        topology: Between which ranks there is only the network.
        least: Whether no byte may cross the network more often than it must.

    Raises:
        PlanError: Naming the tensor, the box and the rank where an invariant is broken.
    """
    it = _Checked(names, bundles, routes.flows, routes.hops)
    _check_cover(it)
    _check_senders(it)
    _check_forwards(it)
    _check_every_byte_once(it)
    _check_tiers(it, topology)
    traffic = count_traffic(bundles, routes, topology)
    if least and traffic.network_bytes != traffic.network_bytes_bound:
        raise PlanError(
            f"expected {traffic.network_bytes_bound} network bytes, the least there can be, "
            f"got {traffic.network_bytes}"
        )


def _check_cover(it: _Checked) -> None:
    """The cells of every transfer are disjoint and as many as what the destination needs."""
    for template in it.bundles.templates:
        destination = template.destination.partition
        boxes = destination.boxes
        wanted = int((boxes.stop - boxes.start).prod(axis=1).sum())
        if wanted != int(template.cells.size.sum()):
            name = it.names[int(template.transfers[0])]
            raise PlanError(
                f"tensor {name!r}: expected cells of {wanted} elements, got {template.cells.size.sum()}"
            )


def _check_senders(it: _Checked) -> None:
    table, flows = it.bundles.sets.table(), it.flows
    for flow in flows[_not_in(table.members(it.bundles.table["holders"]), flows["bundle"], flows["sender"])]:
        it.fail(int(flow["bundle"]), int(flow["start"]), int(flow["sender"]), "sends what it does not hold")
    size = it.bundles.table["bytes"][flows["bundle"]]
    cut = (flows["start"] % ALIGN != 0) | ((flows["stop"] % ALIGN != 0) & (flows["stop"] != size))
    for flow in flows[cut | (flows["start"] >= flows["stop"])]:
        it.fail(int(flow["bundle"]), int(flow["start"]), int(flow["sender"]), "is cut at a wrong place")


def _not_in(pairs: tuple[Ints, Ints], rows: Ints, ranks: Ints) -> Bools:
    world = 1 + max(int(pairs[1].max(initial=0)), int(ranks.max(initial=0)))
    return np.isin(rows * world + ranks, pairs[0] * world + pairs[1], invert=True)


def _check_forwards(it: _Checked) -> None:
    """Every hop leaves from where the flow has arrived, one round earlier; nobody gets a flow twice."""
    hops, flows, world = it.hops, it.flows, it.bundles.world
    rounds = int(hops["depth"].max(initial=0)) + 2
    arrival = (hops["flow"] * world + hops["destination"]) * rounds + hops["depth"] + 1
    departure = (hops["flow"] * world + hops["source"]) * rounds + hops["depth"]
    first = (hops["depth"] == 0) & (hops["source"] == flows["sender"][hops["flow"]])
    wrong = ~first & np.isin(departure, arrival, invert=True)
    for hop in hops[wrong]:
        flow = flows[hop["flow"]]
        it.fail(
            int(flow["bundle"]),
            int(flow["start"]),
            int(hop["source"]),
            "passes on what has not arrived",
        )
    receipt = hops["flow"] * world + hops["destination"]
    _, index, counts = np.unique(receipt, return_index=True, return_counts=True)
    for hop in hops[index[counts > 1]]:
        flow = flows[hop["flow"]]
        it.fail(int(flow["bundle"]), int(flow["start"]), int(hop["destination"]), "receives it twice")


def _check_every_byte_once(it: _Checked) -> None:
    """What a needer receives of a bundle follows on without gap or overlap from first byte to last."""
    flows = it.flows[it.hops["flow"]]
    rank, bundle = it.hops["destination"], flows["bundle"]
    wanted = it.bundles.sets.table().members(it.bundles.table["remote"])
    needed = ~_not_in(wanted, bundle, rank)
    order = np.flatnonzero(needed)[np.lexsort((flows["start"][needed], rank[needed], bundle[needed]))]
    bundle, rank, start, stop = bundle[order], rank[order], flows["start"][order], flows["stop"][order]
    first = opens(bundle, rank)
    last = np.append(first[1:], True)[: len(order)]
    expected = np.where(first, 0, np.append(0, stop[:-1])[: len(order)])
    bad = (start != expected) | (last & (stop != it.bundles.table["bytes"][bundle]))
    for i in np.flatnonzero(bad)[:1].tolist():
        it.fail(int(bundle[i]), int(expected[i]), int(rank[i]), "is not received exactly once")
    for i in np.flatnonzero(_not_in((bundle[first], rank[first]), *wanted))[:1].tolist():
        it.fail(int(wanted[0][i]), 0, int(wanted[1][i]), "is never received")


def _check_tiers(it: _Checked, topology: Topology) -> None:
    domain_of = topology.domain_table
    crosses = domain_of[it.hops["source"]] != domain_of[it.hops["destination"]]
    if (crosses != it.hops["network"]).any():
        raise PlanError("expected hops between domains, and no others, to be marked as network")
