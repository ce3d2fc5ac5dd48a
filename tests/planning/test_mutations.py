# SPDX-License-Identifier: Apache-2.0
"""No heuristic of planning without a test that fails when it is turned off or doubled."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests import mutate

# Numbers that are no heuristics: a version, and what is refused.
EXEMPT = {("describe", "PLAN_VERSION"), ("rounds", "MAX_ROUNDS")}


@pytest.mark.parametrize("module", sorted({mutation.module for mutation in mutate.MUTATIONS}))
def test_every_mutation_is_noticed(module: str) -> None:
    """In a process of its own, for modules are changed while it runs."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.mutate", f"{module}:"], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_every_constant_is_turned_off_or_doubled() -> None:
    planning = Path(mutate.nccl_m2n.planning.__path__[0])
    found = set()
    for path in planning.glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant | ast.BinOp):
                found |= {
                    (path.stem, t.id) for t in node.targets if isinstance(t, ast.Name) and t.id.isupper()
                }
    texts = {("plans", "HINT")}
    changed = {(m.module, m.old.strip().split(" = ")[0]) for m in mutate.MUTATIONS}
    found = {
        (module, name) for module, name in found if not module.startswith("delta")
    }  # how bytes are compared
    assert found - EXEMPT - texts - changed == set()
