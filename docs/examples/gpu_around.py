# SPDX-License-Identifier: Apache-2.0
"""``mpirun -n 8 python -m mpi4py docs/examples/gpu_around.py``: a communicator that another package made."""

import cupy
import nccl.core
from move_on_gpus import move
from mpi4py import MPI

from nccl_m2n import NcclTransport

world = MPI.COMM_WORLD
on_this_host = world.Split_type(MPI.COMM_TYPE_SHARED)
cupy.cuda.Device(on_this_host.rank % cupy.cuda.runtime.getDeviceCount()).use()
identifier = world.bcast(nccl.core.get_unique_id() if world.rank == 0 else None)
theirs = nccl.core.Communicator.init(world.size, world.rank, identifier)

with NcclTransport(theirs) as transport:  # theirs.ptr, an integer, would do as well
    move(transport)
theirs.destroy()  # leaving the transport does not touch it
