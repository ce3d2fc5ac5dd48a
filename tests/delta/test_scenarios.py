# SPDX-License-Identifier: Apache-2.0
"""Every scenario with changes in between: what is sent is what changed, and what arrives is right to the last byte."""

from __future__ import annotations

import pytest

from nccl_m2n import LocalTransport
from tests.delta.steps import SHARES, Steps
from tests.scenarios import RANKS, SCENARIOS, Scenario


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_scenario(scenario: Scenario) -> None:
    transport = LocalTransport(RANKS)
    assert Steps(scenario, transport.local_ranks).run(transport, SHARES) == []
