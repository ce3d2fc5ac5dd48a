# SPDX-License-Identifier: Apache-2.0
"""Refits that send only what changed beside whole ones of the same arrays: one rank. Every byte is verified.

Start it on every rank with torchrun's variables set.

usage: python bench/delta.py --model dense|moe|NAME --source tp=4 --destination tp=2,dp=2 [--per-domain 4]
       [--share 0.01 ...] [--iterations 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator

import cupy

from bench.refit import manifest_of
from nccl_m2n import NcclTransport, Topology, Transfer, plan
from nccl_m2n.layout import Layout
from nccl_m2n.measure import write_results
from nccl_m2n.sharding import Parallelism, layouts
from nccl_m2n.text import align_table, bytes_text
from nccl_m2n.transport.nccl_library import nccl_bindings

# An element starts as a hash of its tensor and place, and changes in a step where another hash is below a threshold.
HASH = """
__device__ unsigned long long mixed(unsigned long long x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}
"""
BEGIN = cupy.ElementwiseKernel(
    "uint64 row, uint64 column, uint64 seed",
    "uint16 x",
    "x = mixed(row + column + seed)",
    "begin",
    preamble=HASH,
)
CHANGE = cupy.ElementwiseKernel(
    "uint64 row, uint64 column, uint64 seed, uint64 below",
    "uint16 x",
    "if ((mixed(row + column + seed) >> 40) < below) x = x + 1 + (mixed(row + seed) & 0xff)",
    "change",
    preamble=HASH,
)


class Arrays:
    """One rank's arrays on one side, with the values of the last step.

    Args:
        held: Name to layout, of all tensors.
        rank: The rank.
    """

    def __init__(self, held: dict[str, Layout], rank: int) -> None:
        self.layouts = {name: layout for name, layout in held.items() if rank in layout.ranks}
        self.rank, self.number = rank, {name: i for i, name in enumerate(held)}
        self.arrays = {
            n: cupy.zeros(layout.local_shape(rank), cupy.uint16) for n, layout in self.layouts.items()
        }

    def _pieces(
        self, name: str, array: cupy.ndarray
    ) -> Iterator[tuple[cupy.ndarray, cupy.ndarray, cupy.ndarray]]:
        """Each piece as a matrix, with the global numbers that its rows and its columns add up to."""
        shape = self.layouts[name].shape
        inner = shape[-1] if shape else 1
        for piece in self.layouts[name].pieces(self.rank):
            part, rows = array[piece.local_slices], cupy.zeros(1, cupy.uint64)
            for extent, a, b in zip(shape[:-1], piece.box.start[:-1], piece.box.stop[:-1], strict=True):
                rows = (rows[:, None] * extent + cupy.arange(a, b, dtype=cupy.uint64)[None]).reshape(-1)
            columns = (
                cupy.arange(piece.box.start[-1], piece.box.stop[-1], dtype=cupy.uint64) if shape else rows[:1]
            )
            yield part.reshape(len(rows), -1), (rows * inner)[:, None], columns[None]

    def _seed(self, name: str, step: int) -> int:
        return (self.number[name] << 44) + (step << 56)

    def begin(self) -> None:
        """The values before the first step."""
        for name, array in self.arrays.items():
            for part, rows, columns in self._pieces(name, array):
                BEGIN(rows, columns, self._seed(name, 0), part)

    def change(self, step: int, share: float) -> None:
        """Change a share of all elements."""
        for name, array in self.arrays.items():
            for part, rows, columns in self._pieces(name, array):
                CHANGE(rows, columns, self._seed(name, step), int(share * (1 << 24)), part)

    def wrong(self, steps: list[float]) -> int:
        """How many elements are not what the steps so far have made of them."""
        count = 0
        for name, array in self.arrays.items():
            expected = cupy.zeros_like(array)
            for part, rows, columns in self._pieces(name, expected):
                BEGIN(rows, columns, self._seed(name, 0), part)
                for step, share in enumerate(steps, 1):
                    CHANGE(rows, columns, self._seed(name, step), int(share * (1 << 24)), part)
            count += int((array != expected).sum())
        return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--source", required=True)
    parser.add_argument("--destination", required=True)
    parser.add_argument("--per-domain", type=int, help="ranks a domain; left out, one domain")
    parser.add_argument("--share", type=float, action="append")
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--host-baseline", action="store_true")
    parser.add_argument("--json")
    args = parser.parse_args()
    manifest = manifest_of(args.model)
    sides = [Parallelism.parse(text) for text in (args.source, args.destination)]
    source = layouts(manifest, sides[0])
    destination = layouts(manifest, sides[1], start_rank=sides[0].size)
    transfers = [Transfer(source[n], destination[n], "uint16", n) for n in manifest]
    with NcclTransport.from_environment() as transport:
        (rank,) = transport.local_ranks
        cupy.cuda.Device(transport.devices[rank]).use()
        made = plan(transfers, Topology.regular(transport.size, args.per_domain or transport.size))
        given = [Arrays(held, rank) for held in (source, destination)]
        given[0].begin()
        rows, results, steps = [], {}, []
        free = cupy.cuda.runtime.memGetInfo()[0]
        with made.bind(transport, given[0].arrays, given[1].arrays) as whole:
            cupy.cuda.runtime.deviceSynchronize()
            whole_memory = free - cupy.cuda.runtime.memGetInfo()[0]
            kind = "host" if args.host_baseline else True
            with made.bind(transport, given[0].arrays, given[1].arrays, delta=kind) as delta:
                shares = [None, 0.0, *(args.share or [0.003, 0.01, 0.03, 0.1, 1.0])]
                for share in shares:
                    bound = whole if share is None else delta
                    seconds, wrong = [], 0
                    for turn in range(args.iterations + 1):
                        if share:
                            steps.append(share)
                            given[0].change(len(steps), share)
                        cupy.cuda.runtime.deviceSynchronize()
                        transport.exchange({rank: b""})
                        began = time.perf_counter()
                        bound.run()
                        bound.wait(timeout=100)
                        took = max(
                            float(said)
                            for said in transport.exchange({rank: repr(time.perf_counter() - began).encode()})
                        )
                        if turn:  # the first warms up; the first of all brings the baseline about
                            seconds.append(took)
                        wrong += given[1].wrong(steps) if turn in (0, args.iterations) else 0
                    wrong = sum(int(said) for said in transport.exchange({rank: str(wrong).encode()}))
                    name = "whole" if share is None else f"changed {share:.1%}"
                    changes = None if share is None else delta.changes
                    results[name] = {
                        "seconds": seconds,
                        "wrong": wrong,
                        "changed": changes and changes.changed,
                        "network_bytes": made.traffic().network_bytes
                        if changes is None
                        else changes.network_bytes,
                        "dense_bytes": made.traffic().network_bytes,
                    }
                    median = statistics.median(seconds)
                    network = results[name]["network_bytes"]
                    rows.append(
                        [
                            name,
                            f"{median * 1e3:.1f} ms",
                            bytes_text(network),
                            f"{network / max(1, made.traffic().network_bytes):.2%}",
                            "" if wrong == 0 else f"{wrong} WRONG",
                        ]
                    )
                memory = {
                    "staging": delta.staging_bytes,
                    "baseline": delta.baseline_bytes,
                    "whole": whole_memory,
                }
        if rank == 0:
            head = ["", "median", "network", "of whole", ""]
            way = f"{args.source} to {args.destination}"
            title = f"{args.model}: {bytes_text(manifest.nbytes)}, {way}"
            print(f"\n{title}", align_table([head, *rows]), sep="\n", flush=True)
            write_results(
                args.json,
                "delta",
                nccl=nccl_bindings().get_version(),
                **{name: value for name, value in vars(args).items() if name != "json"},
                tensors=len(transfers),
                bytes=manifest.nbytes,
                memory=memory,
                methods=results,
            )


if __name__ == "__main__":
    main()
