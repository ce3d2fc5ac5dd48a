# SPDX-License-Identifier: Apache-2.0
"""Every scenario on GPUs, with real NCCL; as it is enqueued, and as a replayed graph."""

from __future__ import annotations

import pytest

from nccl_m2n.transport.nccl import NcclTransport
from tests import scenarios
from tests.gpu.device_side import DeviceSide
from tests.scenarios import BY_NAME


@pytest.mark.parametrize("name", BY_NAME)
def test_scenario(transport: NcclTransport, name: str) -> None:
    def side_of_rank(scenario: scenarios.Scenario, rank: int, side: str) -> DeviceSide:
        return DeviceSide(scenario, rank, side, device=transport.devices[rank])

    assert scenarios.run(BY_NAME[name], transport, 3, side_of_rank, captured_from=1) == []
