# SPDX-License-Identifier: Apache-2.0
"""What pytest must know before it collects: which modules need a package that is not installed."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

OPTIONAL = ("cupy", "jax", "mpi4py", "nccl", "safetensors", "torch")


def _needs_missing_package(source: str) -> bool:
    top_level = re.findall(r"^(?:import|from) (\w+)", source, re.MULTILINE)
    return any(name in OPTIONAL and importlib.util.find_spec(name) is None for name in top_level)


root = Path(__file__).parent
# Their doctests cannot even be collected here; nothing else is left out.
collect_ignore = [
    str(path.relative_to(root))
    for path in sorted((root / "nccl_m2n").rglob("*.py"))
    if _needs_missing_package(path.read_text(encoding="utf-8"))
]

# What starts processes, tries everything there is, or waits; all else is quick, for the loop of every few minutes.
LONG = (
    "tests/cli", "tests/delta/test_refit.py", "tests/delta/test_scenarios.py", "tests/execution/test_bound.py",
    "tests/execution/test_mpi.py", "tests/execution/test_sockets.py", "tests/families", "tests/fuzz", "tests/gpu",
    "tests/layout/test_dtensor.py", "tests/layout/test_exhaustive.py", "tests/layout/test_fit.py",
    "tests/layout/test_geometry.py", "tests/layout/test_hypothesis.py", "tests/models",
    "tests/planning/test_exhaustive.py",
    "tests/planning/test_geometry.py", "tests/planning/test_identity.py", "tests/planning/test_mutations.py",
    "tests/planning/test_replay.py", "tests/refit/test_broadcast.py", "tests/refit/test_checksums.py",
    "tests/refit/test_end_to_end.py", "tests/refit/test_examples.py", "tests/refit/test_families.py",
    "tests/refit/test_mpi.py", "tests/sharding", "tests/simulation", "tests/storage", "tests/test_copy_kernel.py",
    "tests/test_documents.py", "tests/test_gpu_examples.py", "tests/transport",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        path = item.path.relative_to(root).as_posix() if item.path.is_relative_to(root) else ""
        if not path.startswith(LONG):
            item.add_marker(pytest.mark.quick)
