# SPDX-License-Identifier: Apache-2.0
"""Scenarios with changes in between: what is sent is what changed, and what arrives is right to the last byte."""

from __future__ import annotations

import math

import pytest

from nccl_m2n import LocalTransport
from tests.delta.steps import SHARES, Steps
from tests.scenarios import RANKS, SCENARIOS, Scenario

LARGE = 1_000_000  # elements; choosing what changes takes as long as moving it


@pytest.mark.parametrize("scenario", SCENARIOS[::4], ids=str)
def test_scenario(scenario: Scenario) -> None:
    transport = LocalTransport(RANKS)
    elements = sum(math.prod(tensor.source.shape) for tensor in scenario.tensors)
    shares = SHARES if elements < LARGE else SHARES[:1]
    assert Steps(scenario, transport.local_ranks).run(transport, shares) == []
