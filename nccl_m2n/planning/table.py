# SPDX-License-Identifier: Apache-2.0
"""A plan as an aligned table, beside the plans that the usual ways would make."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nccl_m2n.dtypes import item_size
from nccl_m2n.text import align_table, bytes_text, short_ranks

if TYPE_CHECKING:
    from nccl_m2n.planning.plan import Plan

MAX_COMPARED_HOPS = 50_000  # of some hundred messages each: more would make printing slower than planning


LABELS = (
    "flows",
    "network",
    "  least there can be",
    "NVLink",
    "local copies",
    "busiest NIC",
    "  of its mean",
    "rounds",
    "messages",
    "staging, busiest rank",
)


def plan_table(plan: Plan) -> str:
    """What `print(plan)` shows."""
    return f"{title(plan)}\n{align_table(plan_rows(plan))}"


def plan_rows(plan: Plan) -> list[list[str]]:
    """The table's cells: a header, then one row a quantity; labels first, then one column a method."""
    columns = [plan, *compared_plans(plan)]
    header = ["", *[c.options.method.replace("_", "+") for c in columns]]
    rows = zip(LABELS, *map(_column, columns), strict=True)
    return [header, *map(list, rows)]


def title(plan: Plan) -> str:
    """One line: what is moved, from where to where."""
    layouts = plan.bundles.templates
    source = sorted({r for t in layouts for r in t.source.ranks})
    destination = sorted({r for t in layouts for r in t.destination.ranks})
    total = sum(int(np.prod(t.shape, dtype=object)) * item_size(t.dtype) for t in plan.transfers)
    tensors = f"{len(plan.transfers)} tensor" + ("s" if len(plan.transfers) != 1 else "")
    way = f"from ranks {short_ranks(source)} to ranks {short_ranks(destination)}"
    return f"{tensors}, {bytes_text(total)}, {way}; {plan.topology}"


def compared_plans(plan: Plan) -> list[Plan]:
    """The same transfers by the other methods, as far as that is not too long a list."""
    from nccl_m2n.planning.plan import plan as make

    if plan.options.method != "reshard":
        return []
    counts = plan.bundles.sets.table().counts
    needers = {r for t in plan.bundles.templates for r in t.destination.ranks}
    hops = {
        "direct": int(counts[plan.bundles.table["remote"]].sum()),
        "gather_broadcast": len(plan.bundles.table) * len(needers),
    }
    staging = plan.options.staging_bytes
    return [
        make(plan.transfers, plan.topology, method=method, staging_bytes=staging)
        for method, amount in hops.items()
        if amount <= MAX_COMPARED_HOPS
    ]


def _column(plan: Plan) -> list[str]:
    traffic = plan.traffic()
    used = np.maximum(traffic.sent, traffic.received)
    mean = used[used > 0].mean() if used.any() else 0
    messages = int(plan.flows["chunks"][plan.hops["flow"]].sum())
    return [
        f"{len(plan.flows)}",
        bytes_text(traffic.network_bytes),
        bytes_text(traffic.network_bytes_bound),
        bytes_text(traffic.nvlink_bytes),
        bytes_text(traffic.local_bytes),
        bytes_text(traffic.busiest),
        f"{traffic.busiest / mean:.3f} ×" if mean else "–",
        f"{plan.rounds}",
        f"{messages}",
        bytes_text(int(plan.staging.max(initial=0))),
    ]
