# SPDX-License-Identifier: Apache-2.0
"""The ranks that problems are tried on: all in this process, or one here and the others elsewhere."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

import nccl_m2n as m2n
from nccl_m2n.transport.base import Transport
from tests.fuzz.memory import Arena

TRANSPORTS = ("local", "mpi", "socket", "nccl")
END = "the end of a case"


def find_transport() -> str:
    """What this process was started for: MPI where a launcher of it did, NCCL or TCP under torchrun's variables."""
    if any(name in os.environ for name in ("PMI_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")):
        return "mpi"
    if "WORLD_SIZE" not in os.environ:
        return "local"
    try:
        from nccl_m2n.transport.gpu import device_count

        return "nccl" if device_count() else "socket"
    except m2n.M2nError:
        return "socket"


def make_transport(kind: str, ranks: int, timeout: float) -> Transport:
    """A transport of that kind; `ranks` counts for a local one."""
    if kind == "local":
        return m2n.LocalTransport(ranks)
    if kind == "mpi":
        from mpi4py import MPI

        return m2n.MpiTransport(MPI.COMM_WORLD, timeout=timeout)
    if kind == "socket":
        made: Transport = getattr(m2n, "SocketTransport").from_environment(timeout=timeout)  # noqa: B009
        return made
    import cupy

    nccl = m2n.NcclTransport.from_environment(timeout=timeout)
    cupy.cuda.Device(nccl.devices[nccl.local_ranks[0]]).use()
    return nccl


class World:
    """A transport, how arrays are handed to it, and how its processes tell each other what they saw."""

    def __init__(self, transport: Transport, kind: str = "local", timeout: float = 60.0) -> None:
        self.transport, self.kind, self.timeout = transport, kind, timeout
        self.size, self.ranks = transport.size, transport.local_ranks
        self.one = len(self.ranks) == 1
        self.on_device = transport.memory == "device"

    @property
    def leader(self) -> bool:
        """Whether this process has rank 0, and speaks for all."""
        return 0 in self.ranks

    def arena(self, rank: int) -> Arena:
        """Memory for a rank's arrays."""
        return Arena(self.transport.devices[rank] if self.on_device else None)  # type: ignore[attr-defined]

    def given(self, arrays: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
        """Arrays by rank and name, in the form that this transport takes."""
        if self.one:
            return dict(arrays.get(self.ranks[0], {}))
        made: dict[str, Any] = {}
        for rank, named in arrays.items():
            for name, array in named.items():
                made.setdefault(name, {})[rank] = array
        return made

    def mine(self, by_rank: Mapping[int, Any]) -> Any:
        """One thing a rank: this process's, or the mapping where it drives several ranks."""
        return by_rank.get(self.ranks[0]) if self.one else by_rank

    def gather(self, said: Any, purpose: str = END) -> list[Any]:
        """What every process says, the same list on each of them. Collective.

        A process that went wrong waits at the end of its case, where the others come once they have heard of it.
        """
        while True:
            every = self._gather([purpose, said])
            if all(other == purpose for other, _ in every):
                return [said for _, said in every]
            if purpose != END:
                raise RuntimeError(
                    f"expected every process at {purpose!r}, got {[other for other, _ in every]}"
                )

    def _gather(self, said: Any) -> list[Any]:
        if len(self.ranks) == self.size:
            return [said]
        if self.kind == "mpi":
            from mpi4py import MPI

            every: list[Any] = MPI.COMM_WORLD.allgather(said)  # not over the transport: it may be broken
            return every
        texts = self.transport.exchange({self.ranks[0]: json.dumps(said).encode()})
        return [json.loads(text) for text in texts]

    def give_up(self) -> None:
        """End every process of a job that cannot go on."""
        sys.stdout.flush()
        if not self.leader:
            time.sleep(2.0)  # the leader has something to say
        if self.kind == "mpi":
            from mpi4py import MPI

            MPI.COMM_WORLD.Abort(1)
        os._exit(1)
