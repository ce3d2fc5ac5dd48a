# SPDX-License-Identifier: Apache-2.0
"""The same calls thousands of times: memory, open files and threads must stay what they were.

    python -m tests.fuzz.soak                       mpiexec -n 4 python -m mpi4py -m tests.fuzz.soak

What a process holds in the end of each phase is compared with what it held half way, when caches are full. A tenth
of the phase is done again with Python's own count of memory, which slows everything. A run sends and receives several
messages a rank.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nccl_m2n import Layout, Mesh, Parameter, Plan, Refit, Replicate, Shard, Topology, Transfer, plan, reshard
from nccl_m2n.transport.base import Transport
from tests.fuzz.world import TRANSPORTS, World, find_transport, make_transport

CALLS_TO_FILL = {"reshard": 800}  # until all caches are full, else 10: only then is anything flat
RSS_MAY_GROW = 3 << 20  # bytes that an allocator may keep for itself
TRACED_MAY_GROW = 48 << 10  # bytes of Python's and NumPy's memory
Phase = Callable[[int], None]


@dataclass(frozen=True)
class Held:
    """What this process holds."""

    rss: int
    traced: int
    descriptors: int
    threads: int

    @classmethod
    def now(cls) -> Held:
        """After a full collection."""
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        held = len(os.listdir("/proc/self/fd"))
        return cls(
            pages * os.sysconf("SC_PAGE_SIZE"),
            tracemalloc.get_traced_memory()[0],
            held,
            threading.active_count(),
        )

    def grown(self, before: Held) -> list[str]:
        """What is more than it was, by more than it may be."""
        found = []
        if self.rss - before.rss > RSS_MAY_GROW:
            found.append(f"{(self.rss - before.rss) / 1024:.0f} KiB of resident memory")
        if self.traced - before.traced > TRACED_MAY_GROW:
            found.append(f"{(self.traced - before.traced) / 1024:.0f} KiB of traced memory")
        if self.descriptors > before.descriptors:
            found.append(f"{self.descriptors - before.descriptors} descriptors")
        if self.threads > before.threads:
            found.append(f"{self.threads - before.threads} threads")
        return found


def soak(phase: Phase, count: int, traced: int) -> list[str]:
    """Call a phase `traced` times, and `count` times more; what is held more in the end than half way."""
    tracemalloc.start()  # first, while caches are empty: what was put there untraced would count once it is replaced
    try:
        grown = _soak(phase, range(traced))
    finally:
        tracemalloc.stop()
    return grown + _soak(phase, range(traced, traced + count))


def _soak(phase: Phase, numbers: range) -> list[str]:
    middle = len(numbers) * 6 // 10
    for number in numbers[:middle]:
        phase(number)
    before = Held.now()
    for number in numbers[middle:]:
        phase(number)
    return Held.now().grown(before)


class Soak:
    """The phases, on a transport's local ranks."""

    def __init__(self, world: World) -> None:
        self.world, self.transport = world, world.transport
        self.everyone = list(range(world.size))
        shapes = [
            (8 + i, 12 + 2 * j) for i, j in itertools.product(range(10), range(8))
        ]  # more than are remembered
        self.plans = [self._plan(shape) for shape in shapes]
        self.topology = Topology(self.transport.discover_domains())
        self.bound = self.plans[0].bind(self.transport, *self._arrays(self.plans[0]))
        counted = [self.plans[0].program(rank).messages["send"] for rank in world.ranks]
        self.sends = min(int(each.sum()) for each in counted)
        self.receives = min(int((~each.astype(bool)).sum()) for each in counted)

    def _plan(self, shape: tuple[int, int]) -> Plan:
        sides = [Layout(shape, Mesh(self.everyone), [Shard(dim)]) for dim in (0, 1)]
        return plan(Transfer(sides[0], sides[1], "int32", "w"), chunk_bytes=64)

    def _arrays(self, made: Plan) -> tuple[dict[str, Any], dict[str, Any]]:
        transfer = made.transfers[0]
        sides = [
            {r: {"w": self._array(side.local_shape(r))} for r in self.world.ranks}
            for side in (transfer.source, transfer.destination)
        ]
        return self.world.given(sides[0]), self.world.given(sides[1])

    def _array(self, shape: tuple[int, ...]) -> Any:
        if not self.world.on_device:
            return np.ones(shape, "int32")
        import cupy

        return cupy.ones(shape, "int32")

    def run(self, number: int) -> None:
        """One run of one binding."""
        self.bound.run()
        self.bound.wait(60.0)

    def bind(self, number: int) -> None:
        """One binding, run once."""
        made = self.plans[number % len(self.plans)]
        with made.bind(self.transport, *self._arrays(made)) as bound:
            bound.run()
            bound.wait(60.0)

    def reshard(self, number: int) -> None:
        """One problem by the short way, with arrays of its own."""
        transfer = self.plans[number % len(self.plans)].transfers[0]
        mesh = Mesh(self.everyone)
        sides = [
            self.world.mine({r: self._array(side.local_shape(r)) for r in self.world.ranks})
            for side in (transfer.source, transfer.destination)
        ]
        reshard(
            sides[0], sides[1], self.transport, src_mesh=mesh, src_placements=[Shard(0)], dst_mesh=mesh,
            dst_placements=[Shard(1)], global_shape=transfer.shape,
        )  # fmt: skip

    def refit(self, number: int) -> None:
        """One refit: joined, run, verified, closed."""
        rows = Layout((8, 6), Mesh(self.everyone), [Shard(0)])
        copies = Layout((8, 6), Mesh(self.everyone), [Replicate()])
        sides = [
            {r: [Parameter("w", side, self._array(side.local_shape(r)))] for r in self.world.ranks}
            for side in (rows, copies)
        ]
        source, destination = (self.world.mine(side) for side in sides)
        with Refit(self.transport, source, destination, topology=self.topology) as refit:
            refit.run(version=number)
            refit.wait(60.0)
            refit.verify()

    def mistake(self, number: int) -> None:
        """A bind that every rank refuses."""
        made = self.plans[0]
        try:
            made.bind(self.transport, {}, self._arrays(made)[1])
        except ValueError:
            return
        raise AssertionError("a bind without sources was accepted")

    def join(self, number: int) -> None:
        """Another transport over the same ranks, closed again."""
        with make_transport(self.world.kind, self.world.size, 60.0) as other:
            other.exchange(dict.fromkeys(self.world.ranks, b"x"))


