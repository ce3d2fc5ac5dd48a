# SPDX-License-Identifier: Apache-2.0
"""What pytest must know before it collects: which modules need a package that is not installed."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

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
