# SPDX-License-Identifier: Apache-2.0
"""Many tensors of many layouts as one plan: bound, run twice with other values, every byte compared."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from nccl_m2n import Plan, Topology, Transfer, plan
from nccl_m2n.execution.bound import Bound
from tests.fuzz.layouts import Drawn, draw_shape, draw_sides
from tests.fuzz.memory import Arena, Lie, draw_lie, elements, numpy_dtype, random_values, write
from tests.fuzz.outcome import Outcome
from tests.fuzz.world import World

PLAIN = ("uint8", "int8", "bool", "int16", "uint16", "float16", "bfloat16", "int32", "float32", "int64", "float64",
         "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "V3", "V6", "V12")  # fmt: skip
FLOATS = ("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2")
METHODS = ("reshard",) * 8 + ("direct", "gather_broadcast")
SIDES = ("source", "destination")


@dataclass(frozen=True, eq=False)
class Tensor:
    """One problem."""

    name: str
    sides: tuple[Drawn, Drawn]
    dtypes: tuple[str, str]
    lies: tuple[dict[int, Lie], dict[int, Lie]]
    left_out: bool  # whether ranks with nothing give no array

    @property
    def cast(self) -> str | None:
        """The destination's element type, where it is another."""
        return self.dtypes[1] if self.dtypes[1] != self.dtypes[0] else None

    @property
    def transfer(self) -> Transfer:
        """What the package is told."""
        source, destination = (side.layout for side in self.sides)
        return Transfer(source, destination, self.dtypes[0], self.name, self.cast)

    def on(self, side: int, rank: int) -> bool:
        """Whether a rank gives an array on a side."""
        local = self.sides[side].local_shapes.get(rank)
        return local is not None and not (self.left_out and 0 in local)


def draw_dtypes(rng: Random, casts: float = 0.2) -> tuple[str, str]:
    """Element types of both sides, in so many cases two."""
    if rng.random() < casts:
        return rng.choice(FLOATS), rng.choice(FLOATS)
    return (rng.choice(PLAIN),) * 2


def draw_tensors(
    rng: Random, ranks: int, pairs: int, of_a_pair: int, *, device: bool = False
) -> list[Tensor]:
    """Up to `of_a_pair` tensors for each of `pairs` pairs of layouts."""
    made: list[Tensor] = []
    for _ in range(pairs):
        sides = draw_sides(rng, draw_shape(rng), ranks)
        for _ in range(rng.randint(1, of_a_pair) if elements(sides[0].shape) < 4096 else 1):
            dtypes = draw_dtypes(rng)
            items = [numpy_dtype(d).itemsize for d in dtypes]
            lies = [
                {r: draw_lie(rng, s, item, misaligned=not device) for r, s in side.local_shapes.items()}
                for side, item in zip(sides, items, strict=True)
            ]
            made.append(Tensor(f"t{len(made)}", sides, dtypes, (lies[0], lies[1]), rng.random() < 0.3))
    return made


def draw_topology(rng: Random, ranks: int) -> Topology | None:
    """Domains of any size, of any ranks."""
    if rng.random() < 0.2:
        return None
    order = rng.sample(range(ranks), ranks) if rng.random() < 0.5 else list(range(ranks))
    domains = []
    while order:
        size = rng.randint(1, len(order))
        domains.append(order[:size])
        order = order[size:]
    return Topology(domains)


