# SPDX-License-Identifier: Apache-2.0
"""A few ranks that go wrong; the others must raise in time, form anew and leave. All of them: `tests.fuzz.kills`."""

from __future__ import annotations

import pytest

from tests.fuzz.kills import Case


@pytest.mark.parametrize(
    ("stage", "fault", "victim"), [("run", "kill", 0), ("bind", "exit", 2), ("version", "exception", 1)]
)
def test_survivors_go_on(stage: str, fault: str, victim: int) -> None:
    assert Case("socket", 3, stage, fault, victim).run() == []
