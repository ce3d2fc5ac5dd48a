# SPDX-License-Identifier: Apache-2.0
"""One process that drives all ranks: a reshard against bare grouped sends of the same bytes, in the same run.

usage: python bench/one_process.py [--ranks 8] [--same-gpu] [--mib 1024] [--iterations 9] [--json FILE]
"""

from __future__ import annotations

import argparse
import statistics

from nccl_m2n import Layout, Mesh, NcclTransport, Replicate, Shard, Topology, Transfer
from nccl_m2n.measure import measure_case, write_results
from nccl_m2n.transport.gpu import device_count

WAYS = {"reshard": "reshard", "limit": "bare sends"}  # what is measured, and what it is called here


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
    ranks = args.ranks or device_count()
    devices = [0] * ranks if args.same_gpu else list(range(ranks))
    with NcclTransport.init_all(devices) as transport:
        one_domain = Topology.single(range(ranks))  # the limit is then bare sends of everything
        transfers = [transfer_between(ranks, args.mib)]
        found = measure_case(
            transport, transfers, one_domain, list(WAYS), iterations=args.iterations, warmup=2
        )
    seconds = {name: found[method]["seconds"] for method, name in WAYS.items()}
    wrong = found["reshard"]["wrong"]
    median = {name: statistics.median(taken) for name, taken in seconds.items()}
    for name, value in median.items():
        print(f"{name:12} {value * 1e3:9.3f} ms")
    print(f"share of bare sends: {median['bare sends'] / median['reshard']:.3f}, wrong elements: {wrong}")
    write_results(
        args.json,
        "one_process",
        ranks=ranks,
        mib=args.mib,
        same_gpu=args.same_gpu,
        seconds=seconds,
        wrong=wrong,
    )


if __name__ == "__main__":
    main()
