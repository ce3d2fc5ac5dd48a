# SPDX-License-Identifier: Apache-2.0
"""Which transport a command takes: NCCL where every rank has a GPU, else host memory."""

from __future__ import annotations

import json
import os

from nccl_m2n.cli.sides import Kind, Sides
from nccl_m2n.errors import CommandError, TransportError
from nccl_m2n.transport import LocalTransport, Transport
from nccl_m2n.transport.gpu import device_count
from nccl_m2n.transport.meeting import Meeting, refused_together, together
from nccl_m2n.typing import Json

CARRIERS = {"local": "copies within one process", "mpi": "MPI", "nccl": "NCCL", "socket": "TCP"}
HOST_CARRIERS = {"mpi": "mpi", "torchrun": "socket", "none": "local"}  # by launcher
_MEMORY_INFO = "/proc/meminfo"


def gpus() -> tuple[int, str]:
    """How many GPUs NCCL can use here, and why there are none."""
    from nccl_m2n.transport.nccl_library import nccl_bindings

    try:
        nccl_bindings()
        return device_count(), ""
    except Exception as error:  # a broken installation may raise anything; the ranks must hear of it together
        return 0, str(error) if isinstance(error, TransportError) else f"{type(error).__name__}: {error}"


def gpu_states(meeting: Meeting) -> list[list[Json]]:
    """What `gpus` says on every process, its host, and whether ranks may share a GPU there. Collective."""
    sharing = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    return [json.loads(said) for said in meeting.share(json.dumps([*gpus(), _host(), sharing]).encode())]


def choose(kind: str, meeting: Meeting, problem: Sides[Kind], ranks: int | None) -> str:
    """The kind of transport, or the reason why it cannot be had. Collective.

    Args:
        kind: ``"auto"``, ``"mpi"``, ``"nccl"``, ``"socket"`` or ``"local"``.
        meeting: The processes.
        problem: What is to be moved, by its sides.
        ranks: How many ranks a transport within one process has, where that was said.

    Raises:
        RefusedError: On all ranks.
    """
    launcher = meeting.place.launcher
    states = gpu_states(meeting) if kind in ("auto", "nccl") else []

    def decide() -> str:
        lacking = lack_of_gpus(states, problem.ranks if launcher == "none" else 1)
        chosen = kind
        if kind == "auto":
            chosen = HOST_CARRIERS[launcher] if lacking else "nccl"
        if ranks is not None and (chosen != "local" or ranks < problem.ranks):
            remedy = f"give --ranks {problem.ranks}"
            if chosen == "local":
                problem.require(ranks, remedy + " (or leave it out)")
            raise CommandError(
                "--ranks is for the local transport; elsewhere the launcher says how many there are"
            )
        if chosen == "nccl" and lacking:
            raise CommandError(f"NCCL cannot be used: {lacking}")
        if chosen == "local" and meeting.size > 1:
            raise CommandError(
                f"--transport local has all ranks in one process, there are {meeting.size} processes; "
                "start it without a launcher"
            )
        if chosen == "mpi" and launcher == "torchrun":
            raise CommandError("--transport mpi expects processes that mpiexec started, got torchrun's")
        if chosen == "socket" and launcher != "torchrun":
            raise CommandError("--transport socket expects processes that torchrun started")
        if chosen == "mpi" or launcher != "none":
            how = (
                "start mpiexec -n {}" if launcher != "torchrun" else "give torchrun that many processes ({})"
            )
            problem.require(meeting.size, how)
        return chosen

    return together(meeting, decide)


def make(chosen: str, meeting: Meeting, problem: Sides[Kind], ranks: int | None) -> Transport:
    """The transport that was chosen. Collective."""
    if chosen == "local":
        return LocalTransport(ranks or problem.ranks)
    if chosen == "mpi":
        if meeting.world is None:
            raise CommandError("--transport mpi expects to be started by mpiexec")
        from nccl_m2n.transport.mpi import MpiTransport

        return MpiTransport(meeting.world)
    if chosen == "socket":
        from nccl_m2n.transport.tcp import SocketTransport

        return SocketTransport.from_environment()
    return nccl_transport(meeting, problem.ranks)


def nccl_transport(meeting: Meeting, ranks: int | None = None) -> Transport:
    """One rank a process, or alone a GPU for each rank; all GPUs where the number is left out. Collective."""
    from nccl_m2n.transport.nccl import NcclTransport

    if meeting.place.launcher == "mpi":
        return NcclTransport.from_mpi(meeting.world)
    if meeting.place.launcher == "torchrun":
        return NcclTransport.from_environment()
    return NcclTransport.init_all(ranks)


def domains_found(transport: Transport) -> list[list[int]]:
    """The NVLink domains of the transport's ranks. Collective."""
    return refused_together(transport, transport.discover_domains)


def require_memory(meeting: Meeting, needed: int, remedy: str) -> None:
    """Refuse arrays that a host has no memory for, before it ends a process for them. Collective.

    Args:
        meeting: The processes.
        needed: Bytes of host memory that this process will take.
        remedy: What to do where there is not as much.

    Raises:
        RefusedError: On all ranks.
    """
    mine = json.dumps([_host(), needed, free_memory()]).encode()
    by_host: dict[str, list[Json]] = {}
    for host, amount, free in map(json.loads, meeting.share(mine)):
        entry = by_host.setdefault(host, [0, free])
        entry[0] += amount

    def check() -> None:
        for host, (amount, free) in by_host.items():
            if free is not None and amount > free:
                raise CommandError(
                    f"the ranks on {host.split()[1]} need {amount / 1e9:.1f} GB of memory for their arrays, "
                    f"{free / 1e9:.1f} GB are free; {remedy}"
                )

    together(meeting, check)


def free_memory() -> int | None:
    """Bytes of host memory that can be had without swapping; None where the system does not say."""
    try:
        with open(_MEMORY_INFO, encoding="ascii") as file:
            said = dict(line.split(":", 1) for line in file)
        return int(said["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def lack_of_gpus(states: list[list[Json]], ranks_each: int) -> str:
    """Why not every rank can have a GPU of its own; empty if every rank can."""
    hosts: dict[str, int] = {}
    for rank, (count, reason, host, sharing) in enumerate(states):
        hosts[host] = hosts.get(host, 0) + ranks_each
        if reason:
            return f"rank {rank}: {reason}"
        if hosts[host] > count and not sharing:
            return f"{host} has {count} GPUs for {hosts[host]} ranks or more"
    return ""


def _host() -> str:
    from nccl_m2n.transport.nccl_domains import host_label

    return host_label()
