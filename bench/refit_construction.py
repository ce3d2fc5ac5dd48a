# SPDX-License-Identifier: Apache-2.0
"""What it takes one rank to construct a `Refit` of a large model over many ranks, with simulated peers.

What the peers say is made beforehand, by the same code on their behalf, and played back; everything that the
one rank does itself is real, its executor for host memory included, and counted. Its arrays are addresses at
which nothing lies. Every measurement is a process of its own on one core.

    python bench/refit_construction.py [--model DeepSeek-V3] [--ranks 0 200] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nccl_m2n import LocalTransport, Parameter, Refit, Topology
from nccl_m2n.dtypes import item_size
from nccl_m2n.execution.views import ArrayView, contiguous_strides
from nccl_m2n.measure import write_results
from nccl_m2n.models import Manifest
from nccl_m2n.refit.exchange import describe_side, exchange_descriptions
from nccl_m2n.sharding import Parallelism, layouts
from nccl_m2n.text import align_table
from nccl_m2n.transport.base import Message, PreparedRound

PAIRS = [
    ("tp=2,pp=8,ep=16,etp=1,dp=8", "tp=8,dp=16,ep=128,order=vllm"),
    ("tp=4,pp=8,ep=4,etp=4,dp=4", "tp=8,dp=16,ep=128,order=vllm"),
    ("tp=2,pp=8,ep=16,etp=1,dp=8", "tp=16,dp=8,ep=1,etp=16"),
]
LIMIT_SECONDS, LIMIT_MIB = 3.0, 500.0


@dataclass(frozen=True)
class Row:
    source: str
    destination: str
    rank: int
    tensors: int  # of the model
    held: int  # of which this rank has a part
    seconds: list[float]  # of processor time, one a repeat
    mebibytes: list[float]
    said_bytes: int  # by all ranks
    blocks: int


class Recorder(LocalTransport):
    """All ranks at once; keeps what they say."""

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self.said: list[list[bytes]] = []

    def _gather(self, messages: Mapping[int, bytes], deadline: float) -> list[bytes]:
        self.said.append(super()._gather(messages, deadline))
        return self.said[-1]


class Playback(LocalTransport):
    """One rank among peers who say what they said before, and agree with it in all else."""

    def __init__(self, ranks: int, rank: int, said: Sequence[list[bytes]]) -> None:
        super().__init__(ranks)
        self.local_ranks = (rank,)
        self._said = iter(said)

    def _gather(self, messages: Mapping[int, bytes], deadline: float) -> list[bytes]:
        (mine,) = messages.values()
        replies = next(self._said, None)
        if replies is None or self.exchanges == 1:
            return [mine] * self.size
        if replies[self.local_ranks[0]] != mine:
            raise RuntimeError("this rank says something else than when it was recorded")
        return replies

    def prepare(self, messages: Sequence[Message]) -> PreparedRound:
        return _Nothing()


class _Nothing(PreparedRound):
    def start(self, stream: Any = None) -> None:
        raise RuntimeError("nothing is run here")

    def finish(self, deadline: float | None = None) -> None:
        raise RuntimeError("nothing is run here")


def declare(manifest: Manifest, side: Mapping[str, Any], rank: int, base: int) -> list[Parameter]:
    """A rank's parameters, whose arrays are addresses only."""
    made = []
    for name, layout in side.items():
        if rank in layout.mesh.index:
            shape, dtype = layout.local_shape(rank), manifest[name].dtype
            strides = contiguous_strides(shape, item_size(dtype))
            view = ArrayView(base, shape, strides, dtype, device=False)
            base = -(-view.span[1] // 256) * 256
            made.append(Parameter(name, layout, view))
    return made


def both_sides(model: str, source: str, destination: str) -> tuple[Manifest, int, list[dict[str, Any]]]:
    manifest = Manifest.load(model)
    sizes = [Parallelism.parse(text) for text in (source, destination)]
    sides = [
        layouts(manifest, sizes[0]),
        layouts(manifest, sizes[1], start_rank=sizes[0].size),
    ]
    return manifest, sum(s.size for s in sizes), sides


def record(model: str, source: str, destination: str) -> list[list[bytes]]:
    manifest, ranks, sides = both_sides(model, source, destination)
    recorder = Recorder(ranks)
    recorder.exchange(dict.fromkeys(recorder.local_ranks, b""), "refit")  # where all agree on the options
    exchange_descriptions(
        recorder,
        {
            rank: [
                describe_side(i, declare(manifest, side, rank, (i + 1) << 44)).only(())
                for i, side in enumerate(sides)
            ]
            for rank in recorder.local_ranks
        },
    )
    return recorder.said


def measure(
    model: str, source: str, destination: str, rank: int, said: list[list[bytes]], profile: bool
) -> tuple[int, int, float, float, int]:
    """In a process of its own: one construction."""
    manifest, ranks, sides = both_sides(model, source, destination)
    own = [declare(manifest, side, rank, (i + 1) << 44) for i, side in enumerate(sides)]
    topology = Topology.regular(ranks, 8)
    transport = Playback(ranks, rank, said)
    gc.collect()
    before = resident_bytes(peak=False)
    start = time.process_time()
    if profile:
        import cProfile

        scope = {"Refit": Refit, "transport": transport, "own": own, "topology": topology}
        cProfile.runctx("Refit(transport, *own, topology)", scope, {}, sort="tottime")
        return len(manifest), len(own[0] + own[1]), 0.0, 0.0, 0
    refit = Refit(transport, *own, topology)
    seconds = time.process_time() - start
    mebibytes = (resident_bytes(peak=True) - before) / 2**20
    blocks = len(refit.plan.program(rank).chunks)
    return len(manifest), len(own[0] + own[1]), seconds, mebibytes, blocks


def resident_bytes(*, peak: bool) -> int:
    """Bytes of this process in memory now, or the most since this was last asked with `peak=False`."""
    if not peak:
        Path("/proc/self/clear_refs").write_text("5")  # the highest mark counts from here on
    status = Path("/proc/self/status").read_text()
    field = "VmHWM" if peak else "VmRSS"
    return 1024 * int(re.search(rf"{field}:\s+(\d+) kB", status)[1])


def alone(*arguments: Any) -> Any:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, arguments)


