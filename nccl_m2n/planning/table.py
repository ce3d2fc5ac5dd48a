# SPDX-License-Identifier: Apache-2.0
"""Plans as a table: a column of figures for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nccl_m2n.dtypes import item_size
from nccl_m2n.planning.topology import Topology
from nccl_m2n.planning.traffic import Traffic
from nccl_m2n.planning.transfer import Transfer
from nccl_m2n.text import bytes_text, short_ranks

LABELS = (
    "flows",
    "network",
    "  least there can be",
    "NVLink",
    "local copies",
    "busiest NIC",
    "  layouts allow",
    "rounds",
    "messages",
    "staging, busiest rank",
)


@dataclass(frozen=True)
class Figures:
    """A plan in numbers."""

    method: str
    flows: int
    traffic: Traffic
    rounds: int
    messages: int
    staging_bytes: int  # of the busiest rank
    nic_bound: int  # see `nccl_m2n.planning.traffic.nic_bound`

    @property
    def name(self) -> str:
        """The method's name for people."""
        return self.method.replace("_", "+")


def plan_rows(plans: Sequence[Figures]) -> list[list[str]]:
    """The table's cells: a header, then one row a quantity; labels first, then one column a plan."""
    rows = zip(LABELS, *map(_column, plans), strict=True)
    return [["", *[p.name for p in plans]], *map(list, rows)]


def title(transfers: Sequence[Transfer], topology: Topology) -> str:
    """One line: what is moved, from where to where."""
    layouts = {(t.source, t.destination) for t in transfers}
    source = sorted({rank for a, _ in layouts for rank in a.ranks})
    destination = sorted({rank for _, b in layouts for rank in b.ranks})
    total = sum(int(np.prod(t.shape, dtype=object)) * item_size(t.dtype) for t in transfers)
    tensors = f"{len(transfers)} tensor" + ("s" if len(transfers) != 1 else "")
    way = f"from ranks {short_ranks(source)} to ranks {short_ranks(destination)}"
    return f"{tensors}, {bytes_text(total)}, {way}; {topology}"


def _column(plan: Figures) -> list[str]:
    traffic = plan.traffic
    return [
        f"{plan.flows}",
        bytes_text(traffic.network_bytes),
        bytes_text(traffic.network_bytes_bound),
        bytes_text(traffic.nvlink_bytes),
        bytes_text(traffic.local_bytes),
        bytes_text(traffic.busiest),
        bytes_text(plan.nic_bound),
        f"{plan.rounds}",
        f"{plan.messages}",
        bytes_text(plan.staging_bytes),
    ]
