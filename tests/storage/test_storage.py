# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's storage to vLLM's for each family: views against slices, and moved through, bit for bit."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from nccl_m2n.sharding import Parallelism
from nccl_m2n.storage import split_qkv, vllm
from tests.storage import small
from tests.storage.sides import CONFIGS, Side, check_views, megatron_side, refit, vllm_side
from tests.storage.small import Arrays, Rank

# tp, pp, ep, etp, data
DENSE_SOURCES = [
    (1, 1, 1, 1, 1),
    (2, 1, 1, 2, 1),
    (2, 2, 1, 2, 2),
    (1, 4, 1, 1, 1),
    (2, 4, 1, 2, 1),
    (1, 2, 1, 1, 3),
]
MOE_SOURCES = [
    *((1, 1, 4, 1, 4), (1, 2, 2, 1, 2), (2, 1, 2, 2, 2), (2, 2, 4, 1, 2), (1, 1, 8, 1, 8), (2, 1, 1, 4, 2)),
    (1, 4, 1, 1, 1),
]
# tp, pp, dp, experts over ranks
DESTINATIONS = [
    (1, 1, 1, False),
    (4, 1, 1, False),
    (8, 1, 1, False),
    (2, 2, 2, False),
    (2, 1, 2, False),
    (1, 4, 1, False),
]
MOE_DESTINATIONS = [*DESTINATIONS, (4, 1, 2, True), (2, 2, 2, True)]
STYLES = ("grouped", "sequential", "legacy")

CASES = [
    *itertools.product(["llama", "qwen2"], DENSE_SOURCES, DESTINATIONS),
    *itertools.product(["qwen3_moe", "deepseek"], MOE_SOURCES, MOE_DESTINATIONS),
    *itertools.product(["gpt_oss"], MOE_SOURCES, MOE_DESTINATIONS[2:]),
]


@pytest.mark.parametrize(("family", "source", "destination"), CASES)
def test_megatron_to_vllm(family: str, source: Any, destination: Any) -> None:
    config = CONFIGS[family]
    _, full = small.full_model(config)
    if "num_nextn_predict_layers" in config:  # the prediction layer's own copy, which is the embedding's
        full["model.layers.4.embed_tokens.weight"] = full["model.embed_tokens.weight"]
    style = STYLES[sum(source) % 3]
    start = destination[0] * destination[1] * destination[2]  # the source stands behind the destination
    trainer = megatron_side(config, full, *source, style, start)
    if destination == DESTINATIONS[2]:
        check_views(trainer, full)

    def generator(values: Arrays) -> Side:
        side = vllm_side(config, values, *destination, 0)
        for state in side.states.values():  # arrays that neither side moves
            for name in [n for n in state if n.endswith("shared_head.head.weight")]:
                state[name][...] = 0
        return side

    if source in (DENSE_SOURCES[0], MOE_SOURCES[0]):
        check_views(vllm_side(config, full, *destination, 0), full)
    refit(trainer, generator, full)


def test_redundant_experts_land_in_every_slot() -> None:
    config = small.QWEN3_MOE
    manifest, full = small.full_model(config)
    slots = [0, 1, 0, 2, 3, 0, 4, 5, 6, 7, 2, 6]  # 0 twice on one rank, another between, and on the next
    sides = Parallelism(tp=2, dp=2, ep=4, order="vllm")

    def generator(values: Arrays) -> Side:
        states = {r: small.vllm_state(values, config, Rank.vllm(r, 2, 1, 2, True), slots) for r in range(4)}
        return Side(states, {r: vllm(manifest, sides, r, s, expert_slots=slots) for r, s in states.items()})

    check_views(generator(full), full)
    refit(megatron_side(config, full, 1, 1, 2, 1, 2, "grouped", 4), generator, full)


def test_query_groups_are_split_without_a_copy() -> None:
    fused = np.arange(2 * (3 + 2) * 4 * 5).reshape(40, 5)
    q, k, v = split_qkv(fused, groups=2, queries=3, head_dim=4)
    assert (q.shape, k.shape, v.shape) == ((2, 12, 5), (2, 4, 5), (2, 4, 5))
    assert k[1, 0, 0] == fused[32, 0]
    assert v[0, 0, 0] == fused[16, 0]
    assert all(np.shares_memory(part, fused) for part in (q, k, v))
