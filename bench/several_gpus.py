# SPDX-License-Identifier: Apache-2.0
"""Reshards between the GPUs of one host, beside their peers: one rank, one GPU.

The first half of the ranks are sources and the second half destinations, but for the colocated case, where all are
both. Started by several_gpus.sh on every rank.

usage: python bench/several_gpus.py [--sizes 1,16,64,256,1024,8192] [--iterations 7] [--json FILE]
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from nccl_m2n import Layout, Mesh, NcclTransport, Replicate, Shard, Topology, Transfer
from nccl_m2n.layout import Placement
from nccl_m2n.measure import measure_case, results_table, write_results
from nccl_m2n.transport.gpu import import_cupy
from nccl_m2n.transport.nccl_library import nccl_bindings

MIB = 1 << 20
COLUMNS, EXPERTS = 4096, 64
METHODS = [
    "reshard",
    "reshard, graph",
    "limit",
    "direct",
    "gather+broadcast",
    "gather+broadcast, packed",
    "every source broadcasts",
]
# These gather on ranks that are not destinations; colocated they would need another script.
COLOCATED = ["reshard", "reshard, graph", "limit", "direct"]


def problems(ranks: int, size_mib: int) -> dict[str, tuple[Transfer, list[str]]]:
    """The cases for this many ranks: transfer and methods by name."""
    half = max(1, ranks // 2)
    rows_count = size_mib * MIB // 2 // COLUMNS
    matrix, stack = (rows_count, COLUMNS), (EXPERTS, rows_count // EXPERTS, COLUMNS)
    sources, targets = Mesh.arange((half,)), Mesh.arange((half,), start=ranks - half)
    everyone = Mesh.arange((ranks,))

    def made(shape: tuple[int, ...], a: Mesh, pa: list[Placement], b: Mesh, pb: list[Placement]) -> Transfer:
        return Transfer(Layout(shape, a, pa), Layout(shape, b, pb), "uint16", "t0")

    found = {
        f"TP{half} to DP{half}": (made(matrix, sources, [Shard(0)], targets, [Replicate()]), METHODS),
        f"TP{ranks} rows to TP{ranks} columns, colocated": (
            made(matrix, everyone, [Shard(0)], everyone, [Shard(1)]),
            COLOCATED,
        ),
    }
    if half >= 2:  # with one rank on each side these would be the same copy again
        found[f"EP{half} to TP{half}"] = (made(stack, sources, [Shard(0)], targets, [Shard(2)]), METHODS)
        found[f"FSDP{half} to TP{half}"] = (made(matrix, sources, [Shard(0)], targets, [Shard(1)]), METHODS)
        mesh = Mesh.arange((2, half // 2), start=half)
        found[f"TP{half} to TP{half // 2}xDP2"] = (
            made(matrix, sources, [Shard(0)], mesh, [Replicate(), Shard(0)]),
            METHODS,
        )
    return found


def copy_ceiling(iterations: int) -> float:
    """Bytes a second of a device-to-device copy on the current GPU, each byte counted once."""
    cupy = import_cupy()
    a, b = cupy.ones(1 << 30, cupy.uint8), cupy.empty(1 << 30, cupy.uint8)
    times = []
    for _ in range(iterations):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        b[...] = a
        end.record()
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(begin, end) / 1e3)
    return float(a.nbytes / statistics.median(times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="1,16,64,256,1024,8192", help="MiB")
    parser.add_argument("--iterations", type=int, default=7)
    parser.add_argument("--json", help="write raw samples there")
    args = parser.parse_args()
    with NcclTransport.from_environment() as transport:
        rank, n = transport.local_ranks[0], transport.size
        import_cupy().cuda.Device(transport.devices[rank]).use()
        topologies = {"one domain": Topology.single(range(n))}
        if n >= 2:
            topologies["two domains"] = Topology.regular(n, n // 2)
        result: dict[str, Any] = {"copy_bytes_per_second": copy_ceiling(args.iterations), "cases": []}
        for size in map(int, args.sizes.split(",")):
            for name, (transfer, methods) in problems(n, size).items():
                for where, topology in topologies.items():
                    found = measure_case(transport, [transfer], topology, methods, iterations=args.iterations)
                    result["cases"].append({"name": name, "mib": size, "topology": where, "methods": found})
                    if rank == 0:
                        print(f"\n{name}, {size} MiB, {where}\n{results_table(found)}", flush=True)
        if rank == 0:
            write_results(args.json, "several_gpus", ranks=n, nccl=nccl_bindings().get_version(), **result)


if __name__ == "__main__":
    main()
