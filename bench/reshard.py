# SPDX-License-Identifier: Apache-2.0
"""The named cases beside their peers, on GPUs over NCCL: one rank of one cluster.

Start it on every rank with torchrun's variables set. Cases of other clusters are left out.

usage: python bench/reshard.py --cluster 2x4 --nic-gbit 4 [--case NAME ...] [--iterations 7] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

from nccl_m2n import NcclTransport, Topology
from nccl_m2n.measure import CASES, PEERS, Case, measure_case
from nccl_m2n.planning.table import align_table
from nccl_m2n.transport.nccl import nccl_bindings

SCHEMA, SCHEMA_VERSION = "nccl_m2n.bench.reshard", 1


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
    methods = args.method or list(PEERS)
    with NcclTransport.from_environment() as transport:
        found = [report(case, transport, methods, args.iterations) for case in chosen]
        if transport.local_ranks[0] == 0 and args.json:
            with open(args.json, "w", encoding="utf-8") as file:
                json.dump(
                    {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, **header(args), "cases": found}, file
                )


def header(args: argparse.Namespace) -> dict[str, Any]:
    return {"cluster": args.cluster, "nic_gbit": args.nic_gbit, "nccl": nccl_bindings().get_version()}


def report(case: Case, transport: NcclTransport, methods: list[str], iterations: int) -> dict[str, Any]:
    """Measure one case and print it on rank 0."""
    topology = Topology(case.domains())
    chosen = [m for m in methods if case.tensors <= 1024 or m.startswith(("reshard", "limit"))]
    results = measure_case(transport, case.transfers(), topology, chosen, iterations=iterations)
    if transport.local_ranks[0] == 0:
        print(
            f"\n{case.name}: {case.hosts} x {case.per_host} ranks, NICs of {case.nic_gbit:g} Gbit/s (0: not capped)"
        )
        print(align_table(rows(results)), flush=True)
    return {"name": case.name, "methods": results}


def rows(results: dict[str, Any]) -> list[list[str]]:
    median = {m: statistics.median(r["seconds"]) for m, r in results.items()}
    limit = median.get("limit")
    table = [["", "median ms", "min", "max", "x limit", "host ms", "wrong", "rounds", "staging MiB"]]
    for m, r in results.items():
        table.append(
            [
                m,
                f"{median[m] * 1e3:.2f}",
                f"{min(r['seconds']) * 1e3:.2f}",
                f"{max(r['seconds']) * 1e3:.2f}",
                f"{median[m] / limit:.3f}" if limit else "-",
                f"{statistics.median(r['host_seconds']) * 1e3:.3f}",
                str(r["wrong"]) if m != "limit" else "-",
                str(r.get("rounds", "-")),
                f"{r['staging_bytes'] / 2**20:.1f}" if "staging_bytes" in r else "-",
            ]
        )
    return table


if __name__ == "__main__":
    main()
