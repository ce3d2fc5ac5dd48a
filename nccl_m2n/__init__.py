# SPDX-License-Identifier: Apache-2.0
"""Reshard: move sharded tensors from M ranks in one layout to N ranks in another."""

from nccl_m2n import _moved
from nccl_m2n.errors import (
    CommandError,
    DisagreementError,
    LayoutError,
    M2nError,
    PlanError,
    TransferTimeout,
    TransportError,
    VerificationError,
)
from nccl_m2n.layout import Box, Layout, Mesh, Piece, Placement, Replicate, Segment, Shard, StridedShard
from nccl_m2n.planning import Plan, Topology, Transfer, plan
from nccl_m2n.refit import Parameter, Refit
from nccl_m2n.resharding import reshard
from nccl_m2n.simulation import Links, Timeline, simulate
from nccl_m2n.transport import LocalTransport, MpiTransport, NcclTransport, SocketTransport

__version__ = "0.1.0"
_moved.install()

__all__ = [
    "Box",
    "CommandError",
    "DisagreementError",
    "Layout",
    "LayoutError",
    "Links",
    "LocalTransport",
    "M2nError",
    "Mesh",
    "MpiTransport",
    "NcclTransport",
    "Parameter",
    "Piece",
    "Placement",
    "Plan",
    "PlanError",
    "Refit",
    "Replicate",
    "Segment",
    "Shard",
    "SocketTransport",
    "StridedShard",
    "Timeline",
    "Topology",
    "Transfer",
    "TransferTimeout",
    "TransportError",
    "VerificationError",
    "plan",
    "reshard",
    "simulate",
]
