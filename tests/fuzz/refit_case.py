# SPDX-License-Identifier: Apache-2.0
"""Refits: parameters of any layouts, some whole, some on one side only; steps, subsets, versions, mistakes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from random import Random
from typing import Any

import numpy as np

from nccl_m2n import Parameter, Refit
from tests.fuzz.bind_case import Batch, Tensor, draw_tensors, draw_topology
from tests.fuzz.memory import elements, numpy_dtype, random_values
from tests.fuzz.outcome import Outcome, refused
from tests.fuzz.world import World

Side = dict[int, list[Parameter]]
MISTAKES = ("shape", "dtype", "no array")


class Steps:
    """One refit and its memory, on this process's ranks."""

    def __init__(self, world: World, rng: Random, seed: str) -> None:
        self.world, self.seed = world, seed
        self.tensors = draw_tensors(rng, world.size, rng.randint(1, 4), 4, device=world.on_device)
        self.batch = Batch(world, self.tensors, seed)
        self.topology = draw_topology(rng, world.size)
        names = [t.name for t in self.tensors]
        self.skipped = {n for n in names[1:] if rng.random() < 0.1}  # on the source side only
        self.loaded = {
            t.name for t in self.tensors[1:] if rng.random() < 0.15 and t.cast is None
        } - self.skipped
        self.whole = {n for n in names if rng.random() < 0.15} - self.loaded - self.skipped
        self.moved = set(names) - self.skipped
        self.delivered: dict[int, dict[str, Any]] = {}

    def side(self, number: int) -> Side:
        """What each of this process's ranks declares."""
        made: Side = {}
        for rank in self.world.ranks:
            arena = self.batch.arenas[number][rank]
            for t in self.tensors:
                if rank not in t.sides[number].ranks or (number == 1 and t.name in self.skipped):
                    continue
                layout = None if number == 1 and t.name in self.loaded else t.sides[number].layout
                array = arena.array(t.name) if layout is not None and t.on(number, rank) else None
                made.setdefault(rank, []).append(Parameter(t.name, layout, array, t.dtypes[number]))
        return made

    def refit(self, sides: tuple[Side, Side], **changes: Any) -> Refit:
        """Both sides joined."""
        casts = {t.name: t.cast for t in self.tensors if t.cast is not None}
        load = {rank: self._loader(rank) for rank in self.world.ranks} if self.loaded else None
        options: dict[str, Any] = {
            "cast": casts or False,
            "missing": "skip" if self.skipped else "error",
            "whole": sorted(self.whole),
            "load": None if load is None else self.world.mine(load),
        }
        source, destination = (self.world.mine(side) or [] for side in sides)
        return Refit(self.world.transport, source, destination, topology=self.topology, **(options | changes))

    def _loader(self, rank: int) -> Callable[[str, Any], None]:
        def load(name: str, tensor: Any) -> None:
            host = tensor.get() if hasattr(tensor, "get") else np.array(tensor)
            self.delivered.setdefault(rank, {})[name] = host

        return load

    def _shaped(self, tensor: Tensor, got: Any) -> bool:
        """On a device, types that CuPy lacks are seen as units of theirs."""
        return self.world.on_device or got.shape == tensor.sides[0].shape

    def wrong(self, turn: int, names: Collection[str], when: str) -> list[str]:
        """What is not as it should be, delivered tensors included."""
        found = self.batch.wrong(when)
        rng = np.random.default_rng([*self.seed.encode(), turn])
        for t in self.tensors:
            whole = random_values(rng, elements(t.sides[0].shape), t.dtypes[0], t.cast)
            if t.name not in self.loaded:
                continue
            for rank in set(t.sides[1].ranks) & set(self.world.ranks):
                got = self.delivered.get(rank, {}).pop(t.name, None)
                if t.name not in names:
                    found += [] if got is None else [f"{when}: {t.name} was loaded on rank {rank}"]
                elif got is None or got.tobytes() != whole.tobytes() or not self._shaped(t, got):
                    found.append(f"{when}: {t.name} loaded on rank {rank}: {t.transfer!r}")
        return found


