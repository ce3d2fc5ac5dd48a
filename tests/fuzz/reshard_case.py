# SPDX-License-Identifier: Apache-2.0
"""`reshard()` again and again on one transport: problems and arrays alternate, and some calls are mistakes.

What is remembered from an earlier call must never be taken for what this call asks for, whichever ranks repeat
themselves and whichever do not.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from nccl_m2n import Shard, StridedShard, Topology, reshard
from tests.fuzz.bind_case import SIDES, draw_dtypes, draw_topology
from tests.fuzz.layouts import Drawn, draw_shape, draw_sides
from tests.fuzz.memory import Arena, Lie, draw_lie, elements, numpy_dtype, random_values, write
from tests.fuzz.outcome import Outcome, refused
from tests.fuzz.world import World

CALLS = 10
MISTAKES = ("dtype", "shape", "other problem", "topology")


@dataclass(frozen=True, eq=False)
class Problem:
    """One pair of layouts with a few arrays to choose from on each side; the sources may be of several dtypes."""

    number: int
    sides: tuple[Drawn, Drawn]
    dtypes: tuple[tuple[str, ...], str]  # of each set of source arrays, of the destination arrays
    lies: tuple[tuple[dict[int, Lie], ...], tuple[dict[int, Lie], ...]]
    inferred: bool  # whether the whole shape is left to be told from the local ones

    def name(self, side: int, which: int) -> str:
        """Of an array."""
        return f"{self.number} {SIDES[side]} {which}"

    def dtype(self, side: int, which: int) -> str:
        """Its element type."""
        return self.dtypes[0][which] if side == 0 else self.dtypes[1]

    def arguments(self, topology: Topology | None, source_dtype: str) -> dict[str, Any]:
        """What all ranks pass."""
        told: dict[str, Any] = {"topology": topology}
        for side, prefix in zip(self.sides, ("src", "dst"), strict=True):
            told |= {f"{prefix}_mesh": side.layout.mesh, f"{prefix}_placements": side.layout.placements}
        if not self.inferred:
            told["global_shape"] = self.sides[0].shape
        if source_dtype != self.dtypes[1]:
            told["dst_dtype"] = self.dtypes[1]
        return told


@dataclass(frozen=True)
class Call:
    """One call: which problem, and on each rank which arrays; perhaps a mistake of one rank."""

    problem: Problem
    chosen: tuple[dict[int, int], dict[int, int]]  # which source and which destination array, by rank
    topology: Topology | None
    mistake: str | None
    victim: int


def draw_problem(rng: Random, number: int, ranks: int, device: bool) -> Problem:
    shape = draw_shape(rng)
    while elements(shape) > 4096:
        shape = draw_shape(rng)
    sides = draw_sides(rng, shape, ranks, meshes_only=True)
    one, two = draw_dtypes(rng, casts=0.5)
    sources = (one, one, *([two] if one != two else []))
    inferred = all(map(_can_be_inferred, sides)) and rng.random() < 0.5
    lies = tuple(
        tuple(
            {
                r: draw_lie(rng, s, numpy_dtype(d).itemsize, split=not inferred, misaligned=not device)
                for r, s in side.local_shapes.items()
            }
            for d in dtypes
        )
        for side, dtypes in zip(sides, (sources, (two, two)), strict=True)
    )
    return Problem(number, sides, (sources, two), (lies[0], lies[1]), inferred)


def _can_be_inferred(side: Drawn) -> bool:
    """Whether every rank's local extents times the mesh axes that shard them make up the whole shape."""
    factor = [1] * len(side.shape)
    for size, placement in zip(side.layout.mesh.shape, side.layout.placements, strict=True):
        if isinstance(placement, Shard | StridedShard):
            factor[placement.dim] *= size
    return all(
        tuple(n * f for n, f in zip(local, factor, strict=True)) == side.shape
        for local in side.local_shapes.values()
    )


def draw_call(rng: Random, problems: list[Problem], topologies: list[Topology | None], ranks: int) -> Call:
    problem = rng.choice(problems)
    chosen: list[dict[int, int]] = []
    for side in (0, 1):
        count = len(problem.lies[side])
        common = rng.randrange(count)
        picked = dict.fromkeys(problem.sides[side].ranks, common)
        if rng.random() < 0.3:  # one rank has another array than at the last call, the others have not
            picked[rng.choice(list(picked))] = 1 - common if common < 2 else common
        chosen.append(picked)
    mistake = rng.choice(MISTAKES) if rng.random() < 0.15 else None
    return Call(problem, (chosen[0], chosen[1]), rng.choice(topologies), mistake, rng.randrange(ranks))


