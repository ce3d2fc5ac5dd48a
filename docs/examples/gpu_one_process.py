# SPDX-License-Identifier: Apache-2.0
"""``python docs/examples/gpu_one_process.py``: this process drives all GPUs that it sees, one rank each."""

from __future__ import annotations

import cupy

import nccl_m2n as m2n

SHAPE = 4096, 2048

with m2n.NcclTransport.init_all() as transport:
    ranks = range(transport.size)
    source = m2n.Layout(SHAPE, m2n.Mesh.arange((transport.size,)), [m2n.Shard(0)])
    destination = m2n.Layout(SHAPE, m2n.Mesh.arange((transport.size,)), [m2n.Shard(1)])
    transfer = m2n.Transfer(source, destination, dtype="float32", name="w")

    rows, columns, streams = {}, {}, {}
    for rank in ranks:
        with cupy.cuda.Device(transport.devices[rank]):
            rows[rank] = cupy.ones(source.local_shape(rank), cupy.float32)
            columns[rank] = cupy.zeros(destination.local_shape(rank), cupy.float32)
            streams[rank] = cupy.cuda.Stream(non_blocking=True)
            cupy.cuda.get_current_stream().synchronize()  # filled on another stream than they are read on

    with m2n.plan([transfer]).bind(transport, {"w": rows}, {"w": columns}) as bound:
        bound.run(stream=streams)
        bound.wait(timeout=60.0)

    for rank in ranks:
        with cupy.cuda.Device(transport.devices[rank]):
            assert bool((columns[rank] == 1).all())
    print(f"{transport.size} ranks in one process, none wrong")
