# SPDX-License-Identifier: Apache-2.0
"""The named cases beside their peers, on GPUs over NCCL: one rank of one cluster.

Start it on every rank with torchrun's variables set. Cases of other clusters are left out.

usage: python bench/reshard.py --cluster 2x4 --nic-gbit 4 [--case NAME ...] [--iterations 7] [--json FILE]
"""

from __future__ import annotations

import argparse
from typing import Any

from nccl_m2n import NcclTransport, Topology
from nccl_m2n.measure import CASES, Case, available, measure_case, results_table, write_results
from nccl_m2n.transport.nccl_library import nccl_bindings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cluster", required=True, help="hosts x ranks a host, such as 2x4")
    parser.add_argument("--nic-gbit", type=float, required=True, help="0: not capped")
    parser.add_argument("--case", action="append", help="only this case; may be given again")
    parser.add_argument("--method", action="append", help="only this method; may be given again")
    parser.add_argument("--iterations", type=int, default=7)
    parser.add_argument("--json", help="write raw samples there")
    args = parser.parse_args()
    hosts, per_host = map(int, args.cluster.split("x"))
    chosen = [
        case
        for case in CASES.values()
        if (case.hosts, case.per_host, case.nic_gbit) == (hosts, per_host, args.nic_gbit)
        and (not args.case or case.name in args.case)
    ]
    with NcclTransport.from_environment() as transport:
        found = [report(case, transport, args.method, args.iterations) for case in chosen]
        if transport.local_ranks[0] == 0:
            head = {"cluster": args.cluster, "nic_gbit": args.nic_gbit, "nccl": nccl_bindings().get_version()}
            write_results(args.json, "reshard", **head, cases=found)


def report(
    case: Case, transport: NcclTransport, methods: list[str] | None, iterations: int
) -> dict[str, Any]:
    """Measure one case and print it on rank 0."""
    transfers = case.transfers()
    chosen = [
        m
        for m in methods or available(transport, transfers)
        if case.tensors <= 1024 or m.startswith(("reshard", "limit"))
    ]
    results = measure_case(transport, transfers, Topology(case.domains()), chosen, iterations=iterations)
    if transport.local_ranks[0] == 0:
        where = f"{case.hosts} x {case.per_host} ranks, NICs of {case.nic_gbit:g} Gbit/s (0: not capped)"
        print(f"\n{case.name}: {where}\n{results_table(results)}", flush=True)
    return {"name": case.name, "methods": results}


if __name__ == "__main__":
    main()
