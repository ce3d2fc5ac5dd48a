# SPDX-License-Identifier: Apache-2.0
"""Every scenario with all ranks in one process."""

from __future__ import annotations

import pytest

from nccl_m2n import LocalTransport
from tests import bad_input, scenarios
from tests.execution import reshard_cases
from tests.scenarios import BY_NAME, RANKS


@pytest.mark.parametrize("name", BY_NAME)
def test_scenario(name: str) -> None:
    assert scenarios.run(BY_NAME[name], LocalTransport(RANKS)) == []


@pytest.mark.parametrize("name", reshard_cases.MOVES)
def test_reshard(name: str) -> None:
    assert reshard_cases.MOVES[name](LocalTransport(RANKS)) == []


@pytest.mark.parametrize("case", [c for c in bad_input.BAD_INPUT if c.one_plan], ids=lambda case: case.name)
def test_a_mistake_is_told(case: bad_input.BadInput) -> None:
    assert bad_input.refused(case, LocalTransport(RANKS)) == []
