# SPDX-License-Identifier: Apache-2.0
"""One process that drives all ranks: a reshard against bare grouped sends of the same bytes, in the same run.

usage: python bench/one_process.py [--ranks 8] [--same-gpu] [--mib 1024] [--iterations 9] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from nccl_m2n import Layout, Mesh, NcclTransport, Replicate, Shard, Topology, Transfer, plan
from nccl_m2n.measure.data import by_name, count_wrong, fill, stacks
from nccl_m2n.transport.base import DeviceBuffer, Message
from nccl_m2n.transport.gpu import device_count, import_cupy


def transfer_between(ranks: int, mib: int) -> Transfer:
    """TP(n/2) to TP(n/4) x DP2, or as near as the ranks allow."""
    half = max(1, ranks // 2)
    shape = (mib * (1 << 20) // 2 // 8192, 8192)
    source = Layout(shape, Mesh.arange((half,)), [Shard(0)])
    if half < 2:
        return Transfer(source, Layout(shape, Mesh.arange((1,), start=half), [Replicate()]), "uint16", "t0")
    mesh = Mesh.arange((2, half // 2), start=half)
    return Transfer(source, Layout(shape, mesh, [Replicate(), Shard(0)]), "uint16", "t0")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=0, help="0: one a GPU")
    parser.add_argument("--same-gpu", action="store_true", help="all ranks on GPU 0")
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--iterations", type=int, default=9)
    parser.add_argument("--json", help="write raw samples there")
    args = parser.parse_args()
    cupy = import_cupy()
    ranks = args.ranks or device_count()
    devices = [0] * ranks if args.same_gpu else list(range(ranks))
    with NcclTransport.init_all(devices) as transport:
        transfer = transfer_between(ranks, args.mib)
        planned = plan(transfer, Topology.single(range(ranks)))
        arrays: dict[int, Any] = {}
        streams = {}
        for rank, device in enumerate(devices):
            with cupy.cuda.Device(device):
                arrays[rank] = [stacks([transfer], side, rank) for side in ("source", "destination")]
                fill(arrays[rank][0], rank)
                streams[rank] = cupy.cuda.Stream(non_blocking=True)
        sides = [
            {"t0": {r: array for r, made in arrays.items() for array in by_name(made[i]).values()}}
            for i in (0, 1)
        ]
        bare = bare_sends(transport, planned, devices)
        pointers = {rank: stream.ptr for rank, stream in streams.items()}

        def done() -> bool:
            return all(stream.done for stream in streams.values())

        def timed(start: Any) -> float:
            began = time.perf_counter()
            start()
            transport.wait(done, time.monotonic() + 60, "a measured run")
            return time.perf_counter() - began

        with planned.bind(transport, *sides) as bound:
            ways = {"reshard": lambda: bound.run(streams), "bare sends": lambda: bare.start(pointers)}
            seconds: dict[str, list[float]] = {name: [] for name in ways}
            for turn in range(args.iterations + 2):
                for name, start in ways.items():
                    took = timed(start)
                    if turn >= 2:
                        seconds[name].append(took)
        wrong = 0
        for rank, device in enumerate(devices):
            with cupy.cuda.Device(device):
                wrong += count_wrong(arrays[rank][1], rank)
    median = {name: statistics.median(s) for name, s in seconds.items()}
    for name, value in median.items():
        print(f"{name:12} {value * 1e3:9.3f} ms")
    print(f"share of bare sends: {median['bare sends'] / median['reshard']:.3f}, wrong elements: {wrong}")
    if args.json:
        head = {"schema": "nccl_m2n.bench.one_process", "schema_version": 1, "ranks": ranks, "mib": args.mib}
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({**head, "same_gpu": args.same_gpu, "seconds": seconds, "wrong": wrong}, file)


def bare_sends(transport: NcclTransport, made: Any, devices: list[int]) -> Any:
    """One group of the plan's bytes, each pair's in one message."""
    cupy = import_cupy()
    size = (made.flows["stop"] - made.flows["start"])[made.hops["flow"]]
    pairs: dict[tuple[int, int], int] = {}
    for hop, n in zip(made.hops, size.tolist(), strict=True):
        ends = int(hop["source"]), int(hop["destination"])
        pairs[ends] = pairs.get(ends, 0) + n
    messages = []
    for (source, destination), n in sorted(pairs.items()):
        for rank, peer, send in ((source, destination, True), (destination, source, False)):
            with cupy.cuda.Device(devices[rank]):
                _KEPT.append(cupy.empty(n, cupy.uint8))
            messages.append(Message(rank, peer, send, DeviceBuffer(_KEPT[-1].data.ptr, n)))
    return transport.prepare(messages)


_KEPT: list[Any] = []  # buffers that prepared groups point to


if __name__ == "__main__":
    main()
