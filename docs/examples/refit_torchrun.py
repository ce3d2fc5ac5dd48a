# SPDX-License-Identifier: Apache-2.0
"""A rank a GPU, over NCCL: ``torchrun --nproc-per-node 8 docs/examples/refit_torchrun.py``, on one host or several.

What torchrun sets in the environment is all that is needed; no process group is made.
"""

from __future__ import annotations

import os

import torch
from small_model import GENERATOR, MODEL, TRAINER, generator_arrays, trainer_arrays

import nccl_m2n as m2n
from nccl_m2n.storage import fsdp, vllm

rank = int(os.environ["RANK"])
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
arrays = trainer_arrays(rank) if rank < 4 else generator_arrays()
tensors = {name: torch.from_numpy(array).cuda() for name, array in arrays.items()}

with m2n.NcclTransport.from_environment() as transport:
    trainer = fsdp(MODEL, TRAINER, rank, tensors) if rank < 4 else []
    generator = vllm(MODEL, GENERATOR, rank, tensors, start_rank=4) if rank >= 4 else []

    with m2n.Refit(transport, trainer, generator) as refit:
        refit.capture()  # every later run is one launch
        for step in range(3):
            refit.run(version=step, stream=torch.cuda.current_stream())
            refit.wait()
        assert refit.verify() == []
        if rank == 0:
            print(
                f"version {refit.version}: {refit.report.tensors} tensors, {refit.report.share:.0%} by Reshard"
            )
