# SPDX-License-Identifier: Apache-2.0
"""Views of real storage: against slices of the whole model, and moved through to other storage, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from nccl_m2n.refit import Manifest, Parallelism, Parameter
from nccl_m2n.refit.storage import megatron, padded_rows, vllm

from . import small
from .small import Arrays, Rank


@dataclass
class Side:
    """One side's storage, and the parameters that the package sees in it."""

    states: dict[int, Arrays]
    parameters: dict[int, list[Parameter]]


def megatron_side(
    config: dict[str, Any],
    full: Arrays,
    tp: int,
    pp: int,
    ep: int,
    etp: int,
    data: int,
    style: str,
    start: int,
) -> Side:
    manifest = Manifest.from_config(config)
    size = tp * pp * data
    padded = padded_rows(config["vocab_size"], 8, tp)
    sides = Parallelism(tp=tp, pp=pp, ep=ep, etp=etp, dp=data)
    assert sides.size == size
    states = {}
    for rank in range(size):
        at = Rank.megatron(rank, tp, pp, ep, etp, data)
        states[start + rank] = small.megatron_state(full, config, at, padded, style)
    parameters = {
        rank: megatron(manifest, sides, rank, state, start_rank=start, padded_vocab=padded, skip=SKIPPED)
        for rank, state in states.items()
    }
    return Side(states, parameters)


def vllm_side(
    config: dict[str, Any], full: Arrays, tp: int, pp: int, dp: int, parallel_experts: bool, start: int
) -> Side:
    manifest = Manifest.from_config(config)
    sides = Parallelism(tp=tp, pp=pp, dp=dp, ep=tp * dp if parallel_experts else 1, order="vllm")
    states = {}
    for rank in range(tp * pp * dp):
        states[start + rank] = small.vllm_state(full, config, Rank.vllm(rank, tp, pp, dp, parallel_experts))
    parameters = {
        rank: vllm(manifest, sides, rank, state, start_rank=start, skip=SKIPPED)
        for rank, state in states.items()
    }
    return Side(states, parameters)


SKIPPED = ("*.shared_head.head.weight",)  # Megatron has no output head of a prediction layer's own


def check_views(side: Side, full: Arrays) -> None:
    """Each view shows its rank's slice of the whole tensor, in memory that the storage owns."""
    for rank, parameters in side.parameters.items():
        owned = list(side.states[rank].values())
        for p in parameters:
            assert p.array is not None
            seen = p.array.reshape(p.layout.local_shape(rank))
            assert not p.array.size or any(np.shares_memory(p.array, array) for array in owned), p.name
            for piece in p.layout.pieces(rank):
                got = seen[piece.local_slices]
                np.testing.assert_array_equal(
                    got, full[p.name][piece.box.slices], err_msg=f"{p.name} on {rank}"
                )


def move(source: Side, destination: Side) -> None:
    """A refit by hand: whole tensors out of the source's pieces, the destination's pieces out of them."""
    whole: Arrays = {}
    for rank, parameters in source.parameters.items():
        for p in parameters:
            tensor = whole.setdefault(p.name, np.full(p.layout.shape, -7, np.int64))
            for piece in p.layout.pieces(rank):
                tensor[piece.box.slices] = p.array.reshape(p.layout.local_shape(rank))[piece.local_slices]
    for rank, parameters in destination.parameters.items():
        for p in parameters:
            local = p.layout.local_shape(rank)
            at = np.arange(int(np.prod(local))).reshape(local)
            for piece in p.layout.pieces(rank):
                where = np.unravel_index(at[piece.local_slices], p.array.shape)
                p.array[where] = whole[p.name][piece.box.slices]


def refit(source: Side, make_destination: Callable[[Arrays], Side], full: Arrays) -> None:
    expected = make_destination(full)
    got = make_destination({name: np.full_like(array, -1) for name, array in full.items()})
    move(source, got)
    for rank, state in expected.states.items():
        for name, array in state.items():
            np.testing.assert_array_equal(got.states[rank][name], array, err_msg=f"{name} on {rank}")


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
]
CONFIGS = {
    "llama": small.LLAMA,
    "qwen2": small.QWEN2,
    "qwen3_moe": small.QWEN3_MOE,
    "deepseek": small.DEEPSEEK,
}


@pytest.mark.parametrize(("family", "source", "destination"), CASES)
def test_megatron_to_vllm(family: str, source: Any, destination: Any) -> None:
    config = CONFIGS[family]
    _, full = small.full_model(config)
    if "num_nextn_predict_layers" in config:  # the prediction layer's own copy, which is the embedding's
        full["model.layers.4.embed_tokens.weight"] = full["model.embed_tokens.weight"]
    style = STYLES[sum(source) % 3]
    start = destination[0] * destination[1] * destination[2]  # the source stands behind the destination
    trainer = megatron_side(config, full, *source, style, start)
    check_views(trainer, full)

    def generator(values: Arrays) -> Side:
        side = vllm_side(config, values, *destination, 0)
        for state in side.states.values():  # arrays that neither side moves
            for name in [n for n in state if n.endswith("shared_head.head.weight")]:
                state[name][...] = 0
        return side

    check_views(vllm_side(config, full, *destination, 0), full)
    refit(trainer, generator, full)


def test_redundant_experts_land_in_every_slot() -> None:
    config = small.QWEN3_MOE
    manifest, full = small.full_model(config)
    slots = [
        0,
        1,
        2,
        0,
        3,
        4,
        5,
        0,
        6,
        7,
        2,
        6,
    ]  # expert 0 twice on the first rank, with others between; 6 on the last
    sides = Parallelism(tp=2, dp=2, ep=4, order="vllm")

    def generator(values: Arrays) -> Side:
        states = {r: small.vllm_state(values, config, Rank.vllm(r, 2, 1, 2, True), slots) for r in range(4)}
        return Side(states, {r: vllm(manifest, sides, r, s, expert_slots=slots) for r, s in states.items()})

    slots[:] = [0, 1, 0, 2, 3, 0, 4, 5, 6, 7, 2, 6]
    check_views(generator(full), full)
    refit(megatron_side(config, full, 1, 1, 2, 1, 2, "grouped", 4), generator, full)