def phases(made: Soak, scale: float) -> dict[str, tuple[Phase, int]]:
    """What is done, and how often."""
    joins = {"local": 3000, "mpi": 2200}.get(made.world.kind, 0)  # MPICH has 2,048 communicators
    wanted = {"run": 10_000, "bind": 1_000, "reshard": 3_000, "refit": 300, "mistake": 1_000, "join": joins}
    counts = {
        name: max(180 if name in CALLS_TO_FILL else 20, int(n * scale)) for name, n in wanted.items() if n
    }
    return {name: (getattr(made, name), count) for name, count in counts.items()}


def main(given: Sequence[str]) -> int:
    """All phases; the exit status is 1 if anything grew, on any process."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz.soak", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--scale", type=float, default=1.0, help="of how often everything is done")
    parser.add_argument("--ranks", type=int, default=4, help="ranks of a local transport")
    parser.add_argument("--transport", choices=TRANSPORTS)
    parser.add_argument("--phase", action="append", help="only this one; may be repeated")
    options = parser.parse_args(given)
    kind = options.transport or find_transport()
    transport: Transport = make_transport(kind, options.ranks, 60.0)
    world = World(transport, kind)
    made, failed = Soak(world), False
    for name, (phase, count) in phases(made, options.scale).items():
        if options.phase and name not in options.phase:
            continue
        began = time.monotonic()
        full = CALLS_TO_FILL.get(name, 10)
        traced = max(2 * full, count // 10)
        every = world.gather(soak(phase, count, traced if traced <= count else 0))
        failed |= any(every)
        grew = "; ".join(f"process {i}: {', '.join(what)}" for i, what in enumerate(every) if what)
        messages = (
            f", {count * made.sends} sends and {count * made.receives} receives a rank"
            if name == "run"
            else ""
        )
        if world.leader:
            said = f"GREW by {grew}" if grew else "flat"
            print(f"{name}: {count} times{messages}, {said} ({time.monotonic() - began:.1f} s)", flush=True)
    made.bound.close()
    transport.close()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
