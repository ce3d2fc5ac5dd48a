# SPDX-License-Identifier: Apache-2.0
"""Eight ranks in one process: ``python docs/examples/refit_one_process.py``."""

from __future__ import annotations

from small_model import GENERATOR, MODEL, TRAINER, generator_arrays, trainer_arrays

import nccl_m2n as m2n
from nccl_m2n.storage import fsdp, vllm

trainer = {rank: fsdp(MODEL, TRAINER, rank, trainer_arrays(rank)) for rank in range(4)}
generator = {rank: vllm(MODEL, GENERATOR, rank, generator_arrays(), start_rank=4) for rank in range(4, 8)}

topology = m2n.Topology.regular(ranks=8, per_domain=4)
with m2n.Refit(m2n.LocalTransport(ranks=8), trainer, generator, topology) as refit:
    for step in range(3):
        for parameter in trainer[0]:
            parameter.array[...] += 1  # a training step
        refit.run(version=step)
        refit.wait()
    assert refit.verify() == []
    print(f"version {refit.version}: {refit.report.tensors} tensors, {refit.report.share:.0%} by Reshard")
