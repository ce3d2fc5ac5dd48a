# SPDX-License-Identifier: Apache-2.0
"""Refits over eight MPI processes: all in one launch, told apart here."""

from __future__ import annotations

import pytest

from tests.execution import mpi

from .mpi_cases import CASES

pytest.importorskip("mpi4py")
pytestmark = pytest.mark.timeout(120)  # the first test waits for the launch


@pytest.fixture(scope="module")
def results() -> mpi.Results:
    return mpi.Results("refit", limit=100)


@pytest.mark.parametrize("name", CASES)
def test_refit(results: mpi.Results, name: str) -> None:
    results.check(name)
