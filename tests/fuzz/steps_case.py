# SPDX-License-Identifier: Apache-2.0
"""Bindings that go on: only what changed is sent, or other arrays take the place of the first."""

from __future__ import annotations

from collections.abc import Collection
from random import Random

from nccl_m2n.execution.bound import Bound
from tests.fuzz.bind_case import Batch, Tensor, draw_plan, draw_tensors
from tests.fuzz.memory import draw_lie, numpy_dtype
from tests.fuzz.outcome import Outcome
from tests.fuzz.refit_case import Steps
from tests.fuzz.world import World

SHARES = (0.0, 0.01, 0.3, 1.0)  # of the elements that change from one run to the next


def delta_case(world: World, rng: Random, seed: str, chosen: Collection[int] | None = None) -> Outcome:
    """``delta=True``: some values change between runs, and destinations that somebody else wrote are told of."""
    outcome, tensors = Outcome(), _some_tensors(world, rng, chosen)
    batch = Batch(world, tensors, seed)
    plan = draw_plan(rng, tensors, world.size)
    with plan.bind(world.transport, *batch.given(), delta=True) as bound:
        batch.fill(1)
        _run(world, bound, batch, "the first run", outcome)
        for turn in range(2, rng.randint(4, 6)):
            share, spoilt = rng.choice(SHARES), rng.choice((None, None, rng.randrange(world.size)))
            batch.change(turn, share)
            if spoilt is not None:
                batch.spoil(spoilt)
                bound.forget([spoilt])
            _run(world, bound, batch, f"run {turn}, {share:.0%} changed, rank {spoilt} spoilt", outcome)
        bound.forget()
        batch.fill(9)
        _run(world, bound, batch, "the run after all was forgotten", outcome)
    outcome.counts += {"problems": len(tensors), "plans": 1}
    return outcome


def refit_delta_case(world: World, rng: Random, seed: str, chosen: Collection[int] | None = None) -> Outcome:
    """A refit that sends what changed, by turns of all and of some, while values go back to what they were."""
    outcome, steps = Outcome(), Steps(world, rng, seed)
    steps.loaded = set()
    moved = sorted(steps.moved)
    refit = steps.refit((steps.side(0), steps.side(1)), delta=True)
    steps.batch.fill(1, moved)
    for turn in (1, *(rng.choice((1, 2, 3)) for _ in range(4))):
        names = None if turn == 1 or rng.random() < 0.5 else rng.sample(moved, rng.randint(1, len(moved)))
        steps.batch.change(turn, 1.0, names or moved)
        refit.run(only=names)
        refit.wait(world.timeout)
        when = f"values {turn} of {names or 'all'}"
        outcome.wrong += steps.batch.wrong(when)
        said = refit.verify(only=names)
        outcome.expect(said == [], f"{when}: verify() names {said}")
        if outcome.wrong:
            break
    refit.close()
    outcome.counts += {"problems": len(moved), "plans": 1}
    return outcome


def rebind_case(world: World, rng: Random, seed: str, chosen: Collection[int] | None = None) -> Outcome:
    """Two sets of arrays for one plan, one after the other and mixed."""
    outcome, tensors = Outcome(), _some_tensors(world, rng, chosen)
    others = [_lying_otherwise(rng, t, world.on_device) for t in tensors]
    one, two = Batch(world, tensors, f"{seed}.0"), Batch(world, others, f"{seed}.1")
    plan = draw_plan(rng, tensors, world.size)
    with plan.bind(world.transport, *one.given(), delta=rng.random() < 0.3) as bound:
        one.fill(1)
        _run(world, bound, one, "before", outcome)
        bound.rebind(*two.given())
        two.fill(2)
        _run(world, bound, two, "after", outcome)
        bound.rebind(sources=one.given()[0])
        one.fill(3, ())
        two.expect(one)
        _run(world, bound, two, "sources of before", outcome)
        outcome.wrong += one.wrong("what is not bound any more")
    outcome.counts += {"problems": len(tensors), "plans": 1}
    return outcome


def _some_tensors(world: World, rng: Random, chosen: Collection[int] | None) -> list[Tensor]:
    tensors = draw_tensors(rng, world.size, rng.randint(1, 5), 10, device=world.on_device)
    return [t for i, t in enumerate(tensors) if chosen is None or i in chosen]


def _lying_otherwise(rng: Random, tensor: Tensor, device: bool) -> Tensor:
    lies = [
        {
            rank: draw_lie(rng, local, numpy_dtype(dtype).itemsize, misaligned=not device)
            for rank, local in side.local_shapes.items()
        }
        for side, dtype in zip(tensor.sides, tensor.dtypes, strict=True)
    ]
    return Tensor(tensor.name, tensor.sides, tensor.dtypes, (lies[0], lies[1]), tensor.left_out)


def _run(world: World, bound: Bound, batch: Batch, when: str, outcome: Outcome) -> None:
    bound.run()
    bound.wait(world.timeout)
    outcome.wrong += batch.wrong(when)
