# SPDX-License-Identifier: Apache-2.0
"""Which transport a command takes: NCCL where every rank has a GPU, else host memory."""

from __future__ import annotations

import json
import os

from nccl_m2n.cli.sides import Kind, Sides
from nccl_m2n.errors import CommandError, TransportError
from nccl_m2n.transport import KINDS, Transport
from nccl_m2n.transport.agree import together
from nccl_m2n.transport.gpu import device_count
from nccl_m2n.transport.meeting import Meeting
from nccl_m2n.typing import Json

_STARTED_BY = {"mpi": "mpiexec", "torchrun": "torchrun"}
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
    return [
        json.loads(said)
        for said in meeting.share(json.dumps([*gpus(), _host(), sharing]).encode(), "count GPUs")
    ]


def choose(kind: str, meeting: Meeting, problem: Sides[Kind], ranks: int | None) -> str:
    """The kind of transport, or the reason why it cannot be had. Collective.

    Args:
        kind: ``"auto"``, ``"mpi"``, ``"nccl"``, ``"socket"`` or ``"local"``.
        meeting: The processes.
        problem: What is to be moved, by its sides.
        ranks: How many ranks a transport within one process has, where that was said.

    Raises:
        CommandError: On all ranks.
    """
    launcher = meeting.place.launcher
    states = gpu_states(meeting) if kind in ("auto", "nccl") else []

    def decide(_: int) -> str:
        lacking = lack_of_gpus(states, problem.ranks if launcher == "none" else 1)
        chosen = kind
        if kind == "auto":
            lent = [each for each in KINDS.values() if launcher in each.launchers]
            chosen = next(each.kind for each in lent if each.memory == "host" or not lacking)
        if ranks is not None and (chosen != "local" or ranks < problem.ranks):
            remedy = f"give --ranks {problem.ranks}"
            if chosen == "local":
                problem.require(ranks, remedy + " (or leave it out)")
            raise CommandError(
                "--ranks is for the local transport; elsewhere the launcher says how many there are"
            )
        if chosen == "nccl" and lacking:
            raise CommandError(f"NCCL cannot be used: {lacking}")
        if launcher not in KINDS[chosen].launchers:
            raise CommandError(_wrong_launcher(chosen, meeting))
        if launcher != "none":
            how = "start mpiexec -n {}" if launcher == "mpi" else "give torchrun that many processes ({})"
            problem.require(meeting.size, how)
        return chosen

    return together(meeting, "choose the transport", decide)[meeting.rank]


def make(chosen: str, meeting: Meeting, problem: Sides[Kind], ranks: int | None) -> Transport:
    """The transport that was chosen. Collective."""
    return KINDS[chosen].join(meeting.place.launcher, meeting.world, ranks or problem.ranks)


def _wrong_launcher(chosen: str, meeting: Meeting) -> str:
    wanted = [_STARTED_BY[each] for each in KINDS[chosen].launchers if each in _STARTED_BY]
    if not wanted:
        return (
            f"--transport {chosen} has all ranks in one process, there are {meeting.size} processes; "
            "start it without a launcher"
        )
    came = _STARTED_BY.get(meeting.place.launcher)
    return f"--transport {chosen} expects processes that {' or '.join(wanted)} started, got " + (
        f"{came}'s" if came else "one that no launcher started"
    )


def domains_found(transport: Transport) -> list[list[int]]:
    """The NVLink domains of the transport's ranks. Collective."""
    return transport.discover_domains()


def require_memory(meeting: Meeting, needed: int, remedy: str) -> None:
    """Refuse arrays that a host has no memory for, before it ends a process for them. Collective.

    Args:
        meeting: The processes.
        needed: Bytes of host memory that this process will take.
        remedy: What to do where there is not as much.

    Raises:
        CommandError: On all ranks.
    """
    mine = json.dumps([_host(), needed, free_memory()]).encode()
    by_host: dict[str, list[Json]] = {}
    for host, amount, free in map(json.loads, meeting.share(mine, "count the memory")):
        entry = by_host.setdefault(host, [0, free])
        entry[0] += amount

    def check(_: int) -> None:
        for host, (amount, free) in by_host.items():
            if free is not None and amount > free:
                raise CommandError(
                    f"the ranks on {host.split()[1]} need {amount / 1e9:.1f} GB of memory for their arrays, "
                    f"{free / 1e9:.1f} GB are free; {remedy}"
                )

    together(meeting, "count the memory", check)


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
