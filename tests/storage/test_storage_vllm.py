# SPDX-License-Identifier: Apache-2.0
"""vLLM's storage: block scales, padding, ranks that hold nothing, and storage that is not as described."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nccl_m2n.errors import CommandError
from nccl_m2n.models import Manifest
from nccl_m2n.sharding import Parallelism
from nccl_m2n.storage import megatron, vllm
from tests.storage import small
from tests.storage.sides import Side, check_views
from tests.storage.small import Arrays, Rank, cut


def test_block_scales_lie_beside_their_weights() -> None:
    config = small.DEEPSEEK | {"intermediate_size": 512, "moe_intermediate_size": 256, "n_shared_experts": 1}
    manifest = Manifest.from_config(config, fp8=True).select("model.layers.[01].mlp.*_proj.weight*")
    full = {name: np.arange(info.size).reshape(info.shape) for name, info in manifest.items()}
    for rank in range(2):
        state = {}
        for kind in ("weight", "weight_scale_inv"):
            for mlp in ("model.layers.0.mlp", "model.layers.1.mlp.shared_experts"):
                pair = [cut(full[f"{mlp}.{part}_proj.{kind}"], 0, rank, 2) for part in ("gate", "up")]
                state[f"{mlp}.gate_up_proj.{kind}"] = np.concatenate(pair)
                state[f"{mlp}.down_proj.{kind}"] = cut(full[f"{mlp}.down_proj.{kind}"], 1, rank, 2).copy()
            experts = [f"model.layers.1.mlp.experts.{e}." for e in range(8)]
            pairs = [[cut(full[f"{e}{p}_proj.{kind}"], 0, rank, 2) for p in ("gate", "up")] for e in experts]
            state[f"model.layers.1.mlp.experts.w13_{kind}"] = np.stack([np.concatenate(p) for p in pairs])
            downs = [cut(full[f"{e}down_proj.{kind}"], 1, rank, 2) for e in experts]
            state[f"model.layers.1.mlp.experts.w2_{kind}"] = np.stack(downs)
        made = vllm(manifest, Parallelism(tp=2, order="vllm"), rank, state)
        assert [p.name for p in made] == list(manifest)
        check_views(Side({rank: state}, {rank: made}), full)


def test_padding_rows_are_zeroed_where_asked() -> None:
    _, full = small.full_model(small.LLAMA)
    state = small.vllm_state(full, small.LLAMA, Rank())
    padding = state["lm_head.weight"][101:]
    assert padding.shape == (27, 24)
    assert (padding == -1).all()
    vllm(Manifest.from_config(small.LLAMA), Parallelism(), 0, state)
    assert (padding == -1).all()
    vllm(Manifest.from_config(small.LLAMA), Parallelism(), 0, state, zero_padding=True)
    assert (padding == 0).all()
    assert (state["lm_head.weight"][:101] == full["lm_head.weight"]).all()


def test_a_rank_can_list_what_others_hold() -> None:
    manifest, full = small.full_model(small.LLAMA)
    state = small.vllm_state(full, small.LLAMA, Rank(pp=2, pp_rank=1))
    made = vllm(manifest, Parallelism(pp=2), 1, state, whole_side=True)
    assert [p.name for p in made] == list(manifest)
    assert {p.name.split(".")[2] for p in made if p.array is None and ".layers." in p.name} == {"0", "1"}


def test_torch_tensors_are_seen_in_place() -> None:
    torch = pytest.importorskip("torch")
    manifest, full = small.full_model(small.QWEN3_MOE)
    for style in ("grouped", "legacy"):
        at = small.megatron_state(full, small.QWEN3_MOE, Rank(), 104, style)
        states = [
            (megatron, at, {"padded_vocab": 104}),
            (vllm, small.vllm_state(full, small.QWEN3_MOE, Rank()), {}),
        ]
        for helper, state, options in states:
            tensors = {name: torch.from_numpy(array.copy()) for name, array in state.items()}
            addresses = {t.untyped_storage().data_ptr() for t in tensors.values()}
            for p in helper(manifest, Parallelism(), 0, tensors, **options):
                assert p.array.untyped_storage().data_ptr() in addresses
                np.testing.assert_array_equal(p.array.numpy().reshape(p.layout.shape), full[p.name])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("model.norm.weight"), r"rank 0 has no storage for model\.norm\.weight, of which"),
        (lambda s: s.update(rotary=np.zeros(3)), r"rotary is neither a parameter of <Manifest"),
        (
            lambda s: s.update({"lm_head.weight": s["lm_head.weight"][:101]}),
            r"lm_head\.weight on rank 0: expected 128 rows, got shape \(101, 24\); set padded_vocab",
        ),
        (
            lambda s: s.update({"model.layers.0.mlp.experts.w2_weight": np.zeros((8, 16, 24))}),
            r"w2_weight on rank 0: expected \(24, 16\) .* got \(16, 24\); is it stored as its framework",
        ),
        (
            lambda s: s.update({"model.layers.0.mlp.experts.w2_weight": np.zeros((8, 30, 16))}),
            r"w2_weight on rank 0: expected 24 rows an expert, got shape \(8, 30, 16\)",
        ),
        (
            lambda s: s.update({"model.layers.0.mlp.experts.w13_weight": np.zeros((7, 32, 24))}),
            r"w13_weight on rank 0: expected 8 slots for the experts \[0, 1.*got shape \(7, 32, 24\)",
        ),
        (
            lambda s: s.update({"model.layers.0.self_attn.qkv_proj.weight": np.zeros((99, 24))}),
            r"qkv_proj\.weight on rank 0: expected 96 along dimension 0 .*got shape \(99, 24\)",
        ),
    ],
)
def test_storage_that_is_not_as_described_is_refused(change: Callable[[Arrays], Any], message: str) -> None:
    manifest, full = small.full_model(small.QWEN3_MOE)
    state = small.vllm_state(full, small.QWEN3_MOE, Rank())
    change(state)
    with pytest.raises(CommandError, match=message):
        vllm(manifest, Parallelism(order="vllm"), 0, state)


def test_megatron_refuses_what_it_does_not_know() -> None:
    manifest, full = small.full_model(small.LLAMA)
    state = small.megatron_state(full, small.LLAMA, Rank(), 104)
    for name in ("decoder.layers.0.mlp.linear_fc3.weight", "encoder.weight"):
        with pytest.raises(CommandError, match=f"{name} is no array of Megatron-Core's"):
            megatron(manifest, Parallelism(), 0, state | {name: np.zeros(1)}, padded_vocab=104)
    norm = {"decoder.layers.4.input_layernorm.weight": np.zeros(24)}
    with pytest.raises(CommandError, match=r"layers\.4.*this rank's stage has 4 layers"):
        megatron(manifest, Parallelism(), 0, norm)
    fused = {"decoder.layers.0.self_attention.linear_qkv.weight": np.zeros((12, 24))}
    with pytest.raises(CommandError, match="4 query groups cannot be divided among 8"):
        megatron(manifest, Parallelism(tp=8), 0, fused)
    norm = {"decoder.layers.0.input_layernorm.weight": np.zeros(24)}
    with pytest.raises(CommandError, match=r"layers\.0\..*is on other ranks"):
        megatron(manifest, Parallelism(pp=2), 1, norm, layers=[0, 1])
    with pytest.raises(
        CommandError, match="expected a whole number from 0 to 1 as a rank of this side, got 2"
    ):
        megatron(manifest, Parallelism(pp=2), 2, state)
