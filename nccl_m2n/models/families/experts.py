# SPDX-License-Identifier: Apache-2.0
"""Decoders with experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nccl_m2n.models.config import Config
from nccl_m2n.models.families.dense import OLMO2, PLAIN, QWEN2, QWEN3
from nccl_m2n.models.families.parts import Entry, Style, attention, decoder, linear, mlp

_QK = ("q_norm", "k_norm")
_W123 = Style(mlp_bias=False, up=("w1", "w3"), down="w2")


@dataclass(frozen=True)
class Experts:
    """How a family names its experts and what is beside them.

    Args:
        at: The block.
        router: The router's matrix.
        correction: A router's correction of scores, in the block; empty for none.
        shared: Experts that every token visits; empty for none.
        gate: The gate of the shared one; empty for none.
        width: The key of an expert's width.
        style: Names of an expert's matrices.
        correction_shape: Dimensions before the experts' own.
    """

    at: str = "mlp"
    router: str = "gate"
    correction: str = ""
    shared: str = ""
    gate: str = ""
    width: str = "moe_intermediate_size"
    style: Style | None = None
    correction_shape: tuple[int, ...] = ()

    def block(self, c: Config, at: str, shared: int) -> Iterator[Entry]:
        """All of one layer, below `at`."""
        experts, hidden, here = c["num_experts"], c["hidden_size"], f"{at}.{self.at}"
        yield from linear(f"{here}.{self.router}", experts, hidden, c.dtype)
        if self.correction:
            yield f"{here}.{self.correction}", (*self.correction_shape, experts), "float32"
        for expert in range(experts):
            yield from mlp(c, f"{here}.experts.{expert}", c[self.width], self.style)
        if self.shared and shared:
            yield from mlp(
                c,
                f"{here}.{self.shared}",
                shared,
                self.style if self.style and not self.style.up[1:] else None,
            )
        if self.gate:
            yield from linear(f"{here}.{self.gate}", 1, hidden, c.dtype)


def sparse(c: Config, index: int) -> bool:
    """Whether a layer has experts, by whichever key the configuration says it with."""
    kinds = c.names("mlp_layer_types")
    if kinds:
        return index < len(kinds) and kinds[index] == "sparse"
    first = c.number(
        "first_k_dense_replace", c.number("num_dense_layers", c.number("moe_layer_start_index", 0))
    )
    last = c.number("moe_layer_end_index", index)
    if (
        index < first
        or index > last
        or index in c.numbers("mlp_only_layers")
        or not c.number("num_experts", 0)
    ):
        return False
    if (index + 1) % max(1, c.number("decoder_sparse_step", c.number("moe_layer_interval", 1))):
        return False
    return not index % max(1, c.number("moe_layer_freq", 1))


def shared_width(c: Config) -> int:
    """Width of the block of shared experts; 0 for none."""
    if "shared_expert_intermediate_size" in c:
        return c.number("shared_expert_intermediate_size")
    keys = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")
    count = next((c.number(key) for key in keys if key in c), 0)
    return count * c.number("moe_intermediate_size", 0)


def moe(
    s: Style, e: Experts, extra: Callable[[Config, str], Iterator[Entry]] | None = None
) -> Callable[[Config], Iterator[Entry]]:
    """The generator of a family whose layers are attention and experts, or a feed-forward block."""

    def family(c: Config) -> Iterator[Entry]:
        def layer(index: int, at: str) -> Iterator[Entry]:
            yield from attention(c, f"{at}.self_attn", s)
            if extra is not None:
                yield from extra(c, at)
            if sparse(c, index):
                yield from e.block(c, at, shared_width(c))
            else:
                yield from mlp(c, f"{at}.mlp", c["intermediate_size"], s)

        return decoder(c, layer, s)

    return family


def glm4_moe(c: Config) -> Iterator[Entry]:
    """GLM-4.5 and 4.6: biases, and norms of query and key where the configuration says so."""
    norms = _QK if c.flag("use_qk_norm") else ()
    style = Style(output_bias=False, mlp_bias=False, head_norms=norms)
    return moe(style, Experts(correction="gate.e_score_correction_bias", shared="shared_experts"))(c)


def phimoe(c: Config) -> Iterator[Entry]:
    """Phi-3.5-MoE."""
    style = Style(head_bias="lm_head_bias", norm_bias=True)
    return moe(style, Experts("block_sparse_moe", style=_W123, width="intermediate_size"))(c)


def granite_moe(c: Config) -> Iterator[Entry]:
    """Granite: stacked experts, and a block that every token visits."""

    def layer(index: int, at: str) -> Iterator[Entry]:
        yield from attention(c, f"{at}.self_attn", Style())
        yield from granite_block(c, at)

    return decoder(c, layer)


def granite_block(c: Config, at: str) -> Iterator[Entry]:
    """Granite's experts and shared block of one layer."""
    experts, hidden, width = c.number("num_experts", 0), c["hidden_size"], c["intermediate_size"]
    if experts:
        here = f"{at}.block_sparse_moe"
        yield f"{here}.input_linear.weight", (experts, 2 * width, hidden), c.dtype
        yield f"{here}.output_linear.weight", (experts, hidden, width), c.dtype
        yield from linear(f"{here}.router.layer", experts, hidden, c.dtype)
    shared = c.number("shared_intermediate_size", 0)
    if shared:
        yield from linear(f"{at}.shared_mlp.input_linear", 2 * shared, hidden, c.dtype)
        yield from linear(f"{at}.shared_mlp.output_linear", hidden, shared, c.dtype)


