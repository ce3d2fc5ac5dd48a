# SPDX-License-Identifier: Apache-2.0
"""The examples of docs/gpu.md, on GPUs where there are some; else as far as host memory can stand in.

There NumPy plays CuPy, and the transports of host memory play NCCL: that shows whether names, arguments and shapes
are right.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.execution import mpi

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
SCRIPTS = ["gpu_torchrun.py", "gpu_mpi.py", "gpu_one_process.py", "gpu_around.py"]
RANKS = 4

STAND_IN = """if True:
    import contextlib, os, runpy, sys, types
    from unittest.mock import MagicMock

    import numpy
    import nccl_m2n

    script, several = sys.argv[1], sys.argv[2] == "several"
    cupy = types.ModuleType("cupy")
    for name in ("zeros", "ones", "float32"):
        setattr(cupy, name, getattr(numpy, name))

    class Stream(contextlib.nullcontext):
        def __init__(self, non_blocking=False): super().__init__()
        def synchronize(self): pass

    class Device(contextlib.nullcontext):
        def use(self): pass

    runtime = types.SimpleNamespace(getDeviceCount=lambda: 4)
    cupy.cuda = types.SimpleNamespace(Stream=Stream, Device=Device, get_current_stream=Stream, runtime=runtime)

    class Devices(dict):
        def get(self, rank, default=None): return None  # so `bind` asks in which GPU's memory a rank's arrays are

    class Transport(nccl_m2n.LocalTransport if several else nccl_m2n.MpiTransport):
        @property
        def devices(self): return Devices.fromkeys(self.local_ranks, 0)

    run = nccl_m2n.execution.bound.Bound.run

    def run_and_wait(self, stream=None):  # in host memory nothing moves before the wait
        run(self, stream)
        self.wait()

    nccl_m2n.execution.bound.Bound.run = run_and_wait

    def made(*arguments, timeout=0.0):
        if several:
            return Transport(4)
        from mpi4py import MPI
        return Transport(MPI.COMM_WORLD)

    made.from_mpi = made.from_environment = made.init_all = made
    nccl_m2n.NcclTransport = made
    core = MagicMock()
    core.get_unique_id = lambda: b"identifier"
    sys.modules.update({"cupy": cupy, "nccl": types.SimpleNamespace(core=core), "nccl.core": core})
    sys.path.insert(0, os.path.dirname(script))
    runpy.run_path(script, run_name="__main__")
"""


@pytest.mark.parametrize("name", SCRIPTS)
def test_with_stand_ins(name: str, tmp_path: Path) -> None:
    stand_in = tmp_path / "stand_in.py"
    stand_in.write_text(STAND_IN, encoding="utf-8")
    script = str(EXAMPLES / name)
    if name == "gpu_one_process.py":
        command = [sys.executable, str(stand_in), script, "several"]
        run = subprocess.run(command, capture_output=True, text=True, timeout=50, cwd=EXAMPLES.parents[1])
        assert run.stdout == f"{RANKS} ranks in one process, none wrong\n", run.stderr
    else:
        pytest.importorskip("mpi4py")
        run = mpi.run(RANKS, "-m", "mpi4py", str(stand_in), script, "one", limit=50)
        assert run.stdout.count("3 steps, none wrong") == RANKS, run.stderr
        assert "4 ranks in 1 domain of 4" in run.stdout
    assert run.returncode == 0, run.stderr


def test_on_gpus() -> None:
    missing = [name for name in ("cupy", "nccl") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)}")
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("fewer than two GPUs")
    command = [sys.executable, str(EXAMPLES / "gpu_one_process.py")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert "none wrong" in run.stdout, run.stderr
