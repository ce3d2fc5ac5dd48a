# SPDX-License-Identifier: Apache-2.0
"""Timing methods side by side: interleaved, the slowest rank counts, results verified."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from nccl_m2n.measure.data import by_name, count_wrong, fill, spoil, stacks
from nccl_m2n.measure.peers import PEERS
from nccl_m2n.planning import Topology, Transfer
from nccl_m2n.transport.gpu import import_cupy
from nccl_m2n.transport.nccl import NcclTransport

UNVERIFIED = {"limit"}  # it moves bytes that nobody asked for


def measure_case(
    transport: NcclTransport,
    transfers: Sequence[Transfer],
    topology: Topology,
    methods: Sequence[str],
    *,
    iterations: int = 7,
    warmup: int = 1,
    timeout: float = 60.0,
) -> dict[str, Any]:
    """Time some methods on one problem. Collective; one rank a process.

    Args:
        transport: Joins the ranks.
        transfers: The problem, of uint16 elements.
        topology: The domains.
        methods: Names out of `PEERS`; they take turns, so that drift falls on all alike.
        iterations: Timed runs of each.
        warmup: Runs before these.
        timeout: Of each run, in seconds.

    Returns:
        By method: ``seconds`` (of the slowest rank, by run), ``host_seconds`` (until `start` had returned,
        likewise), ``wrong`` elements over all ranks, or ``error``. On every rank the same.
    """
    cupy, rank = import_cupy(), transport.local_ranks[0]
    sources, destinations = (stacks(transfers, side, rank) for side in ("source", "destination"))
    fill(sources, rank)
    arrays = by_name(sources), by_name(destinations)
    stream = cupy.cuda.Stream(non_blocking=True)
    results: dict[str, Any] = {m: {"seconds": [], "host_seconds": [], "wrong": 0} for m in methods}
    peers = {m: PEERS[m](transport, transfers, arrays, topology) for m in methods}
    for turn in range(warmup + iterations):
        for method, peer in peers.items():
            check = method not in UNVERIFIED and turn in (0, warmup + iterations - 1)
            if check:
                spoil(destinations)
            cupy.cuda.runtime.deviceSynchronize()
            host, total = _timed(transport, lambda p=peer: p.start(stream), stream, timeout)
            wrong = count_wrong(destinations, rank) if check else 0
            said = [
                json.loads(t) for t in transport.exchange({rank: json.dumps([host, total, wrong]).encode()})
            ]
            results[method]["wrong"] += sum(w for _, _, w in said)
            if turn >= warmup:
                results[method]["host_seconds"].append(max(h for h, _, _ in said))
                results[method]["seconds"].append(max(t for _, t, _ in said))
    for method, peer in peers.items():
        bound = getattr(peer, "bound", None)
        if bound is not None:
            results[method]["staging_bytes"] = bound.staging_bytes
            results[method]["rounds"] = bound.plan.rounds
    for peer in reversed(peers.values()):
        peer.close()
    return results


def _timed(
    transport: NcclTransport, start: Callable[[], None], stream: Any, timeout: float
) -> tuple[float, float]:
    """Seconds until `start` had returned and until its work was done, from a common beginning."""
    transport.exchange({transport.local_ranks[0]: b""})
    began = time.perf_counter()
    start()
    queued = time.perf_counter()
    transport.wait(lambda: stream.done, time.monotonic() + timeout, "a measured run")
    return queued - began, time.perf_counter() - began
