# SPDX-License-Identifier: Apache-2.0
"""What measurements amount to: bandwidths, tables, and files of raw samples."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nccl_m2n.dtypes import item_size
from nccl_m2n.measure.peers import UNVERIFIED
from nccl_m2n.planning import Plan
from nccl_m2n.text import align_table
from nccl_m2n.typing import Json, JsonObject

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Volume:
    """The bytes that bandwidths are counted from; those of the problem, the same for every method."""

    nbytes: int  # of the global tensors, each once
    bus_bytes: int  # that the busiest rank sends or receives, over the bottleneck tier
    tier: str  # "network", "within domains", or "none" where nothing goes from rank to rank

    @classmethod
    def of(cls, plan: Plan) -> Volume:
        """That of the problem that a Reshard plan is for."""
        traffic = plan.traffic()
        nbytes = sum(math.prod(t.shape) * item_size(t.wire_dtype) for t in plan.transfers)
        if traffic.network_bytes:
            return cls(nbytes, traffic.busiest, "network")
        within = max(int(traffic.nvlink_sent.max(initial=0)), int(traffic.nvlink_received.max(initial=0)))
        return cls(nbytes, within, "within domains" if within else "none")

    def bandwidths(self, seconds: float) -> tuple[float, float]:
        """Algorithm and bus bandwidth, in bytes a second."""
        return self.nbytes / seconds, self.bus_bytes / seconds


def results_table(results: Mapping[str, JsonObject]) -> str:
    """What `measure_case` returns as an aligned table, times beside those of the limit."""
    median = {method: statistics.median(result["seconds"]) for method, result in results.items()}
    limit = median.get("limit")
    table = [["", "median ms", "min", "max", "x limit", "host ms", "wrong", "rounds", "staging MiB"]]
    for method, result in results.items():
        checked = result["wrong"] is not None and method not in UNVERIFIED
        table.append(
            [
                method,
                f"{median[method] * 1e3:.2f}",
                f"{min(result['seconds']) * 1e3:.2f}",
                f"{max(result['seconds']) * 1e3:.2f}",
                f"{median[method] / limit:.3f}" if limit else "-",
                f"{statistics.median(result['host_seconds']) * 1e3:.3f}",
                str(result["wrong"]) if checked else "-",
                str(result.get("rounds", "-")),
                f"{result['staging_bytes'] / 2**20:.1f}" if "staging_bytes" in result else "-",
            ]
        )
    return align_table(table)


def write_results(path: str | None, name: str, **data: Json) -> None:
    """Write raw samples as JSON, with the schema ``nccl_m2n.bench.NAME``; nothing without a path."""
    if path is not None:
        head = {"schema": f"nccl_m2n.bench.{name}", "schema_version": SCHEMA_VERSION}
        Path(path).write_text(json.dumps({**head, **data}) + "\n", encoding="utf-8")
