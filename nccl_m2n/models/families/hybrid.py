# SPDX-License-Identifier: Apache-2.0
"""State-space models, linear attention, and decoders that mix them with attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nccl_m2n.models.config import Config
from nccl_m2n.models.families.experts import Experts, granite_block, shared_width, sparse
from nccl_m2n.models.families.latent import latent_attention
from nccl_m2n.models.families.parts import Entry, Layer, Style, attention, decoder, head, linear, mlp

_QK = ("q_norm", "k_norm")


@dataclass(frozen=True)
class Mamba2:
    """The keys by which a family says the sizes of Mamba2's mixer."""

    heads: str = "mamba_n_heads"
    head_dim: str = "mamba_d_head"
    groups: str = "mamba_n_groups"
    state: str = "mamba_d_state"
    kernel: str = "mamba_d_conv"
    conv_bias: str = "mamba_conv_bias"
    bias: str = "mamba_proj_bias"

    def mixer(self, c: Config, at: str, norm: bool = True) -> Iterator[Entry]:
        """All of one layer's mixer."""
        heads, groups = c[self.heads], c[self.groups] * c[self.state]
        inner, hidden, bias = heads * c[self.head_dim], c["hidden_size"], c.flag(self.bias)
        yield from linear(f"{at}.in_proj", 2 * inner + 2 * groups + heads, hidden, c.dtype, bias)
        yield from _convolution(
            c, f"{at}.conv1d", inner + 2 * groups, c[self.kernel], c.flag(self.conv_bias, True)
        )
        yield from linear(f"{at}.out_proj", hidden, inner, c.dtype, bias)
        for name in ("A_log", "D", "dt_bias"):
            yield f"{at}.{name}", (heads,), c.dtype
        if norm:
            yield f"{at}.norm.weight", (inner,), c.dtype


def _convolution(c: Config, at: str, channels: int, kernel: int, bias: bool) -> Iterator[Entry]:
    yield f"{at}.weight", (channels, 1, kernel), c.dtype
    if bias:
        yield f"{at}.bias", (channels,), c.dtype


def mamba1(c: Config, at: str, inner: int, state: int, rank: int, kernel: int, bias: bool) -> Iterator[Entry]:
    """Mamba's mixer."""
    hidden = c["hidden_size"]
    yield from linear(f"{at}.in_proj", 2 * inner, hidden, c.dtype, bias)
    yield from _convolution(c, f"{at}.conv1d", inner, kernel, True)
    yield from linear(f"{at}.x_proj", rank + 2 * state, inner, c.dtype)
    yield from linear(f"{at}.dt_proj", inner, rank, c.dtype, True)
    yield f"{at}.A_log", (inner, state), c.dtype
    yield f"{at}.D", (inner,), c.dtype
    yield from linear(f"{at}.out_proj", hidden, inner, c.dtype, bias)


def gated_delta(c: Config, at: str, packed: bool) -> Iterator[Entry]:
    """Gated delta networks; `packed` by key head, as Qwen3-Next has them."""
    hidden, heads = c["hidden_size"], c["linear_num_value_heads"]
    keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    values = heads * c["linear_value_head_dim"]
    if packed:
        yield from linear(f"{at}.in_proj_qkvz", 2 * keys + 2 * values, hidden, c.dtype)
        yield from linear(f"{at}.in_proj_ba", 2 * heads, hidden, c.dtype)
    else:
        yield from linear(f"{at}.in_proj_qkv", 2 * keys + values, hidden, c.dtype)
        yield from linear(f"{at}.in_proj_z", values, hidden, c.dtype)
        yield from linear(f"{at}.in_proj_b", heads, hidden, c.dtype)
        yield from linear(f"{at}.in_proj_a", heads, hidden, c.dtype)
    yield from _convolution(c, f"{at}.conv1d", 2 * keys + values, c["linear_conv_kernel_dim"], False)
    yield f"{at}.A_log", (heads,), c.dtype
    yield f"{at}.dt_bias", (heads,), c.dtype
    yield f"{at}.norm.weight", (c["linear_value_head_dim"],), c.dtype
    yield from linear(f"{at}.out_proj", hidden, values, c.dtype)


def qwen3_next(packed: bool) -> Callable[[Config], Iterator[Entry]]:
    """Qwen3-Next and Qwen3.5: three layers of linear attention, one of gated attention."""
    style = Style(head_norms=_QK, mlp_bias=False)
    experts = Experts(shared="shared_expert", gate="shared_expert_gate")

    def family(c: Config) -> Iterator[Entry]:
        kinds, every = c.names("layer_types"), c.number("full_attention_interval", 4) or 4

        def layer(index: int, at: str) -> Iterator[Entry]:
            kind = kinds[index] if index < len(kinds) else "" if (index + 1) % every else "full_attention"
            if kind == "full_attention":
                yield from attention(c, f"{at}.self_attn", style, wide=2)
            else:
                yield from gated_delta(c, f"{at}.linear_attn", packed)
            if sparse(c, index):
                yield from experts.block(c, at, shared_width(c))
            else:
                yield from mlp(c, f"{at}.mlp", c["intermediate_size"])

        return decoder(c, layer, style)

    return family


