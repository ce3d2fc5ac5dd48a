# SPDX-License-Identifier: Apache-2.0
"""Run under MPI by `test_mpi`: the last rank goes at some stage, and the others are left waiting.

Every other rank writes what it was told to a file of its own, forms anew without the last one, and leaves. Then it
is on the launcher, and on the end that transports give a process, that all comes to an end.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nccl_m2n import M2nError, MpiTransport
from tests.transport.mpi_cases import RANKS, Case

if TYPE_CHECKING:
    from mpi4py import MPI

STAGES = ("start", "bind", "run", "wait", "close")
LIMIT, LEAVE = 2.0, 1.0  # seconds


def go(how: str) -> None:
    """Leave the others waiting."""
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        os._exit(3)


def steps(comm: MPI.Intracomm) -> dict[str, Callable[[], None]]:
    """What a rank does, stage by stage."""
    made: dict[str, Any] = {}
    return {
        "start": lambda: made.update(transport=MpiTransport(comm, timeout=LIMIT)),
        "bind": lambda: made.update(case=Case(made["transport"])),
        "run": lambda: made["case"].bound.run(),
        "wait": lambda: made["case"].bound.wait(LIMIT),
        "close": lambda: (
            made["case"].bound.close(),
            made["transport"].exchange({comm.rank: b""}, "the end"),
        ),
    }


def survive(comm: MPI.Intracomm) -> str:
    """Those that are left form a new transport and use it."""
    left = comm.Create_group(comm.group.Excl([comm.size - 1]))
    with MpiTransport(left, timeout=20) as transport:
        said = transport.exchange({transport.rank: b"here"}, "go on")
    return f"went on with {len(said)}"


def main(where: str, how: str, folder: str) -> None:
    from mpi4py import MPI  # not above: pytest imports this module too, to look for doctests

    comm, said = MPI.COMM_WORLD, []
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    MpiTransport.leave_limit = LEAVE
    began = time.monotonic()
    for stage, step in steps(comm).items():
        if stage == where and comm.rank == RANKS - 1:
            go(how)
        try:
            step()
        except M2nError as error:
            said += [f"{stage}: {type(error).__name__}: {error}"]
            break
    took = time.monotonic() - began
    Path(folder, f"{comm.rank}.txt").write_text("\n".join([f"{took:.2f}", *said, survive(comm)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
