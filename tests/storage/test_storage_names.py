# SPDX-License-Identifier: Apache-2.0
"""Families that call the same parts otherwise: Mixtral's and Granite's experts, GLM's gate and up, cut projections."""

from __future__ import annotations

import numpy as np
import pytest

from nccl_m2n.errors import CommandError
from nccl_m2n.models import Manifest
from nccl_m2n.sharding import Parallelism
from nccl_m2n.storage import megatron, vllm
from tests.storage import small
from tests.storage.sides import Side, check_views
from tests.storage.small import Arrays, Rank, cut

QWEN = small.QWEN3_MOE | {"mlp_only_layers": (), "vocab_size": 104}
MIXTRAL = small.LLAMA | {
    "model_type": "mixtral",
    "num_local_experts": 8,
    "intermediate_size": 16,
    "vocab_size": 104,
}
_WORDS = (("mlp.", "block_sparse_moe."), ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))


def mixtral(name: str) -> str:
    """Mixtral's name of one of Qwen's parameters, or of vLLM's."""
    for old, new in _WORDS:
        name = name.replace(old, new) if "mlp." in name or "block_sparse" in name else name
    return name


def models() -> tuple[Manifest, Arrays, Arrays]:
    """Mixtral's manifest; one set of weights under Qwen's names and under Mixtral's."""
    _, full = small.full_model(QWEN)
    full = {
        name: array for name, array in full.items() if not name.endswith(("q_norm.weight", "k_norm.weight"))
    }
    manifest, renamed = Manifest.from_config(MIXTRAL), {mixtral(n): a for n, a in full.items()}
    assert {n: a.shape for n, a in renamed.items()} == {n: i.shape for n, i in manifest.items()}
    return manifest, full, renamed


@pytest.mark.parametrize("style", ["grouped", "sequential", "legacy"])
def test_mixtral_in_megatron(style: str) -> None:
    manifest, full, renamed = models()
    states = {
        r: small.megatron_state(full, QWEN, Rank.megatron(r, 2, 2, 2, 1, 1), 104, style) for r in range(4)
    }
    sides = Parallelism(tp=2, pp=2, ep=2, etp=1)
    check_views(Side(states, {r: megatron(manifest, sides, r, s) for r, s in states.items()}), renamed)


def test_mixtral_in_vllm() -> None:
    manifest, full, renamed = models()
    states = {}
    for rank in range(4):
        state = small.vllm_state(full, QWEN, Rank.vllm(rank, 4, 1, 1, False))
        states[rank] = {name.replace("mlp.", "block_sparse_moe."): array for name, array in state.items()}
    sides = Parallelism(tp=4, order="vllm")
    check_views(Side(states, {r: vllm(manifest, sides, r, s) for r, s in states.items()}), renamed)


def test_granite_in_vllm() -> None:
    """Stacked as published, and stacked by vLLM: gate and up of each rank's share end to end."""
    at = "model.layers.0.block_sparse_moe"
    shapes = {f"{at}.input_linear.weight": (8, 32, 24), f"{at}.output_linear.weight": (8, 24, 16)}
    manifest = Manifest({n: (s, "int64") for n, s in shapes.items()}, config={"model_type": "granitemoe"})
    full = {n: np.arange(np.prod(s)).reshape(s) for n, s in shapes.items()}
    states = {}
    for rank in range(2):
        gate, up = np.split(full[f"{at}.input_linear.weight"], 2, axis=1)
        states[rank] = {
            f"{at}.experts.w13_weight": np.concatenate([cut(gate, 1, rank, 2), cut(up, 1, rank, 2)], axis=1),
            f"{at}.experts.w2_weight": cut(full[f"{at}.output_linear.weight"], 2, rank, 2).copy(),
        }
    sides = Parallelism(tp=2, order="vllm")
    check_views(Side(states, {r: vllm(manifest, sides, r, s) for r, s in states.items()}), full)


def test_gate_and_up_in_one_matrix() -> None:
    name = "model.layers.0.mlp.gate_up_proj.weight"
    manifest = Manifest({name: ((32, 6), "int64")}, config={"model_type": "glm4"})
    full = {name: np.arange(192).reshape(32, 6)}
    halves = np.split(full[name], 2)
    for helper, stored in ((megatron, "decoder.layers.0.mlp.linear_fc1.weight"), (vllm, name)):
        states = {r: {stored: np.concatenate([cut(half, 0, r, 4) for half in halves])} for r in range(4)}
        check_views(
            Side(states, {r: helper(manifest, Parallelism(tp=4), r, s) for r, s in states.items()}), full
        )


def test_down_projections_of_latent_attention_are_repeated_or_cut() -> None:
    config = small.DEEPSEEK | {"kv_lora_rank": 6, "num_nextn_predict_layers": 0, "vocab_size": 104}
    manifest, full = small.full_model(config)
    states = {r: small.megatron_state(full, config, Rank.megatron(r, 2, 1, 1, 2, 1), 104) for r in range(2)}
    sides = Parallelism(tp=2)
    check_views(Side(states, {r: megatron(manifest, sides, r, s) for r, s in states.items()}), full)
    for rank, state in states.items():
        for name in [n for n in state if n.endswith(("_q_down_proj.weight", "_kv_down_proj.weight"))]:
            state[name] = cut(state[name], 0, rank, 2).copy()
    with pytest.raises(CommandError, match=r"expected \(10, 24\) .* got \(5, 24\)"):
        megatron(manifest, sides, 0, states[0])
    cuts = {r: megatron(manifest, sides, r, s, down_projections="cut") for r, s in states.items()}
    check_views(Side(states, cuts), full)
    with pytest.raises(CommandError, match="expected one of repeated, cut as down_projections"):
        megatron(manifest, sides, 0, states[0], down_projections="halved")