_FORWARD = Style(norms=("input_layernorm", "pre_ff_layernorm"), final="final_layernorm")


def bamba(c: Config) -> Iterator[Entry]:
    """Bamba: attention in some layers, Mamba2 in the others."""
    own = c.numbers("attn_layer_indices")

    def layer(index: int, at: str) -> Iterator[Entry]:
        if index in own:
            yield from attention(c, f"{at}.self_attn", _FORWARD)
        else:
            yield from Mamba2().mixer(c, f"{at}.mamba")
        yield from mlp(c, f"{at}.feed_forward", c["intermediate_size"], _FORWARD)

    return decoder(c, layer, _FORWARD)


def falcon_h1(c: Config) -> Iterator[Entry]:
    """Falcon-H1: attention and Mamba2 beside each other in every layer."""

    def layer(index: int, at: str) -> Iterator[Entry]:
        yield from attention(c, f"{at}.self_attn", _FORWARD)
        yield from Mamba2().mixer(c, f"{at}.mamba", c.flag("mamba_rms_norm"))
        yield from mlp(c, f"{at}.feed_forward", c["intermediate_size"], _FORWARD)

    return decoder(c, layer, _FORWARD)


def granite_hybrid(c: Config) -> Iterator[Entry]:
    """Granite 4: attention in some layers, Mamba2 in the others, Granite's experts."""
    kinds = c.names("layer_types") or c.names("layers_block_type")

    def layer(index: int, at: str) -> Iterator[Entry]:
        if index < len(kinds) and kinds[index] in ("attention", "full_attention"):
            yield from attention(c, f"{at}.self_attn", Style())
        else:
            yield from Mamba2().mixer(c, f"{at}.mamba")
        yield from granite_block(c, at)

    return decoder(c, layer)


def jamba(c: Config) -> Iterator[Entry]:
    """Jamba: attention and experts in some layers, by period and offset; Mamba with norms in the others."""
    inner, rank, state = c["mamba_expand"] * c["hidden_size"], c["mamba_dt_rank"], c["mamba_d_state"]
    style = Style(bias=False, mlp_bias=False, norms=_FORWARD.norms, final=_FORWARD.final)
    experts = Experts("feed_forward", router="router", width="intermediate_size")

    def layer(index: int, at: str) -> Iterator[Entry]:
        if index % c["attn_layer_period"] == c.number("attn_layer_offset"):
            yield from attention(c, f"{at}.self_attn", style)
        else:
            bias = c.flag("mamba_proj_bias")
            yield from mamba1(c, f"{at}.mamba", inner, state, rank, c["mamba_d_conv"], bias)
            for name, size in (("dt", rank), ("b", state), ("c", state)):
                yield f"{at}.mamba.{name}_layernorm.weight", (size,), c.dtype
        if index % c["expert_layer_period"] == c.number("expert_layer_offset") and c["num_experts"] > 1:
            yield from experts.block(c, at, 0)
        else:
            yield from mlp(c, f"{at}.feed_forward", c["intermediate_size"], style)

    return decoder(c, layer, style)


def _backbone(c: Config, layers: int, layer: Layer) -> Iterator[Entry]:
    """The names that Mamba's first models have."""
    hidden = c["hidden_size"]
    yield "backbone.embeddings.weight", (c["vocab_size"], hidden), c.dtype
    for index in range(layers):
        yield from layer(index, f"backbone.layers.{index}.mixer")
        yield f"backbone.layers.{index}.norm.weight", (hidden,), c.dtype
    yield "backbone.norm_f.weight", (hidden,), c.dtype
    yield from head(c, Style(tied=True))


_MIXER = Mamba2("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel", "use_conv_bias", "use_bias")


def mamba2(c: Config) -> Iterator[Entry]:
    """Mamba2 alone."""
    return _backbone(c, c["num_hidden_layers"], lambda index, at: _MIXER.mixer(c, at))


def mamba(c: Config) -> Iterator[Entry]:
    """Mamba alone."""
    inner = c["expand"] * c["hidden_size"] if "expand" in c else c["intermediate_size"]

    def layer(index: int, at: str) -> Iterator[Entry]:
        sizes = c["state_size"], c["time_step_rank"], c["conv_kernel"]
        return mamba1(c, at, inner, *sizes, c.flag("use_bias"))

    return _backbone(c, c["num_hidden_layers"], layer)


