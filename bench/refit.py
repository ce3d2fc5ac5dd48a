# SPDX-License-Identifier: Apache-2.0
"""A whole model's refit on GPUs beside the conventional way: one rank. Every byte is verified.

Start it on every rank with torchrun's variables set.

usage: python bench/refit.py --model dense|moe|NAME --source tp=4 --destination tp=2,dp=2 [--per-domain 4]
       [--method NAME ...] [--iterations 5] [--json FILE]
"""

from __future__ import annotations

import argparse

from nccl_m2n import NcclTransport, Topology, Transfer
from nccl_m2n.measure import measure_case, results_table, write_results
from nccl_m2n.models import Manifest
from nccl_m2n.sharding import Parallelism, layouts
from nccl_m2n.text import bytes_text
from nccl_m2n.transport.nccl_library import nccl_bindings

# Real names and numbers of tensors; widths cut so that the model fits beside its peers on one GPU.
CUT = {
    "dense": ("Qwen2.5-7B", {"num_hidden_layers": 2, "vocab_size": 32000}),
    "moe": ("Qwen3-30B-A3B", {"num_hidden_layers": 16, "hidden_size": 512, "moe_intermediate_size": 192,
                              "head_dim": 64, "vocab_size": 32000}),
}  # fmt: skip
METHODS = ["reshard", "reshard, graph", "limit", "gather+broadcast", "gather+broadcast, packed"]


def manifest_of(model: str) -> Manifest:
    if model not in CUT:
        return Manifest.named(model)
    name, changes = CUT[model]
    return Manifest.from_config(dict(Manifest.named(name).config or {}) | changes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--source", required=True)
    parser.add_argument("--destination", required=True)
    parser.add_argument("--per-domain", type=int, help="ranks a domain; left out, one domain")
    parser.add_argument("--method", action="append")
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--json")
    args = parser.parse_args()
    manifest = manifest_of(args.model)
    sides = [Parallelism.parse(text) for text in (args.source, args.destination)]
    source = layouts(manifest, sides[0])
    destination = layouts(manifest, sides[1], start_rank=sides[0].size)
    transfers = [Transfer(source[n], destination[n], "uint16", n) for n in manifest if n in destination]
    with NcclTransport.from_environment() as transport:
        ranks = range(transport.size)
        per_domain = args.per_domain or transport.size
        topology = Topology.regular(len(ranks), per_domain)
        methods = args.method or METHODS
        found = measure_case(
            transport, transfers, topology, methods, iterations=args.iterations, timeout=120.0
        )
        if transport.local_ranks[0] == 0:
            size = bytes_text(manifest.nbytes)
            way = f"{args.source} to {args.destination}, 100 % by Reshard"
            print(
                f"\n{args.model}: {len(transfers)} tensors, {size}, {way}\n{results_table(found)}", flush=True
            )
            write_results(
                args.json,
                "refit",
                nccl=nccl_bindings().get_version(),
                **{name: value for name, value in vars(args).items() if name != "json"},
                tensors=len(transfers),
                bytes=manifest.nbytes,
                methods=found,
            )


if __name__ == "__main__":
    main()
