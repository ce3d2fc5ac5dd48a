# SPDX-License-Identifier: Apache-2.0
"""Any order of calls on one transport: bindings, runs, `reshard()`, refits, versions and mistakes between them.

Hypothesis looks for an order that goes wrong and makes it short. Problems are those of the fuzzer, checked alike.
"""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)

from nccl_m2n import LocalTransport, M2nError, Refit
from nccl_m2n.execution.bound import Bound
from tests.fuzz.bind_case import Batch, draw_plan, draw_tensors
from tests.fuzz.refit_case import Steps
from tests.fuzz.refusal_case import SPOILS
from tests.fuzz.reshard_case import Sequence, draw_call, draw_problem
from tests.fuzz.world import World

RANKS = 4
SEEDS = st.integers(0, 2**20)


class Open:
    """A binding or a refit, with the memory behind it."""

    def __init__(self, batch: Batch, thing: Bound | Refit) -> None:
        self.batch, self.thing = batch, thing
        self.turn = 0
        self.running = False
        self.names: set[str] = set()


class Calls(RuleBasedStateMachine):
    """One transport and what is open on it."""

    bindings = Bundle("bindings")
    refits = Bundle("refits")
    closed = Bundle("closed")

    @initialize(seed=SEEDS)
    def begin(self, seed: int) -> None:
        self.world = World(LocalTransport(RANKS))
        rng = Random(seed)
        self.problems = [draw_problem(rng, number, RANKS, False) for number in range(2)]
        self.sequence = Sequence(self.world, self.problems)
        self.everything: list[Open] = []

    @rule(target=bindings, seed=SEEDS)
    def bind(self, seed: int) -> Open:
        rng = Random(seed)
        tensors = draw_tensors(rng, RANKS, 2, 2)
        batch = Batch(self.world, tensors, str(seed))
        bound = draw_plan(rng, tensors, RANKS).bind(self.world.transport, *batch.given())
        return self._opened(batch, bound, {t.name for t in tensors})

    @rule(target=refits, seed=SEEDS)
    def join(self, seed: int) -> Open:
        steps = Steps(self.world, Random(seed), str(seed))
        steps.loaded = set()
        refit = steps.refit((steps.side(0), steps.side(1)))
        return self._opened(steps.batch, refit, set(steps.moved))

    def _opened(self, batch: Batch, thing: Bound | Refit, names: set[str]) -> Open:
        made = Open(batch, thing)
        made.names = names
        batch.fill(0, ())
        self.everything.append(made)
        return made

    @rule(one=bindings)
    def run_bound(self, one: Open) -> None:
        """A run that nobody waited for ends before the next one starts."""
        if one.running:
            self.wait(one)
        self._start(one, one.names)
        one.thing.run()

    @rule(one=refits, version=st.none() | st.integers(0, 9), data=st.data())
    def run_refit(self, one: Open, version: int | None, data: st.DataObject) -> None:
        if one.running:
            self.wait(one)
        only = data.draw(st.none() | st.sets(st.sampled_from(sorted(one.names)), min_size=1))
        assert isinstance(one.thing, Refit)
        self._start(one, one.names if only is None else only)
        one.thing.run(only=only, version=version)
        assert one.thing.version is None, "torn, and stamped"
        self.wait(one)
        assert one.thing.version == version
        assert one.thing.verify(only=only) == []

    def _start(self, one: Open, names: set[str]) -> None:
        one.turn += 1
        one.batch.fill(one.turn, names)
        one.running = True

    @rule(one=st.one_of(bindings, refits))
    def wait(self, one: Open) -> None:
        one.thing.wait(30.0)
        one.running = False
        assert one.batch.wrong("after wait()") == []

    @rule(target=closed, one=st.one_of(consumes(bindings), consumes(refits)))
    def close(self, one: Open) -> Open:
        """What was started is ended."""
        one.thing.close()
        one.running = False
        one.thing.close()
        return one

    @rule(one=closed)
    def a_closed_one_is_refused(self, one: Open) -> None:
        with pytest.raises(M2nError):
            one.thing.run()

    @rule(seed=SEEDS)
    def reshard(self, seed: int) -> None:
        rng = Random(seed)
        call = draw_call(rng, self.problems, [None], RANKS)
        if call.mistake is not None and not self.sequence.differ(call):
            return
        self.sequence.fill(call, [seed])
        if call.mistake is None:
            self.sequence.call(call)
        else:
            with pytest.raises(M2nError):
                self.sequence.call(call)
        assert self.sequence.wrong(f"reshard {call.mistake}") == []

    @rule(one=bindings, data=st.data())
    def a_mistake(self, one: Open, data: st.DataObject) -> None:
        assert isinstance(one.thing, Bound)
        tensor = data.draw(st.sampled_from(one.batch.tensors))
        side = data.draw(st.integers(0, 1))
        rank = data.draw(st.sampled_from(sorted(tensor.sides[side].ranks)))
        arrays = one.batch.arrays(0), one.batch.arrays(1)
        spoil = SPOILS[data.draw(st.sampled_from(sorted(SPOILS)))]
        if 0 in tensor.sides[side].local_shapes[rank] or not spoil(one.batch, tensor, side, rank, arrays):
            return
        with pytest.raises(M2nError):
            one.thing.plan.bind(
                self.world.transport, self.world.given(arrays[0]), self.world.given(arrays[1])
            )

    @precondition(lambda self: bool(getattr(self, "everything", ())))
    @invariant()
    def nothing_else_was_written(self) -> None:
        for one in self.everything:
            if not one.running:
                assert one.batch.wrong("while others ran") == []

    def teardown(self) -> None:
        for one in getattr(self, "everything", ()):
            one.thing.close()


TestCalls = Calls.TestCase
TestCalls.settings = settings(
    max_examples=15, stateful_step_count=20, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)  # fmt: skip
