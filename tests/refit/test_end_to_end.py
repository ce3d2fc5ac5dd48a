# SPDX-License-Identifier: Apache-2.0
"""Whole small models from one framework's storage to another's through a plan, over LocalTransport."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nccl_m2n import LocalTransport, Topology, Transfer, plan
from nccl_m2n.sharding import Parallelism
from nccl_m2n.storage import vllm
from tests.storage import small
from tests.storage.sides import Side, fsdp_side, megatron_side, vllm_side
from tests.storage.small import Arrays, Rank


def by_name(side: Side) -> tuple[dict[str, Any], dict[str, dict[int, Any]]]:
    """The layouts and the arrays of one side, by name and then by rank."""
    layouts: dict[str, Any] = {}
    arrays: dict[str, dict[int, Any]] = {}
    for rank, parameters in side.parameters.items():
        for p in parameters:
            assert layouts.setdefault(p.name, p.layout) == p.layout
            arrays.setdefault(p.name, {})[rank] = p.array
    return layouts, arrays


def run(source: Side, destination: Side, ranks: int) -> None:
    layouts, sources = by_name(source)
    wanted, destinations = by_name(destination)
    assert layouts.keys() == wanted.keys()
    transfers = [Transfer(layouts[name], wanted[name], dtype="int64", name=name) for name in wanted]
    made = plan(transfers, Topology.regular(ranks=ranks, per_domain=4))
    made.check()
    traffic = made.traffic()
    assert traffic.network_bytes == traffic.network_bytes_bound
    with LocalTransport(ranks=ranks) as transport, made.bind(transport, sources, destinations) as bound:
        bound.run()
        bound.wait(timeout=60.0)


def check(source: Side, expected: Side, got: Side, ranks: int) -> None:
    run(source, got, ranks)
    for rank, state in expected.states.items():
        for name, array in state.items():
            np.testing.assert_array_equal(got.states[rank][name], array, err_msg=f"{name} on {rank}")


def nothing(full: Arrays) -> Arrays:
    return {name: np.full_like(array, -1) for name, array in full.items()}


@pytest.mark.parametrize(("tp", "shards", "dp"), [(1, 4, 1), (1, 3, 2), (2, 4, 1), (2, 5, 2)])
def test_fsdp_to_vllm(tp: int, shards: int, dp: int) -> None:
    config = small.LLAMA | {"vocab_size": 104}
    _, full = small.full_model(config)
    trainer = fsdp_side(config, full, shards, dp, tp, 8)
    for destination in [(8, 1, 1, False), (2, 2, 2, False)]:
        expected = vllm_side(config, full, *destination, 0)
        check(trainer, expected, vllm_side(config, nothing(full), *destination, 0), 8 + len(trainer.states))


def test_redundant_experts() -> None:
    config = small.QWEN3_MOE
    manifest, full = small.full_model(config)
    slots = [0, 1, 0, 2, 3, 0, 4, 5, 6, 7, 2, 6]
    sides = Parallelism(tp=2, dp=2, ep=4, order="vllm")

    def generator(values: Arrays) -> Side:
        states = {r: small.vllm_state(values, config, Rank.vllm(r, 2, 1, 2, True), slots) for r in range(4)}
        return Side(states, {r: vllm(manifest, sides, r, s, expert_slots=slots) for r, s in states.items()})

    trainer = megatron_side(config, full, 1, 1, 2, 1, 2, "grouped", 4)
    check(trainer, generator(full), generator(nothing(full)), 8)
