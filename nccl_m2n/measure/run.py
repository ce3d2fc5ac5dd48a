# SPDX-License-Identifier: Apache-2.0
"""Timing methods side by side: interleaved, the slowest rank counts, results verified."""

from __future__ import annotations

import time
from collections.abc import Sequence

from nccl_m2n.measure.peers import PEERS, UNVERIFIED
from nccl_m2n.measure.setting import Method, Setting
from nccl_m2n.planning import Topology, Transfer
from nccl_m2n.transport.base import Transport
from nccl_m2n.typing import JsonObject


def measure_case(
    transport: Transport,
    transfers: Sequence[Transfer],
    topology: Topology,
    methods: Sequence[str],
    *,
    iterations: int = 7,
    warmup: int = 1,
    timeout: float = 60.0,
    check: bool = True,
) -> dict[str, JsonObject]:
    """Time some methods on one problem. Collective.

    Args:
        transport: Joins the ranks; in device memory or in host memory.
        transfers: The problem, of uint16 elements.
        topology: The domains.
        methods: Some of what `peers.available` names; they take turns, so that drift falls on all alike.
        iterations: Timed runs of each.
        warmup: Runs before these.
        timeout: Of each run, in seconds.
        check: Whether the first and the last run of each method are verified.

    Returns:
        By method: ``seconds`` (of the slowest rank, by run), ``host_seconds`` (until `start` had returned,
        likewise), ``wrong`` elements over all ranks (None where it was not checked), and for plans
        ``staging_bytes`` (of this process) and ``rounds``. But for the staging, on every rank the same.
    """
    setting = Setting.of(transport, transfers, topology)
    results: dict[str, JsonObject] = {
        m: {"seconds": [], "host_seconds": [], "wrong": 0 if check and m not in UNVERIFIED else None}
        for m in methods
    }
    with setting.memory.on(setting.rank):
        peers = {m: PEERS[m](setting) for m in methods}
        for turn in range(warmup + iterations):
            for method, peer in peers.items():
                result = results[method]
                ends = turn in (0, warmup + iterations - 1)
                host, total, wrong = _one_run(setting, peer, timeout, ends and result["wrong"] is not None)
                if wrong:
                    result["wrong"] += wrong
                if turn >= warmup:
                    result["host_seconds"].append(host)
                    result["seconds"].append(total)
        for method, peer in peers.items():
            results[method] |= peer.facts()
        for peer in reversed(peers.values()):
            peer.close()
    return results


def _one_run(setting: Setting, peer: Method, timeout: float, check: bool) -> tuple[float, float, int]:
    """Seconds until `start` had returned and until all was done, and wrong elements; of all ranks."""
    if check:
        setting.spoil()
    setting.memory.settle()
    setting.share({})  # a common beginning
    began = time.perf_counter()
    peer.start(setting.memory.streams)
    queued = time.perf_counter()
    setting.memory.finish(peer, timeout)
    done = time.perf_counter()
    wrong = setting.count_wrong() if check else {}
    said = setting.share({r: [queued - began, done - began, wrong.get(r, 0)] for r in setting.stacks})
    hosts, totals, wrongs = zip(*said, strict=True)
    return max(hosts), max(totals), sum(wrongs)
