# SPDX-License-Identifier: Apache-2.0
"""Rows on the first half of the ranks become columns on the second half; one rank a process, one GPU a rank."""

from __future__ import annotations

import cupy

import nccl_m2n as m2n

SHAPE = 4096, 2048


def move(transport: m2n.NcclTransport) -> None:
    """Bind, capture, run three times, check. Collective."""
    (rank,) = transport.local_ranks
    cupy.cuda.Device(transport.devices[rank]).use()
    half = transport.size // 2
    source = m2n.Layout(SHAPE, m2n.Mesh.arange((half,)), [m2n.Shard(0)])
    destination = m2n.Layout(SHAPE, m2n.Mesh.arange((transport.size - half,), start=half), [m2n.Shard(1)])
    transfer = m2n.Transfer(source, destination, dtype="float32", name="w")
    plan = m2n.plan([transfer], m2n.Topology(transport.discover_domains()))
    if rank == 0:
        print(plan)

    sources, destinations = {}, {}
    if rank in source.ranks:
        sources["w"] = cupy.zeros(source.local_shape(rank), cupy.float32)
    if rank in destination.ranks:
        destinations["w"] = cupy.zeros(destination.local_shape(rank), cupy.float32)

    stream = cupy.cuda.Stream(non_blocking=True)
    with plan.bind(transport, sources, destinations) as bound:
        bound.capture()
        for step in range(3):
            with stream:
                if "w" in sources:
                    sources["w"].fill(step)
                bound.run(stream=stream)  # after the fill, before whatever comes next on this stream
                wrong = (destinations["w"] != step).sum() if "w" in destinations else 0
            bound.wait(timeout=60.0)
            stream.synchronize()
            assert int(wrong) == 0
    print(f"rank {rank}: 3 steps, none wrong", flush=True)