def nemotron_h(c: Config) -> Iterator[Entry]:
    """Nemotron-H and Nemotron 3: one block a layer: Mamba2, attention, experts or a feed-forward block."""
    kinds = c.names("layers_block_type")
    if not kinds:  # as published: a letter a layer
        letters = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}
        kinds = tuple(letters.get(letter, letter) for letter in str(c.get("hybrid_override_pattern", "")))
    keys = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel", "use_conv_bias")
    style = Style(mlp_bias="mlp_bias", up=("up_proj",))
    experts = Experts(
        "mixer", correction="gate.e_score_correction_bias", shared="shared_experts", style=style
    )
    shared = c.number("moe_shared_expert_intermediate_size", 0) * c.number("n_shared_experts", 1)

    def layer(index: int, at: str) -> Iterator[Entry]:
        kind = kinds[index]
        if kind in ("attention", "full_attention"):
            return attention(c, at, style)
        if kind == "moe":
            return experts.block(c, at.removesuffix(".mixer"), shared)
        if kind == "mlp":
            return mlp(c, at, c["intermediate_size"], style)
        return Mamba2(*keys, "use_bias").mixer(c, at)

    return _backbone(c, len(kinds), layer)


def lfm2(c: Config) -> Iterator[Entry]:
    """LFM2: short convolutions, attention in some layers, experts after the first ones."""
    style = Style(
        bias=False, mlp_bias=False, output="out_proj", up=("w1", "w3"), down="w2", tied=True,
        norms=("operator_norm", "ffn_norm"), final="embedding_norm", head_norms=("q_layernorm", "k_layernorm"),
    )  # fmt: skip
    hidden, kinds, bias = c["hidden_size"], c.names("layer_types"), c.flag("conv_bias")
    experts = Experts("feed_forward", correction="expert_bias", style=style)
    width = c["intermediate_size"]
    if c.flag("block_auto_adjust_ff_dim"):
        multiple = c["block_multiple_of"]
        width = (
            -(-int(float(str(c.get("block_ffn_dim_multiplier", 1.0))) * (2 * width // 3)) // multiple)
            * multiple
        )

    def layer(index: int, at: str) -> Iterator[Entry]:
        if kinds[index] == "full_attention":
            yield from attention(c, f"{at}.self_attn", style)
        else:
            yield from _convolution(c, f"{at}.conv.conv", hidden, c.number("conv_L_cache", 3), bias)
            yield from linear(f"{at}.conv.in_proj", 3 * hidden, hidden, c.dtype, bias)
            yield from linear(f"{at}.conv.out_proj", hidden, hidden, c.dtype, bias)
        if sparse(c, index):
            yield from experts.block(c, at, 0)
        else:
            yield from mlp(c, f"{at}.feed_forward", width, style)

    if len(kinds) < c["num_hidden_layers"]:
        raise c.error("layer_types", kinds, "one for each layer")
    return decoder(c, layer, style)


def kimi_linear(c: Config) -> Iterator[Entry]:
    """Kimi-Linear: delta attention in three layers of four, latent attention in the fourth."""
    heads, rows, hidden = c["linear_num_heads"], c["linear_head_dim"], c["hidden_size"]
    kinds, inner = c.names("layer_types"), heads * rows
    w123 = Style(mlp_bias=False, up=("w1", "w3"), down="w2")
    experts = Experts(
        "block_sparse_moe", correction="gate.e_score_correction_bias", shared="shared_experts", style=w123
    )

    def delta(at: str) -> Iterator[Entry]:
        for part in "qkv":
            yield from linear(f"{at}.{part}_proj", inner, hidden, c.dtype)
            yield from _convolution(c, f"{at}.{part}_conv1d", inner, c["linear_conv_kernel_dim"], False)
        for part in "fg":
            yield from linear(f"{at}.{part}_a_proj", rows, hidden, c.dtype)
            yield from linear(f"{at}.{part}_b_proj", inner, rows, c.dtype)
        yield from linear(f"{at}.b_proj", heads, hidden, c.dtype)
        yield f"{at}.A_log", (1, 1, heads, 1), "float32"
        yield f"{at}.dt_bias", (inner,), "float32"
        yield f"{at}.o_norm.weight", (rows,), c.dtype
        yield from linear(f"{at}.o_proj", hidden, inner, c.dtype)

    def layer(index: int, at: str) -> Iterator[Entry]:
        full = index < len(kinds) and kinds[index] == "full_attention"
        yield from latent_attention(c, f"{at}.self_attn") if full else delta(f"{at}.self_attn")
        if sparse(c, index):
            yield from experts.block(c, at, 0)
            if shared_width(c):
                yield from mlp(c, f"{at}.block_sparse_moe.shared_experts", shared_width(c))
        else:
            yield from mlp(c, f"{at}.block_sparse_moe", c["intermediate_size"])

    return decoder(c, layer)


GENERATORS: dict[str, Callable[[Config], Iterator[Entry]]] = {
    "qwen3_next": qwen3_next(packed=True),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), qwen3_next(packed=False)),
    "bamba": bamba,
    "falcon_h1": falcon_h1,
    "granitemoehybrid": granite_hybrid,
    "jamba": jamba,
    "mamba": mamba,
    "mamba2": mamba2,
    "nemotron_h": nemotron_h,
    **dict.fromkeys(("lfm2", "lfm2_moe"), lfm2),
    "kimi_linear": kimi_linear,
}
