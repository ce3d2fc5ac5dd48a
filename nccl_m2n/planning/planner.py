# SPDX-License-Identifier: Apache-2.0
"""Asking for plans: anew, or remembered by value."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from nccl_m2n.planning.options import DEFAULT_STAGING_BYTES, PlanOptions
from nccl_m2n.planning.plans import Plan
from nccl_m2n.planning.topology import Topology
from nccl_m2n.planning.transfer import Transfer


def plan(
    transfers: Transfer | Sequence[Transfer],
    topology: Topology | None = None,
    *,
    method: str = "reshard",
    chunk_bytes: int | None = None,
    staging_bytes: int = DEFAULT_STAGING_BYTES,
) -> Plan:
    """Plan one transfer or many as one collective.

    Pure: no rank, no device, no clock, no environment. All ranks get the same plan.

    Args:
        transfers: What to move.
        topology: NVLink domains of all ranks; None takes them all to be in one (one machine).
        method: See `PlanOptions`, as for the next two.
        chunk_bytes: Upper bound of a chunk, in bytes; None chooses.
        staging_bytes: Staging that a rank may need, in bytes.

    Raises:
        PlanError: For two transfers of one name, ranks in no domain, holes in the source, or options
            out of range.

    Example:
        >>> from nccl_m2n import Layout, Mesh, Replicate, Shard, Topology, Transfer, plan
        >>> source = Layout((1024, 512), Mesh.arange((4,)), [Shard(0)])
        >>> destination = Layout((1024, 512), Mesh.arange((4,), start=4), [Replicate()])
        >>> made = plan(Transfer(source, destination, "bfloat16", "w"), Topology.regular(8, 4))
        >>> made.traffic().network_bytes
        1048576
    """
    items = (transfers,) if isinstance(transfers, Transfer) else transfers
    return Plan.of(items, topology, PlanOptions(method, chunk_bytes, staging_bytes))


@lru_cache(maxsize=64)
def cached_plan(transfers: tuple[Transfer, ...], topology: Topology | None, options: PlanOptions) -> Plan:
    """`Plan.of`, remembered by value for the last few problems."""
    return Plan.of(transfers, topology, options)
