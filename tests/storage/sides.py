# SPDX-License-Identifier: Apache-2.0
"""Two sides with storage of their own, and a refit between them done by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from nccl_m2n.refit import Parameter
from nccl_m2n.sharding import Parallelism
from nccl_m2n.storage import fsdp, megatron, padded_rows, vllm
from tests.storage import small
from tests.storage.small import Arrays, Rank

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": small.LLAMA,
    "qwen2": small.QWEN2,
    "qwen3_moe": small.QWEN3_MOE,
    "deepseek": small.DEEPSEEK,
    "gpt_oss": small.GPT_OSS | {"unstack": True},
}


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
    manifest = small.manifest_of(config)
    size = tp * pp * data
    padded = padded_rows(config["vocab_size"], 8, tp)
    sides = Parallelism(tp=tp, pp=pp, ep=ep, etp=etp, dp=data)
    assert sides.size == size
    states = {}
    for rank in range(size):
        at = Rank.megatron(rank, tp, pp, ep, etp, data)
        state = small.megatron_state(full, config, at, padded, style)
        states[start + rank] = {name: array.copy() for name, array in state.items()}
    parameters = {
        rank: megatron(manifest, sides, rank, state, start_rank=start, padded_vocab=padded, skip=SKIPPED)
        for rank, state in states.items()
    }
    return Side(states, parameters)


def vllm_side(
    config: dict[str, Any], full: Arrays, tp: int, pp: int, dp: int, parallel_experts: bool, start: int
) -> Side:
    manifest = small.manifest_of(config)
    sides = Parallelism(tp=tp, pp=pp, dp=dp, ep=tp * dp if parallel_experts else 1, order="vllm")
    states = {}
    for rank in range(tp * pp * dp):
        states[start + rank] = small.vllm_state(full, config, Rank.vllm(rank, tp, pp, dp, parallel_experts))
    parameters = {
        rank: vllm(manifest, sides, rank, state, start_rank=start, skip=SKIPPED)
        for rank, state in states.items()
    }
    return Side(states, parameters)


def fsdp_side(config: dict[str, Any], full: Arrays, shards: int, replicas: int, tp: int, start: int) -> Side:
    manifest = small.manifest_of(config)
    sides = Parallelism(tp=tp, fsdp=shards, dp=replicas)
    rows = {n: 1 for n in manifest if n.endswith(("o_proj.weight", "down_proj.weight"))}
    columns = {n: 0 for n in manifest if n not in rows and not n.endswith("norm.weight")}
    cuts = rows | columns if tp > 1 else {}
    states = {
        start + r: small.fsdp_state(full, shards, r // tp % shards, cuts, tp, r % tp)
        for r in range(sides.size)
    }
    for state in states.values():
        for name in [n for n in state if n.endswith("shared_head.head.weight")]:
            del state[name]
    parameters = {
        rank: fsdp(manifest, sides, rank, state, start_rank=start, skip=SKIPPED)
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
