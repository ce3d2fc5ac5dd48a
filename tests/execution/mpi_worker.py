# SPDX-License-Identifier: Apache-2.0
"""What every process of a test runs: one table of cases, one line of JSON from rank 0 for each.

Under MPI over MPI, with torchrun's variables over sockets.


An assertion that fails on some ranks only would leave the others waiting in the next collective, so
failures are collected, and told by rank 0.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

from nccl_m2n import MpiTransport, SocketTransport
from nccl_m2n.transport.rendezvous import Rendezvous
from tests import bad_input, scenarios
from tests.execution import reshard_cases
from tests.refit import mpi_cases as refit_cases

Processes: TypeAlias = MpiTransport | SocketTransport
Case: TypeAlias = Callable[[Any], list[str]]
Tell: TypeAlias = Callable[[list[str]], list[list[str]]]


def scenario_cases() -> dict[str, Case]:
    """Every scenario of the table; a case gives the names of what went wrong on this rank."""
    return {name: lambda t, s=scenario: scenarios.run(s, t) for name, scenario in scenarios.BY_NAME.items()}


def refusal_cases() -> dict[str, Case]:
    """Every mistake, and between them a problem in order: the transport must have survived."""
    made: dict[str, Case] = {}
    for case in bad_input.BAD_INPUT:
        made[case.name] = lambda t, c=case: bad_input.refused(c, t) + scenarios.run(AFTERWARDS, t, turns=1)
    return made


AFTERWARDS = scenarios.BY_NAME["overlapping meshes"]
TABLES: dict[str, Callable[[], dict[str, Case]]] = {
    "scenarios": scenario_cases,
    "refusals": refusal_cases,
    "reshard": lambda: reshard_cases.REFUSES | reshard_cases.MOVES,
    "refit": lambda: refit_cases.CASES,
    "all": lambda: {
        f"{table}: {name}": case
        for table in ("scenarios", "refusals", "reshard", "refit")
        for name, case in TABLES[table]().items()
    },
}


def processes(stack: contextlib.ExitStack) -> tuple[Processes, Tell]:
    """The transport, and how what went wrong is told to all besides."""
    if "MASTER_PORT" in os.environ:
        meeting = stack.enter_context(contextlib.closing(Rendezvous.from_environment()))

        def tell(wrong: list[str]) -> list[list[str]]:
            return [json.loads(said) for said in meeting.exchange({meeting.rank: json.dumps(wrong).encode()})]

        return SocketTransport.from_environment(), tell
    from mpi4py import MPI  # not above: pytest imports this module too, to look for doctests

    return MpiTransport(MPI.COMM_WORLD), MPI.COMM_WORLD.allgather


def main(table: str) -> None:
    warnings.simplefilter("error")
    with contextlib.ExitStack() as stack:
        transport, tell = processes(stack)
        stack.enter_context(transport)
        for name, case in TABLES[table]().items():
            try:
                wrong = case(transport)
            except Exception:
                wrong = [f"rank {transport.rank}: {traceback.format_exc()}"]
            every = tell(wrong)
            if transport.rank == 0:
                print(json.dumps([name, [what for wrong in every for what in wrong]]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
