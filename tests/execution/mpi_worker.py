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
from collections.abc import Callable, Mapping
from typing import Any

from mpi4py import MPI

from nccl_m2n import MpiTransport
from tests import scenarios


def scenario_cases() -> dict[str, Callable[[MpiTransport], list[str]]]:
    """Every scenario of the table; a case gives the names of what went wrong on this rank."""
    return {name: lambda t, s=scenario: scenarios.run(s, t) for name, scenario in scenarios.BY_NAME.items()}


TABLES: Mapping[str, Callable[[], Mapping[str, Callable[[Any], list[str]]]]] = {"scenarios": scenario_cases}


def main(table: str) -> None:
    warnings.simplefilter("error")
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