def draw_options(rng: Random, nbytes: int) -> dict[str, Any]:
    """How a plan of so many bytes is made: in a few rounds, or with the least that there can be in each."""
    options: dict[str, Any] = {"method": rng.choice(METHODS)}
    if rng.random() < 0.3:
        options["chunk_bytes"] = max(1, nbytes // rng.choice((3, 7, 20))) if nbytes > 2000 else 16
    if rng.random() < 0.2:
        options["staging_bytes"] = max(1, nbytes // rng.choice((2, 5, 10)) if nbytes > 2000 else 1)
    return options


class Batch:
    """Tensors with memory of their own on this process's ranks, whose values change every turn."""

    def __init__(self, world: World, tensors: list[Tensor], seed: str) -> None:
        self.world, self.tensors, self._seed = world, tensors, seed
        self._wholes: dict[str, Any] = {}  # flattened, as they are now
        self.arenas: tuple[dict[int, Arena], dict[int, Arena]] = ({}, {})
        for side in (0, 1):
            for rank in world.ranks:
                arena = self.arenas[side][rank] = world.arena(rank)
                for tensor in tensors:
                    if tensor.on(side, rank):
                        arena.place(tensor.name, tensor.lies[side][rank], tensor.dtypes[side])
                arena.allocate()

    def arrays(self, side: int) -> dict[int, dict[str, Any]]:
        """By rank and name."""
        return {rank: arena.arrays() for rank, arena in self.arenas[side].items()}

    def given(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Both sides' arrays as `Plan.bind` takes them."""
        return self.world.given(self.arrays(0)), self.world.given(self.arrays(1))

    def fill(self, turn: int, names: Collection[str] | None = None) -> None:
        """New values in the sources, and in the destinations nothing; expected there: the tensors called `names`."""
        for arenas in self.arenas:
            for arena in arenas.values():
                arena.clear()
        rng = np.random.default_rng([*self._seed.encode(), turn])
        for tensor in self.tensors:
            whole = random_values(rng, elements(tensor.sides[0].shape), tensor.dtypes[0], tensor.cast)
            self._wholes[tensor.name] = whole
            self._write(tensor, whole, names is None or tensor.name in names)
        self._settle_sources()
        for arena in self.arenas[1].values():
            arena.upload()

    def change(self, turn: int, share: float, names: Collection[str] | None = None) -> None:
        """Other values in about that share of every tensor's elements; the destinations keep what they have.

        With a share of 1.0 the values are those of an earlier turn of that number. Expected in the destinations:
        the tensors called `names`.
        """
        rng = np.random.default_rng([*self._seed.encode(), turn])
        for tensor in self.tensors:
            before = self._wholes[tensor.name]
            other = random_values(rng, len(before), tensor.dtypes[0], tensor.cast)
            whole = self._wholes[tensor.name] = np.where(rng.random(len(before)) < share, other, before)
            self._write(tensor, whole, names is None or tensor.name in names)
        self._settle_sources()

    def expect(self, other: Batch) -> None:
        """In the destinations what another batch of the same tensors has in its sources; they are cleared."""
        for arena in self.arenas[1].values():
            arena.clear()
            arena.upload()
        for tensor in self.tensors:
            self._write(tensor, other._wholes[tensor.name], True)
        self._settle_sources()

    def _settle_sources(self) -> None:
        for arena in self.arenas[0].values():
            arena.twin[...] = arena.bytes
            arena.upload()

    def spoil(self, rank: int) -> None:
        """Somebody else writes into a rank's destinations."""
        if rank not in self.arenas[1]:
            return
        arena = self.arenas[1][rank]
        for tensor in self.tensors:
            if tensor.name in arena.views:
                zeros = np.zeros(elements(tensor.sides[1].shape), numpy_dtype(tensor.dtypes[1]))
                write(arena.views[tensor.name], zeros, tensor.sides[1].flat[rank])
        arena.upload()

    def _write(self, tensor: Tensor, whole: Any, wanted: bool) -> None:
        for rank, arena in self.arenas[0].items():
            if tensor.name in arena.views:
                write(arena.views[tensor.name], whole, tensor.sides[0].flat[rank])
        if not wanted:
            return
        cast = whole if tensor.cast is None else whole.astype(numpy_dtype(tensor.cast))
        for rank, arena in self.arenas[1].items():
            if tensor.name in arena.expected:
                write(arena.expected[tensor.name], cast, tensor.sides[1].flat[rank])

    def wrong(self, when: str) -> list[str]:
        """What is not as it should be on this process's ranks."""
        return [
            f"{when}: {SIDES[side]} of {name} on rank {rank}: {self._tensor(name)}"
            for side, arenas in enumerate(self.arenas)
            for rank, arena in arenas.items()
            for name in arena.wrong()
        ]

    def _tensor(self, name: str) -> str:
        tensor = next(t for t in self.tensors if t.name == name)
        return f"{tensor.transfer!r} lying {tensor.lies}"


def draw_plan(rng: Random, tensors: list[Tensor], ranks: int) -> Plan:
    """One plan of all tensors."""
    nbytes = sum(elements(t.sides[0].shape) * numpy_dtype(t.dtypes[0]).itemsize for t in tensors)
    return plan([t.transfer for t in tensors], draw_topology(rng, ranks), **draw_options(rng, nbytes))


def bind_case(world: World, rng: Random, seed: str, chosen: Collection[int] | None = None) -> Outcome:
    """One plan, run twice."""
    return _bind_and_run(world, rng, seed, chosen, 1)


def twins_case(world: World, rng: Random, seed: str, chosen: Collection[int] | None = None) -> Outcome:
    """Two plans on one transport, which overlap in time: ranks wait for them in different orders."""
    return _bind_and_run(world, rng, seed, chosen, 2)


def _bind_and_run(
    world: World, rng: Random, seed: str, chosen: Collection[int] | None, count: int
) -> Outcome:
    outcome = Outcome()
    batches, plans = [], []
    for number in range(count):
        tensors = draw_tensors(rng, world.size, rng.randint(1, 8), 30, device=world.on_device)
        if chosen is not None:
            tensors = [t for i, t in enumerate(tensors) if i in chosen]
        batches.append(Batch(world, tensors, f"{seed}.{number}"))
        plans.append(draw_plan(rng, tensors, world.size))
        outcome.counts += {"problems": len(tensors), "plans": 1}
    ways = [rng.sample(range(len(plans)), len(plans)) for _ in range(2 * world.size + 1)]
    bounds = [p.bind(world.transport, *b.given()) for p, b in zip(plans, batches, strict=True)]
    for turn in (1, 2):
        for batch in batches:
            batch.fill(turn)
        _run(world, bounds, ways, turn)
        outcome.wrong += [what for batch in batches for what in batch.wrong(f"turn {turn}")]
    for i in ways[-1]:
        bounds[i].close()
    return outcome


def _run(world: World, bounds: list[Bound], ways: list[list[int]], turn: int) -> None:
    """Every rank starts them in one order, and may wait in an order of its own."""
    for i in ways[-1]:
        bounds[i].run()
    for i in ways[2 * world.ranks[0] + turn - 1]:
        bounds[i].wait(world.timeout)
