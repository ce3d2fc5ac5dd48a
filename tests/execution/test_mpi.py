# SPDX-License-Identifier: Apache-2.0
"""Every scenario under MPI, one process a rank: all in one launch, told apart here."""

from __future__ import annotations

import pytest

from tests.bad_input import BAD_INPUT, BadInput
from tests.execution import mpi, reshard_cases
from tests.scenarios import BY_NAME

pytest.importorskip("mpi4py")
pytestmark = pytest.mark.timeout(200)  # the first test of a module waits for the launch


@pytest.fixture(scope="module")
def results() -> mpi.Results:
    return mpi.Results("scenarios", limit=180)


@pytest.fixture(scope="module")
def refusals() -> mpi.Results:
    return mpi.Results("refusals", limit=100)


@pytest.fixture(scope="module")
def reshards() -> mpi.Results:
    return mpi.Results("reshard", limit=100)


@pytest.mark.parametrize("name", BY_NAME)
def test_scenario(results: mpi.Results, name: str) -> None:
    results.check(name)


@pytest.mark.parametrize("case", BAD_INPUT, ids=lambda case: case.name)
def test_a_mistake_is_told_to_every_rank(refusals: mpi.Results, case: BadInput) -> None:
    refusals.check(case.name)


@pytest.mark.parametrize("name", reshard_cases.MOVES | reshard_cases.REFUSES)
def test_reshard(reshards: mpi.Results, name: str) -> None:
    reshards.check(name)
