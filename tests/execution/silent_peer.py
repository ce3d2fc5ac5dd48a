# SPDX-License-Identifier: Apache-2.0
"""Run under MPI by `test_a_peer_that_does_not_come`: the last rank leaves the others waiting.

Every other rank writes what it was told to a file of its own. Nothing is finalized: requests stay open.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nccl_m2n import Layout, M2nError, Mesh, MpiTransport, Shard
from nccl_m2n.execution.bound import Bound
from tests import scenarios

# Everybody waits for everybody.
ROWS, COLUMNS = (Layout((8, 8), Mesh.arange((4,)), [Shard(dim)]) for dim in (0, 1))
SCENARIO = scenarios.Scenario("all to all", (scenarios.Tensor(ROWS, COLUMNS),))


def bind(transport: MpiTransport) -> Bound:
    """The scenario, bound on this rank."""
    rank = transport.rank
    sides = [scenarios.SideOfRank(SCENARIO, rank, side).arrays for side in ("source", "destination")]
    return SCENARIO.plan().bind(transport, *sides)


def main(where: str, folder: str) -> None:
    """The last rank does not come to `where`: to bind, or to run."""
    from mpi4py import MPI  # not above: pytest imports this module too, to look for doctests

    comm = MPI.COMM_WORLD
    silent = comm.rank == comm.size - 1
    transport = MpiTransport(comm, timeout=1.0 if where == "bind" else 60.0)
    started = time.monotonic()
    said: list[str] = []

    def attempt(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except M2nError as error:
            return said.append(f"{type(error).__name__}: {error}")

    bound = attempt(lambda: bind(transport)) if not silent or where == "run" else None
    if bound is not None and not silent:
        bound.run()
        attempt(lambda: bound.wait(timeout=1.0))
        attempt(bound.run)
    if not silent:
        text = "\n".join([f"{time.monotonic() - started:.1f}", *said])
        Path(folder, f"{comm.rank}.txt").write_text(text, encoding="utf-8")
    # The launcher ends everybody as soon as one process is gone.
    while len(list(Path(folder).glob("*.txt"))) < comm.size - 1 and time.monotonic() < started + 40:
        time.sleep(0.05)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
