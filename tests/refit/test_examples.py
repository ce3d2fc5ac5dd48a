# SPDX-License-Identifier: Apache-2.0
"""The examples of the tutorial run as they stand."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.execution import mpi

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
SAID = "version 2: 27 tensors, 100% by Reshard\n"


def test_one_process() -> None:
    command = [sys.executable, str(EXAMPLES / "refit_one_process.py")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=50, cwd=EXAMPLES.parents[1])
    assert (run.stdout, run.returncode) == (SAID, 0), run.stderr


def test_mpi() -> None:
    pytest.importorskip("mpi4py")
    run = mpi.run(8, "-m", "mpi4py", str(EXAMPLES / "refit_mpi.py"), limit=50)
    assert (run.stdout, run.returncode) == (SAID, 0), run.stderr


def test_torchrun() -> None:
    path = EXAMPLES / "refit_torchrun.py"
    compile(path.read_text(encoding="utf-8"), path, "exec")
    missing = [name for name in ("cupy", "nccl", "torch") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)}")
    import torch

    if torch.cuda.device_count() < 8:
        pytest.skip("fewer than eight GPUs")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "8", str(path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert SAID in run.stdout, run.stderr
