# SPDX-License-Identifier: Apache-2.0
"""``mpirun -n 8 python -m mpi4py docs/examples/gpu_mpi.py``; the MPI library need know nothing of GPUs."""

from move_on_gpus import move
from mpi4py import MPI

from nccl_m2n import NcclTransport

with NcclTransport.from_mpi(MPI.COMM_WORLD, timeout=120.0) as transport:
    move(transport)
