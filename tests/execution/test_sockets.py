# SPDX-License-Identifier: Apache-2.0
"""Everything that is tried under MPI, over TCP without it: one process a rank, all in one launch, told apart here."""

from __future__ import annotations

import pytest

from tests.bad_input import BAD_INPUT
from tests.execution import mpi, reshard_cases
from tests.refit.mpi_cases import CASES
from tests.scenarios import BY_NAME

pytestmark = pytest.mark.timeout(300)  # the first test waits for the launch

TABLES = {
    "scenarios": list(BY_NAME),
    "refusals": [case.name for case in BAD_INPUT],
    "reshard": list(reshard_cases.MOVES | reshard_cases.REFUSES),
    "refit": list(CASES),
}


@pytest.fixture(scope="module")
def results() -> mpi.Results:
    return mpi.Results("all", 280, mpi.run_by_sockets)


@pytest.mark.parametrize("name", [f"{table}: {name}" for table, names in TABLES.items() for name in names])
def test_as_under_mpi(results: mpi.Results, name: str) -> None:
    results.check(name)