def llama4(c: Config) -> Iterator[Entry]:
    """Llama 4, text: stacked experts as (in, out), every layer or every other."""
    hidden, width, experts = c["hidden_size"], c["intermediate_size"], c["num_experts"]
    step = c.number("interleave_moe_layer_step", 1) or 1
    layers = c.numbers("moe_layers") or tuple(range(step - 1, c["num_hidden_layers"], step))

    def layer(index: int, at: str) -> Iterator[Entry]:
        yield from attention(c, f"{at}.self_attn", Style())
        if index not in layers:
            yield from mlp(c, f"{at}.feed_forward", c["intermediate_size_mlp"])
            return
        yield f"{at}.feed_forward.experts.gate_up_proj", (experts, hidden, 2 * width), c.dtype
        yield f"{at}.feed_forward.experts.down_proj", (experts, width, hidden), c.dtype
        yield from linear(f"{at}.feed_forward.router", experts, hidden, c.dtype)
        yield from mlp(c, f"{at}.feed_forward.shared_expert", width)

    return decoder(c, layer)


def afmoe(c: Config) -> Iterator[Entry]:
    """AFMoE: gated attention, four norms a layer."""
    norms = ("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm")
    style = Style(head_norms=_QK, mlp_bias=False, norms=norms)

    def gate(c: Config, at: str) -> Iterator[Entry]:
        yield from linear(f"{at}.self_attn.gate_proj", c.heads * c.head_dim, c["hidden_size"], c.dtype)

    experts = Experts(router="router.gate", correction="expert_bias", shared="shared_experts")
    return moe(style, experts, gate)(c)


def gpt_oss(c: Config) -> Iterator[Entry]:
    """GPT-OSS: stacked experts, gate and up columns interleaved; ``mxfp4`` gives the published 4-bit form."""
    experts, hidden, width = c["num_experts"], c["hidden_size"], c["intermediate_size"]
    mxfp4, bias = (
        c.option("mxfp4", c.quantization.get("quant_method") == "mxfp4"),
        c.flag("attention_bias", True),
    )

    def matrix(name: str, rows: int, columns: int) -> Iterator[Entry]:
        if mxfp4:  # 32 values of 4 bits to a block, one scale each, the matrix transposed
            yield f"{name}_blocks", (experts, rows, columns // 32, 16), "uint8"
            yield f"{name}_scales", (experts, rows, columns // 32), "uint8"
        else:
            yield name, (experts, columns, rows), c.dtype
        yield f"{name}_bias", (experts, rows), c.dtype

    def layer(index: int, at: str) -> Iterator[Entry]:
        yield f"{at}.self_attn.sinks", (c["num_attention_heads"],), c.dtype
        yield from attention(c, f"{at}.self_attn", Style(bias=bias))
        yield from linear(f"{at}.mlp.router", experts, hidden, c.dtype, True)
        yield from matrix(f"{at}.mlp.experts.gate_up_proj", 2 * width, hidden)
        yield from matrix(f"{at}.mlp.experts.down_proj", hidden, width)

    return decoder(c, layer)


_CORRECTED = Experts(correction="gate.e_score_correction_bias", shared="shared_experts")
_SPARSE = Experts("block_sparse_moe", style=_W123, width="intermediate_size")
GENERATORS: dict[str, Callable[[Config], Iterator[Entry]]] = {
    "qwen2_moe": moe(QWEN2, Experts(shared="shared_expert", gate="shared_expert_gate")),
    "qwen3_moe": moe(QWEN3, Experts()),
    "mixtral": moe(PLAIN, _SPARSE),
    "phimoe": phimoe,
    "minimax_m2": moe(
        Style(bias=False, all_norms=_QK),
        Experts(
            "block_sparse_moe", correction="e_score_correction_bias", style=_W123, width="intermediate_size"
        ),
    ),
    "olmoe": moe(Style(mlp_bias=False, all_norms=_QK), Experts(width="intermediate_size")),
    "flex_olmo": moe(OLMO2, Experts(width="intermediate_size")),
    "glm4_moe": glm4_moe,
    "solar_open": glm4_moe,
    "dots1": moe(QWEN3, _CORRECTED),
    "exaone_moe": moe(
        Style(bias=False, mlp_bias=False, head_norms=_QK),
        Experts(correction="e_score_correction_bias", shared="shared_experts"),
    ),
    "ernie4_5_moe": moe(
        Style(bias="use_bias", mlp_bias="use_bias", tied=True),
        Experts(
            correction="moe_statics.e_score_correction_bias", correction_shape=(1,), shared="shared_experts"
        ),
    ),
    **dict.fromkeys(("granitemoe", "granitemoeshared"), granite_moe),
    "llama4_text": llama4,
    "afmoe": afmoe,
    "gpt_oss": gpt_oss,
}
