# SPDX-License-Identifier: Apache-2.0
"""``torchrun --nproc-per-node 8 docs/examples/gpu_torchrun.py``, or any launcher that sets the same variables."""

from move_on_gpus import move

from nccl_m2n import NcclTransport

with NcclTransport.from_environment(timeout=120.0) as transport:
    move(transport)
