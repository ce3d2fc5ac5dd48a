# SPDX-License-Identifier: Apache-2.0
"""Start the processes of a test: under MPI, or with the variables that torchrun sets."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def mpiexec() -> str:
    """The launcher that came with this Python's MPI, or the first on the path."""
    found = shutil.which("mpiexec", path=sysconfig.get_path("scripts")) or shutil.which("mpiexec")
    assert found, "no mpiexec: pip install -e '.[test]' brings one"
    return found


def run(processes: int, *arguments: str, limit: float) -> subprocess.CompletedProcess[str]:
    """Run ``python …`` under MPI; whatever is left at the time limit, in seconds, is killed."""
    return _run([mpiexec(), "-n", str(processes), sys.executable, *arguments], limit)


def run_by_torchrun(processes: int, *arguments: str, limit: float) -> subprocess.CompletedProcess[str]:
    """The same by torchrun, or, where there is none, with the variables that it sets."""
    if importlib.util.find_spec("torch") is None:
        return run_by_sockets(processes, *arguments, limit=limit)
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(processes),
    ]
    return _run([*launcher, *arguments], limit)


def _run(command: list[str], limit: float) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMPI_MCA_rmaps_base_oversubscribe": "true", "OMPI_ALLOW_RUN_AS_ROOT": "1",
                                "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}  # fmt: skip
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        err += f"\nkilled after {limit} s"
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def run_alone(*arguments: str, limit: float) -> subprocess.CompletedProcess[str]:
    """One process, without any launcher."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit)


def run_by_sockets(processes: int, *arguments: str, limit: float) -> subprocess.CompletedProcess[str]:
    """The same without MPI: with torchrun's variables, on the loopback address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, *arguments]
    environment = os.environ | {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                                "M2N_SECRET": os.urandom(8).hex(), "OMP_NUM_THREADS": "1"}  # fmt: skip
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        ranks = [
            subprocess.Popen(command, cwd=ROOT, env=environment | {"RANK": str(rank)}, stdout=out, stderr=err)
            for rank in range(processes)
        ]
        end = time.monotonic() + limit
        try:
            codes = [rank.wait(max(0.0, end - time.monotonic())) for rank in ranks]
        except subprocess.TimeoutExpired:
            codes = [-signal.SIGKILL]
            err.write(f"\nkilled after {limit} s")
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        said = []
        for file in (out, err):
            file.seek(0)
            said.append(file.read())
    return subprocess.CompletedProcess(command, next(filter(None, codes), 0), *said)


class Results:
    """What the cases of one table came to."""

    def __init__(self, table: str, limit: float, start: Callable[..., Any] = run) -> None:
        done = start(8, "-m", "tests.execution.mpi_worker", table, limit=limit)
        lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
        self.wrong: dict[str, list[str]] = dict(map(json.loads, lines))
        self.end = f"the processes ended with {done.returncode} after {len(self.wrong)} cases:\n{done.stderr[-3000:]}"

    def check(self, name: str) -> None:
        """Fail if that case went wrong on any rank, or never came to its end."""
        assert name in self.wrong, self.end
        assert self.wrong[name] == [], "\n".join(self.wrong[name])