def refit_case(world: World, rng: Random, seed: str, chosen: Collection[int] | None = None) -> Outcome:
    """Perhaps a mistake, which every rank hears of; then a refit, a few steps, each checked and verified."""
    outcome = Outcome()
    steps = Steps(world, rng, seed)
    sides = steps.side(0), steps.side(1)
    mistake, victim = rng.choice(MISTAKES) if rng.random() < 0.25 else None, rng.randrange(world.size)
    if mistake is not None:
        _try_mistake(world, steps, sides, mistake, victim, outcome)
    refit = steps.refit(sides)
    for turn in range(1, rng.randint(2, 4)):
        names = _draw_subset(rng, sorted(steps.moved))
        version = rng.choice((None, turn))
        _step(steps, refit, turn, names, version, outcome)
    if rng.random() < 0.3:
        _disagree(world, refit, rng.randrange(world.size), outcome)
    refit.close()
    outcome.counts["plans"] += 1
    if outcome.wrong:
        outcome.wrong.append(f"whole {steps.whole}, loaded {steps.loaded}, skipped {steps.skipped}")
    return outcome


def _draw_subset(rng: Random, names: list[str]) -> list[str] | None:
    return None if rng.random() < 0.6 else rng.sample(names, rng.randint(1, len(names)))


def _step(
    steps: Steps, refit: Refit, turn: int, names: list[str] | None, version: int | None, outcome: Outcome
) -> None:
    """One run, waited for, compared and verified."""
    moved = steps.moved if names is None else set(names)
    steps.batch.fill(turn, moved - steps.loaded)
    when = f"step {turn} of {names or 'all'}, version {version}"
    refit.run(only=names, version=version)
    refit.wait(steps.world.timeout)
    outcome.wrong += steps.wrong(turn, moved, when)
    outcome.expect(refit.version == version, f"{when}: stamped {refit.version}")
    said = refit.verify(only=sorted(moved))
    outcome.expect(said == [], f"{when}: verify() names {said}")
    outcome.counts["problems"] += len(moved)


def _try_mistake(
    world: World, steps: Steps, sides: tuple[Side, Side], mistake: str, victim: int, outcome: Outcome
) -> None:
    """One rank declares its first parameter wrongly; what is not declared anywhere is no mistake."""
    tensor = steps.tensors[0]
    number = next((s for s in (0, 1) if victim in tensor.sides[s].ranks and tensor.on(s, victim)), None)
    if number is None or 0 in tensor.sides[number].local_shapes[victim]:
        return
    changed = (dict(sides[0]), dict(sides[1]))
    if victim in world.ranks:
        held = list(changed[number][victim])
        at = next(i for i, p in enumerate(held) if p.name == tensor.name)
        held[at : at + 1] = _mistaken(held[at], tensor, number, victim, mistake)
        changed[number][victim] = held
    outcome.wrong += refused(
        world, lambda: steps.refit(changed), f"{mistake} of {tensor.name} on rank {victim}, side {number}"
    )
    outcome.counts["refusals"] += 1


def _mistaken(parameter: Parameter, tensor: Tensor, number: int, rank: int, mistake: str) -> list[Parameter]:
    shape, kind = tensor.sides[number].local_shapes[rank], numpy_dtype(tensor.dtypes[number])
    if mistake == "shape":
        return [Parameter(parameter.name, parameter.layout, np.zeros((*shape, 3), kind), parameter.dtype)]
    if mistake == "dtype":
        return [Parameter(parameter.name, parameter.layout, np.zeros(shape, "V7"))]
    return [Parameter(parameter.name, parameter.layout, None, parameter.dtype)]


def _disagree(world: World, refit: Refit, victim: int, outcome: Outcome) -> None:
    """One rank stamps another version."""
    if world.size == len(world.ranks):
        return

    def step() -> None:
        refit.run(version=7 + (victim in world.ranks))
        refit.wait(world.timeout)

    outcome.wrong += refused(world, step, f"version of rank {victim}")
    outcome.counts["refusals"] += 1