def table(rows: Sequence[Row]) -> str:
    lines = [["one rank's own construction", "rank", "tensors", "held", "seconds", "MiB", "said", "blocks"]]
    for row in rows:
        lines.append(
            [
                f"{row.source} → {row.destination}",
                f"{row.rank}",
                f"{row.tensors:,}",
                f"{row.held:,}",
                f"{statistics.median(row.seconds):.2f}",
                f"{max(row.mebibytes):.0f}",
                f"{row.said_bytes / 2**20:.1f} MiB",
                f"{row.blocks:,}",
            ]
        )
    return align_table(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="DeepSeek-V3")
    parser.add_argument("--pair", nargs=2, action="append", metavar=("SOURCE", "DESTINATION"))
    parser.add_argument("--ranks", nargs="+", type=int, default=[0, 200], help="ranks that are measured")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="print where the time goes instead")
    parser.add_argument("--json", metavar="FILE", help="write all samples")
    arguments = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # one core
    rows = []
    for source, destination in arguments.pair or PAIRS:
        said = record(arguments.model, source, destination)
        for rank in arguments.ranks:
            problem = (arguments.model, source, destination, rank, said, arguments.profile)
            found = [alone(*problem) for _ in range(arguments.repeats)]
            tensors, held, _, _, blocks = found[0]
            size = sum(map(len, (text for each in said for text in each)))
            times, memory = ([one[i] for one in found] for i in (2, 3))
            rows.append(Row(source, destination, rank, tensors, held, times, memory, size, blocks))
    print(table(rows))
    print(f"asked for: at most {LIMIT_SECONDS:g} seconds and {LIMIT_MIB:g} MiB")
    write_results(arguments.json, "refit_construction", rows=list(map(asdict, rows)))


if __name__ == "__main__":
    main()
