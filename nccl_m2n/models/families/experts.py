# SPDX-License-Identifier: Apache-2.0
"""Decoders with experts."""

from __future__ import annotations

from collections.abc import Iterator

from nccl_m2n.models.config import Config
from nccl_m2n.models.families.parts import Entry, attention, decoder, linear, mlp

_BLOCK = 128  # rows and columns that share one fp8 scale


def qwen3_moe(c: Config) -> Iterator[Entry]:
    """Qwen3 with experts."""
    bias, experts, step = (
        c.flag("attention_bias"),
        c.number("num_experts"),
        c.number("decoder_sparse_step", 1) or 1,
    )
    dense = c.numbers("mlp_only_layers")

    def layer(index: int, at: str) -> Iterator[Entry]:
        yield from attention(c, f"{at}.self_attn", bias, bias, norms=True)
        if index in dense or experts == 0 or (index + 1) % step:
            yield from mlp(c, f"{at}.mlp", c["intermediate_size"])
            return
        yield f"{at}.mlp.gate.weight", (experts, c["hidden_size"]), c.dtype
        for expert in range(experts):
            yield from mlp(c, f"{at}.mlp.experts.{expert}", c["moe_intermediate_size"])

    return decoder(c, layer)


def deepseek_v3(c: Config) -> Iterator[Entry]:
    """DeepSeek-V3, R1 and Kimi-K2: latent attention, routed and shared experts, prediction layers at the end.

    With ``fp8`` the matrices are float8 with one float32 scale for each 128 × 128 block, as published.
    """
    fp8, mtp = c.option("fp8", False), c.option("mtp", True)
    extra = c.number("num_nextn_predict_layers", 0) if mtp else 0
    return _with_scales(c, _deepseek_layers(c, extra)) if fp8 else _deepseek_layers(c, extra)


def _deepseek_layers(c: Config, extra: int) -> Iterator[Entry]:
    hidden, experts, layers = c["hidden_size"], c["n_routed_experts"], c["num_hidden_layers"]
    first, every = c.number("first_k_dense_replace"), c.number("moe_layer_freq", 1) or 1

    def layer(index: int, at: str) -> Iterator[Entry]:
        if index >= layers:
            yield f"{at}.embed_tokens.weight", (c["vocab_size"], hidden), c.dtype
            yield f"{at}.enorm.weight", (hidden,), c.dtype
            yield f"{at}.hnorm.weight", (hidden,), c.dtype
            yield f"{at}.eh_proj.weight", (hidden, 2 * hidden), c.dtype
        yield from _latent_attention(c, f"{at}.self_attn")
        if index < first or index % every:
            yield from mlp(c, f"{at}.mlp", c["intermediate_size"])
        else:
            yield f"{at}.mlp.gate.weight", (experts, hidden), c.dtype
            yield f"{at}.mlp.gate.e_score_correction_bias", (experts,), "float32"
            for expert in range(experts):
                yield from mlp(c, f"{at}.mlp.experts.{expert}", c["moe_intermediate_size"])
            shared = c.number("n_shared_experts", 0)
            if shared:
                yield from mlp(c, f"{at}.mlp.shared_experts", shared * c["moe_intermediate_size"])
        if index >= layers:
            yield f"{at}.shared_head.norm.weight", (hidden,), c.dtype
            yield f"{at}.shared_head.head.weight", (c["vocab_size"], hidden), c.dtype

    return decoder(c, layer, extra)


def _latent_attention(c: Config, at: str) -> Iterator[Entry]:
    hidden, heads, bias = c["hidden_size"], c["num_attention_heads"], c.flag("attention_bias")
    query = heads * (c["qk_nope_head_dim"] + c["qk_rope_head_dim"])
    latent = c["kv_lora_rank"]
    if c.number("q_lora_rank", 0):
        yield from linear(f"{at}.q_a_proj", c["q_lora_rank"], hidden, c.dtype, bias)
        yield f"{at}.q_a_layernorm.weight", (c["q_lora_rank"],), c.dtype
        yield from linear(f"{at}.q_b_proj", query, c["q_lora_rank"], c.dtype)
    else:
        yield from linear(f"{at}.q_proj", query, hidden, c.dtype)
    yield from linear(f"{at}.kv_a_proj_with_mqa", latent + c["qk_rope_head_dim"], hidden, c.dtype, bias)
    yield f"{at}.kv_a_layernorm.weight", (latent,), c.dtype
    yield from linear(f"{at}.kv_b_proj", heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), latent, c.dtype)
    yield from linear(f"{at}.o_proj", hidden, heads * c["v_head_dim"], c.dtype, bias)


def _with_scales(c: Config, entries: Iterator[Entry]) -> Iterator[Entry]:
    """The same tensors as published in fp8: projections in float8, each followed by its scales."""
    for name, shape, dtype in entries:
        if not name.endswith(("_proj.weight", "_mqa.weight")) or ".eh_proj." in name:
            yield name, shape, dtype
            continue
        yield name, shape, "float8_e4m3fn"
        yield f"{name}_scale_inv", tuple(-(-n // _BLOCK) for n in shape), "float32"


def gpt_oss(c: Config) -> Iterator[Entry]:
    """GPT-OSS: stacked experts, gate and up columns interleaved; ``mxfp4`` gives the published 4-bit form."""
    experts, hidden, width = c["num_local_experts"], c["hidden_size"], c["intermediate_size"]
    mxfp4 = c.option("mxfp4", False)

    def matrix(name: str, rows: int, columns: int) -> Iterator[Entry]:
        if mxfp4:  # 32 values of 4 bits to a block, one scale each, the matrix transposed
            yield f"{name}_blocks", (experts, rows, columns // 32, 16), "uint8"
            yield f"{name}_scales", (experts, rows, columns // 32), "uint8"
        else:
            yield name, (experts, columns, rows), c.dtype
        yield f"{name}_bias", (experts, rows), c.dtype

    def layer(index: int, at: str) -> Iterator[Entry]:
        yield f"{at}.self_attn.sinks", (c["num_attention_heads"],), c.dtype
        bias = c.flag("attention_bias", True)
        yield from attention(c, f"{at}.self_attn", bias, bias)
        yield from linear(f"{at}.mlp.router", experts, hidden, c.dtype, True)
        yield from matrix(f"{at}.mlp.experts.gate_up_proj", 2 * width, hidden)
        yield from matrix(f"{at}.mlp.experts.down_proj", hidden, width)

    return decoder(c, layer)


GENERATORS = {"qwen3_moe": qwen3_moe, "deepseek_v3": deepseek_v3, "kimi_k2": deepseek_v3, "gpt_oss": gpt_oss}
