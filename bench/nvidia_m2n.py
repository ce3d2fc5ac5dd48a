# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's own nccl.m2n (the PyPI package nccl-extensions) on one problem, or the message it refuses with.

Started on every rank with torchrun's variables set. It needs GPU-initiated networking.

usage: python bench/nvidia_m2n.py [--mib 256] [--json FILE]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

from nccl_m2n.measure import write_results


def attempt(mib: int) -> dict[str, Any]:
    """Seconds of each run of the slowest part, or what stands in the way."""
    import cupy
    import nccl.core
    import nccl.m2n as nvidia

    rank, n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cupy.cuda.Device(int(os.environ.get("LOCAL_RANK", rank)) % cupy.cuda.runtime.getDeviceCount()).use()
    from nccl_m2n import NcclTransport

    with NcclTransport.from_environment() as transport:
        handle = transport.communicator(rank)
        comm = nccl.core.Communicator(int(getattr(handle, "ptr", handle)))
        half = n // 2
        rows = mib * (1 << 20) // 2 // 4096
        src = cupy.ones((rows // half, 4096), cupy.float16) if rank < half else None
        dst = cupy.zeros((rows, 4096 // half), cupy.float16) if rank >= half else None
        times = []
        for _ in range(8):
            transport.exchange({rank: b""})
            began = time.perf_counter()
            nvidia.reshard(
                src,
                dst,
                comm,
                src_mesh=nvidia.Mesh.from_ranks(list(range(half))),
                src_placements=[nvidia.Shard(0)],
                src_local_shape=(rows // half, 4096),
                src_dtype=cupy.float16,
                dst_mesh=nvidia.Mesh.from_ranks(list(range(half, n))),
                dst_placements=[nvidia.Shard(1)],
                dst_local_shape=(rows, 4096 // half),
                dst_dtype=cupy.float16,
            )
            cupy.cuda.runtime.deviceSynchronize()
            times.append(time.perf_counter() - began)
        return {"seconds": times[2:], "median": statistics.median(times[2:])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--json", help="write the outcome there")
    args = parser.parse_args()
    try:
        outcome = attempt(args.mib)
    except Exception as error:
        outcome = {"error": f"{type(error).__name__}: {error}"}
    if os.environ["RANK"] == "0":
        print("nccl.m2n:", outcome, flush=True)
        write_results(args.json, "nvidia_m2n", **outcome)


if __name__ == "__main__":
    main()
