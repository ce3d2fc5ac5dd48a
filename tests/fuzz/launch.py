# SPDX-License-Identifier: Apache-2.0
"""Start the ranks of a job on this machine: under MPI, or with the variables that torchrun would set."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from tests.execution.mpi import ROOT, mpiexec

GRACE = 10.0  # seconds that the others are given when one rank has failed


def rank_environment(transport: str, rank: int, ranks: int, port: int) -> dict[str, str]:
    """What a rank is told; over NCCL, several on one GPU, two to a pretended host."""
    own = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks),
           "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "M2N_SECRET": "fuzz",
           "OMP_NUM_THREADS": "1"}  # fmt: skip
    if transport == "nccl":
        own |= {"NCCL_HOSTID": f"host{rank // 2}", "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_CUMEM_ENABLE": "0",
                "NCCL_NVLS_ENABLE": "0", "NCCL_SOCKET_IFNAME": "lo", "NCCL_MAX_CTAS": "4"}  # fmt: skip
    return own


def free_port() -> int:
    """A port with free ones after it, most likely."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
    return min(port, 65000)


def start(
    transport: str, ranks: int, arguments: Sequence[str], own: Mapping[str, str] | None = None
) -> list[subprocess.Popen[str]]:
    """``python …`` as so many ranks: one process of `mpiexec`, or one a rank."""
    worker, environment = [sys.executable, *arguments], os.environ | dict(own or {})
    if transport == "mpi":
        return [
            subprocess.Popen([mpiexec(), "-n", str(ranks), *worker], cwd=ROOT, env=environment, text=True)
        ]
    port = free_port()
    return [
        subprocess.Popen(
            worker, cwd=ROOT, env=environment | rank_environment(transport, rank, ranks, port), text=True
        )
        for rank in range(ranks)
    ]


def run(transport: str, ranks: int, arguments: Sequence[str]) -> int:
    """Start them and wait; the first exit status that is not 0. Whoever is left after a failure is ended."""
    processes = start(transport, ranks, arguments)
    deadline = None
    while any(process.poll() is None for process in processes):
        if deadline is None and any(process.returncode for process in processes):
            deadline = time.monotonic() + GRACE
        if deadline is not None and time.monotonic() > deadline:
            for process in processes:
                process.kill()
        time.sleep(0.05)
    return next((process.returncode for process in processes if process.returncode), 0)
