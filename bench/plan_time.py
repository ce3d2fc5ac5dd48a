# SPDX-License-Identifier: Apache-2.0
"""How long planning takes, cold, on one core.

Every repeat starts from nothing: meshes, layouts and transfers are made anew and all caches are empty, and
all of that is counted. Imports are done before. Prints medians and minima, in milliseconds. Planning has one
thread; where others use the machine too, its processor time (--cpu) tells what the wall clock would without
them.

    python bench/plan_time.py [--repeats 11] [--cpu] [--only TEXT] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from nccl_m2n import Layout, Mesh, Replicate, Shard, Topology, Transfer, plan
from nccl_m2n.measure import write_results
from nccl_m2n.planning.overlap import overlap
from nccl_m2n.text import align_table

SHAPES = [
    (4096, 4096),
    (1024, 4096),
    (4096,),
    (11008, 4096),
    (4096, 11008),
    (512, 4096),
    (128,),
    (2048, 4096),
    (4096, 2048),
    (1536, 7168),
    (7168, 1536),
    (129280, 7168),
]
EXPERTS = (256, 2048, 7168)


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[], list[Transfer]]
    topology: Topology
    ranks: tuple[int, ...]  # whose programs are made: a source and a destination
    plan_limit: float | None = None  # ms
    program_limit: float | None = None  # ms
    both_limit: float | None = None  # ms


@dataclass(frozen=True)
class Row:
    case: str
    plan: list[float]  # ms, one a repeat
    program: list[float]  # ms, of the slower of the case's ranks
    blocks: int  # of that program
    hops: int
    plan_limit: float | None
    program_limit: float | None
    both_limit: float | None


def one(source: Layout, destination: Layout) -> list[Transfer]:
    return [Transfer(source, destination, "bfloat16", "w")]


def replicas(ranks: int = 128) -> list[Transfer]:
    copies = ranks // 16
    source = Layout(EXPERTS, Mesh.arange((16, copies)), [Shard(0), Replicate()])
    return one(source, Layout(EXPERTS, Mesh.arange((8, ranks // 8), ranks), [Replicate(), Shard(1)]))


def experts(ranks: int) -> list[Transfer]:
    """EP64 × DP → TP32 × DP."""
    source = Layout(EXPERTS, Mesh.arange((ranks // 64, 64)), [Replicate(), Shard(0)])
    return one(source, Layout(EXPERTS, Mesh.arange((ranks // 32, 32), ranks), [Replicate(), Shard(1)]))


def uneven() -> list[Transfer]:
    source = Layout((100_003, 64), Mesh.arange((512,)), [Shard(0)])
    return one(source, Layout((100_003, 64), Mesh.arange((384,), 512), [Shard(0)]))


def model(tensors: int, ranks: int = 128) -> list[Transfer]:
    """Many tensors of a dozen shapes, each with layouts of its own: TP8 × DP → TP4 × DP."""
    made = []
    for i in range(tensors):
        shape = SHAPES[i % len(SHAPES)]
        source = Layout(shape, Mesh.arange((ranks // 8, 8)), [Replicate(), Shard(0)])
        last = Shard(len(shape) - 1)
        destination = Layout(shape, Mesh.arange((ranks // 4, 4), ranks), [Replicate(), last])
        made.append(Transfer(source, destination, "bfloat16", f"layers.{i}.weight"))
    return made


def shared_layouts(tensors: int, ranks: int = 128) -> list[Transfer]:
    """The same, as code that makes a mesh and a layout once for each shape would have it."""
    few = model(len(SHAPES), ranks)
    return [
        Transfer(t.source, t.destination, "bfloat16", f"layers.{i}.weight")
        for i in range(tensors)
        for t in [few[i % len(few)]]
    ]


def cases() -> list[Case]:
    made = [
        Case("Shard(0) 16 × 8 → Shard(1) 8 × 16", replicas, Topology.regular(256, 8), (0, 128), plan_limit=3),
        Case(
            "EP64 × DP16 → TP32 × DP32, 1024 → 1024",
            lambda: experts(1024),
            Topology.regular(2048, 8),
            (0, 1024),
            plan_limit=30,
            program_limit=3,
        ),
        Case("100,003 rows, 512 → 384", uneven, Topology.regular(896, 8), (3, 600), plan_limit=3),
        Case(
            "5,000 tensors of 12 shapes, 128 → 128",
            lambda: shared_layouts(5000),
            Topology.regular(256, 8),
            (3, 130),
            both_limit=200,
        ),
        Case("  each with meshes of its own", lambda: model(5000), Topology.regular(256, 8), (3, 130)),
    ]
    for ranks in (128, 256, 512, 1024):
        name = f"ranks: EP64 → TP32, {ranks} → {ranks}"
        made.append(
            Case(name, lambda ranks=ranks: experts(ranks), Topology.regular(2 * ranks, 8), (0, ranks))
        )
    for tensors in (1250, 2500, 5000, 10000):
        name = f"tensors: {tensors} of 12 shapes"
        made.append(
            Case(name, lambda tensors=tensors: shared_layouts(tensors), Topology.regular(256, 8), (3, 130))
        )
    return made


def measure(case: Case, repeats: int, clock: Callable[[], float]) -> Row:
    plans, programs, hops, blocks = [], [], 0, 0
    _ = case.topology.ranks, case.topology.domain_table, case.topology.rail_table  # a topology is made once
    for _ in range(repeats + 1):  # the first is a warm-up
        overlap.cache_clear()
        gc.collect()
        start = clock()
        made = plan(case.make(), case.topology)
        planned = clock()
        times = []
        for rank in case.ranks:
            begin = clock()
            program = made.program(rank)
            times.append(clock() - begin)
            blocks = max(blocks, len(program.chunks))
        plans.append(1e3 * (planned - start))
        programs.append(1e3 * max(times))
        hops = len(made.hops)
    limits = case.plan_limit, case.program_limit, case.both_limit
    return Row(case.name.strip(), plans[1:], programs[1:], blocks, hops, *limits)


def table(rows: list[Row]) -> str:
    lines = [["cold, ms", "plan", "min", "program", "min", "both", "asked for", "hops", "blocks"]]
    for row in rows:
        both = [a + b for a, b in zip(row.plan, row.program, strict=True)]
        limits = (("plan", row.plan_limit), ("program", row.program_limit), ("both", row.both_limit))
        asked = ", ".join(f"{name} ≤ {limit:g}" for name, limit in limits if limit is not None)
        numbers = [f"{f(x):.2f}" for x in (row.plan, row.program) for f in (statistics.median, min)]
        lines.append(
            [row.case, *numbers, f"{statistics.median(both):.2f}", asked, f"{row.hops}", f"{row.blocks}"]
        )
    return align_table(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=11, help="cold repeats, after one to warm up")
    parser.add_argument("--cpu", action="store_true", help="count processor time, not the wall clock's")
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--json", metavar="FILE", help="write all samples, in milliseconds")
    arguments = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # one core
    clock = time.process_time if arguments.cpu else time.perf_counter
    rows = [measure(case, arguments.repeats, clock) for case in cases() if arguments.only in case.name]
    print(table(rows))
    write_results(arguments.json, "plan_time", clock=clock.__name__, rows=list(map(asdict, rows)))


if __name__ == "__main__":
    main()
