# SPDX-License-Identifier: Apache-2.0
"""What every MPI process runs: one table of cases, one line of JSON from rank 0 for each.

An assertion that fails on some ranks only would leave the others waiting in the next collective, so
failures are collected, and told by rank 0.
"""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import TypeAlias

from nccl_m2n import MpiTransport
from tests import bad_input, scenarios
from tests.execution import reshard_cases
from tests.refit import mpi_cases as refit_cases

Case: TypeAlias = Callable[[MpiTransport], list[str]]


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
}


def main(table: str) -> None:
    warnings.simplefilter("error")
    from mpi4py import MPI  # not above: pytest imports this module too, to look for doctests

    comm = MPI.COMM_WORLD
    with MpiTransport(comm) as transport:
        for name, case in TABLES[table]().items():
            try:
                wrong = case(transport)
            except Exception:
                wrong = [f"rank {comm.rank}: {traceback.format_exc()}"]
            every = comm.gather(wrong)
            if every is not None:
                print(json.dumps([name, [what for wrong in every for what in wrong]]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