class Sequence:
    """Some problems with all their arrays on this process's ranks."""

    def __init__(self, world: World, problems: list[Problem]) -> None:
        self.world, self.problems = world, problems
        self.arenas: tuple[dict[int, Arena], dict[int, Arena]] = ({}, {})
        for side in (0, 1):
            for rank in world.ranks:
                arena = self.arenas[side][rank] = world.arena(rank)
                for p in problems:
                    for which, lies in enumerate(p.lies[side]):
                        if rank in lies:
                            arena.place(p.name(side, which), lies[rank], p.dtype(side, which))
                arena.allocate()

    def fill(self, call: Call, seed: list[int]) -> None:
        """New values where this call reads, nothing anywhere else, and what is expected of it."""
        p = call.problem
        for arenas in self.arenas:
            for arena in arenas.values():
                arena.clear()
        source_dtype = p.dtype(0, next(iter(call.chosen[0].values())))
        cast = p.dtypes[1] if p.dtypes[1] != source_dtype else None
        whole = random_values(np.random.default_rng(seed), elements(p.sides[0].shape), source_dtype, cast)
        for rank, arena in self.arenas[0].items():
            if rank in call.chosen[0]:
                write(arena.views[p.name(0, call.chosen[0][rank])], whole, p.sides[0].flat[rank])
            arena.twin[...] = arena.bytes
            arena.upload()
        whole = whole if cast is None else whole.astype(numpy_dtype(cast))
        for rank, arena in self.arenas[1].items():
            if rank in call.chosen[1] and call.mistake is None:
                write(arena.expected[p.name(1, call.chosen[1][rank])], whole, p.sides[1].flat[rank])
            arena.upload()

    def call(self, call: Call) -> None:
        """What this process passes, with the mistake if one of its ranks makes it."""
        p, mistaken = call.problem, call.mistake is not None and call.victim in self.world.ranks
        topology, other = call.topology, mistaken and call.mistake == "other problem"
        if other:
            p = self.problems[(p.number + 1) % len(self.problems)]
        if mistaken and call.mistake == "topology":
            topology = Topology([[rank] for rank in reversed(range(self.world.size))])
        given: list[dict[int, Any]] = []
        for side in (0, 1):
            chosen = dict.fromkeys(p.sides[side].ranks, 0) if other else call.chosen[side]
            given.append(
                {r: a.array(p.name(side, chosen[r])) for r, a in self.arenas[side].items() if r in chosen}
            )
        source_dtype = p.dtype(0, 0 if other else next(iter(call.chosen[0].values())))
        arguments = p.arguments(topology, source_dtype)
        if mistaken and call.mistake in ("dtype", "shape"):
            wrong = next((s for s in (0, 1) if call.victim in given[s]), None)
            if wrong is None:
                arguments["src_mesh"] = [[0, 0]]
            else:
                kind = np.dtype("V7") if call.mistake == "dtype" else numpy_dtype(p.dtypes[1])
                shape = p.sides[wrong].local_shapes[call.victim]
                grown = shape if call.mistake == "dtype" else (*shape, 3)
                given[wrong][call.victim] = np.zeros(grown, kind)
        source, destination = (self.world.mine(side) for side in given)
        reshard(source, destination, self.world.transport, **arguments)

    def differ(self, call: Call) -> bool:
        """Whether the call is a mistake at all: all problems and topologies might be the same."""
        if call.mistake not in (
            "topology",
            "other problem",
        ):  # of a wrong array with nothing in it nothing is asked
            return all(0 not in s.local_shapes.get(call.victim, ()) for s in call.problem.sides)
        if len(self.world.ranks) > 1 or self.world.size == 1:
            return False  # one process passes one problem
        if call.mistake == "topology":
            return call.topology is None or len(call.topology.domains) < self.world.size
        other = self.problems[(call.problem.number + 1) % len(self.problems)]
        return _said(other) != _said(call.problem)

    def wrong(self, when: str) -> list[str]:
        """What is not as it should be on this process's ranks."""
        return [
            f"{when}: array {name!r} on rank {rank}"
            for arenas in self.arenas
            for rank, arena in arenas.items()
            for name in arena.wrong()
        ]


def _said(problem: Problem) -> tuple[str, ...]:
    return (*(repr(side.layout) for side in problem.sides), repr(problem.dtypes))


def reshard_case(world: World, rng: Random, seed: str, chosen: Collection[int] | None = None) -> Outcome:
    """A sequence of calls."""
    outcome = Outcome()
    problems = [draw_problem(rng, i, world.size, world.on_device) for i in range(rng.randint(1, 3))]
    topologies = [draw_topology(rng, world.size), None]
    calls = [draw_call(rng, problems, topologies, world.size) for _ in range(CALLS)]
    sequence = Sequence(world, problems)
    for number, call in enumerate(calls):
        if call.mistake is not None and not sequence.differ(call):
            continue
        sequence.fill(call, [*seed.encode(), number])
        when = f"call {number}, {call.mistake or 'in order'}: {_said(call.problem)}, arrays {call.chosen}"
        if call.mistake is not None:
            outcome.wrong += refused(world, lambda c=call: sequence.call(c), f"{when}, rank {call.victim}")  # type: ignore[misc]
            outcome.counts["refusals"] += 1
        else:
            sequence.call(call)
            outcome.counts += {"problems": 1, "plans": 1}
        outcome.wrong += sequence.wrong(when)
        if outcome.wrong:
            break
    return outcome
