# SPDX-License-Identifier: Apache-2.0
"""How bytes move. Nothing here knows of layouts or plans, and nothing imports MPI or CUDA before it is asked for."""

from nccl_m2n.transport.base import DeviceTransport, Message, PreparedRound, Transport
from nccl_m2n.transport.local import LocalTransport
from nccl_m2n.transport.mpi import MpiTransport
from nccl_m2n.transport.nccl import NcclTransport
from nccl_m2n.transport.tcp import SocketTransport

# A transport is its own module and an entry here. Where several may be had, the first one is taken.
KINDS: dict[str, type[Transport]] = {
    each.kind: each for each in (NcclTransport, MpiTransport, SocketTransport, LocalTransport)
}

__all__ = [
    "KINDS",
    "DeviceTransport",
    "LocalTransport",
    "Message",
    "MpiTransport",
    "NcclTransport",
    "PreparedRound",
    "SocketTransport",
    "Transport",
]
