# SPDX-License-Identifier: Apache-2.0
"""A rank a process, in host memory: ``mpiexec -n 8 python -m mpi4py docs/examples/refit_mpi.py``."""

from __future__ import annotations

from mpi4py import MPI
from small_model import GENERATOR, MODEL, TRAINER, generator_arrays, trainer_arrays

import nccl_m2n as m2n
from nccl_m2n.storage import fsdp, vllm

with m2n.MpiTransport(MPI.COMM_WORLD) as transport:
    rank = transport.rank
    trainer = fsdp(MODEL, TRAINER, rank, trainer_arrays(rank)) if rank < 4 else []
    generator = vllm(MODEL, GENERATOR, rank, generator_arrays(), start_rank=4) if rank >= 4 else []

    with m2n.Refit(transport, trainer, generator) as refit:
        for step in range(3):
            refit.run(version=step)
            refit.wait()
        assert refit.verify() == []  # the same on every rank
        if rank == 0:
            print(
                f"version {refit.version}: {refit.report.tensors} tensors, {refit.report.share:.0%} by Reshard"
            )
