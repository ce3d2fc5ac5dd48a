# SPDX-License-Identifier: Apache-2.0
"""Every scenario with all ranks in one process."""

from __future__ import annotations

import pytest

from nccl_m2n import LocalTransport
from tests import scenarios
from tests.scenarios import BY_NAME, RANKS


@pytest.mark.parametrize("name", BY_NAME)
def test_scenario(name: str) -> None:
    assert scenarios.run(BY_NAME[name], LocalTransport(RANKS)) == []
