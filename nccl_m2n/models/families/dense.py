# SPDX-License-Identifier: Apache-2.0
"""Decoders without experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from nccl_m2n.models.config import Config
from nccl_m2n.models.families.parts import FUSED, Entry, Style, attention, decoder, linear, mlp, plain

_QK = ("q_norm", "k_norm")
_GEMMA_NORMS = (
    *("input_layernorm", "post_attention_layernorm"),
    *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
)
_AFTER = ("post_attention_layernorm", "post_feedforward_layernorm")
LLAMA = Style()
PLAIN = Style(bias=False, mlp_bias=False)
QWEN2 = Style(bias=True, output_bias=False, mlp_bias=False)
QWEN3 = Style(head_norms=_QK, mlp_bias=False)
GEMMA = Style(mlp_bias=False, tied=True)
GEMMA2 = replace(GEMMA, norms=_GEMMA_NORMS)
GEMMA3 = replace(GEMMA2, head_norms=_QK)
OLMO2 = Style(mlp_bias=False, norms=_AFTER, all_norms=_QK)
GLM = Style(output_bias=False, mlp_bias=False, up=(FUSED,))
COHERE = Style(mlp_bias=False, norms=("input_layernorm",), tied=True)
PHI = Style(
    bias=True, mlp_bias=True, head_bias=True, norm_bias=True, output="dense", up=("fc1",), down="fc2",
    norms=("input_layernorm",), final="final_layernorm",
)  # fmt: skip


def stablelm(c: Config) -> Iterator[Entry]:
    """StableLM: one norm a layer where it computes both blocks at once."""
    norms = ("input_layernorm",) if c.flag("use_parallel_residual") else LLAMA.norms
    return plain(Style(bias="use_qkv_bias", output_bias=False, mlp_bias=False, norm_bias=True, norms=norms))(
        c
    )


def bitnet(c: Config) -> Iterator[Entry]:
    """BitNet: norms within its blocks."""

    def layer(index: int, at: str) -> Iterator[Entry]:
        yield from attention(c, f"{at}.self_attn", LLAMA)
        yield from mlp(c, f"{at}.mlp", c["intermediate_size"])
        yield f"{at}.self_attn.attn_sub_norm.weight", (c["hidden_size"],), c.dtype
        yield f"{at}.mlp.ffn_sub_norm.weight", (c["intermediate_size"],), c.dtype

    return decoder(c, layer)


def apertus(c: Config) -> Iterator[Entry]:
    """Apertus: an activation with numbers of its own."""
    style = Style(
        mlp_bias=False,
        up=("up_proj",),
        norms=("attention_layernorm", "feedforward_layernorm"),
        head_norms=_QK,
    )

    def layer(index: int, at: str) -> Iterator[Entry]:
        yield from attention(c, f"{at}.self_attn", style)
        yield from mlp(c, f"{at}.mlp", c["intermediate_size"], style)
        for name, shape in (("alpha_n", (1,)), ("alpha_p", (1,)), ("beta", ()), ("eps", ())):
            yield f"{at}.mlp.act_fn.{name}", shape, c.dtype

    return decoder(c, layer, style)


def diffllama(c: Config) -> Iterator[Entry]:
    """DiffLlama: what weighs the difference of two attentions."""

    def layer(index: int, at: str) -> Iterator[Entry]:
        yield from attention(c, f"{at}.self_attn", LLAMA)
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            yield f"{at}.self_attn.{name}", (c.head_dim,), c.dtype
        yield from mlp(c, f"{at}.mlp", c["intermediate_size"])

    return decoder(c, layer)


def gemma4(c: Config) -> Iterator[Entry]:
    """Gemma 4, text: an input of each layer's own, where there is one."""
    own, layers, hidden = c.number("hidden_size_per_layer_input", 0), c["num_hidden_layers"], c["hidden_size"]
    style = GEMMA3 if not own else replace(GEMMA3, norms=(*_GEMMA_NORMS, "post_per_layer_input_norm"))

    def layer(index: int, at: str) -> Iterator[Entry]:
        yield from attention(c.of_layer(index), f"{at}.self_attn", style)
        yield from mlp(c, f"{at}.mlp", c["intermediate_size"], style)
        yield f"{at}.layer_scalar", (1,), c.dtype
        if own:
            yield from linear(f"{at}.per_layer_input_gate", own, hidden, c.dtype)
            yield from linear(f"{at}.per_layer_projection", hidden, own, c.dtype)

    yield from decoder(c, layer, style)
    if own:
        yield "model.embed_tokens_per_layer.weight", (c["vocab_size_per_layer_input"], layers * own), c.dtype
        yield from linear("model.per_layer_model_projection", layers * own, hidden, c.dtype)
        yield "model.per_layer_projection_norm.weight", (own,), c.dtype


GENERATORS: dict[str, Callable[[Config], Iterator[Entry]]] = {
    **dict.fromkeys(("llama", "granite", "internlm3"), plain(LLAMA)),
    **dict.fromkeys(("mistral", "ministral", "ministral3"), plain(PLAIN)),
    "arcee": plain(Style(up=("up_proj",))),
    "cwm": plain(Style(bias=False)),
    "helium": plain(Style(output_bias=False)),
    "nemotron": plain(Style(up=("up_proj",), norm_bias=True)),
    "seed_oss": plain(Style(output_bias="attention_out_bias")),
    "smollm3": plain(Style(tied=True)),
    "ernie4_5": plain(Style(bias="use_bias", mlp_bias="use_bias", tied=True)),
    "hunyuan_v1_dense": plain(Style(mlp_bias=False, head_norms=("query_layernorm", "key_layernorm"))),
    "exaone4": plain(Style(bias=False, mlp_bias=False, norms=_AFTER, head_norms=_QK)),
    "qwen2": plain(QWEN2),
    "qwen3": plain(QWEN3),
    "gemma": plain(GEMMA),
    "gemma2": plain(GEMMA2),
    "gemma3_text": plain(GEMMA3),
    "gemma4_text": gemma4,
    "olmo": plain(Style(mlp_bias=False, norms=(), final="")),
    **dict.fromkeys(("olmo2", "olmo3"), plain(OLMO2)),
    **dict.fromkeys(("cohere", "cohere2"), plain(COHERE)),
    "stablelm": stablelm,
    "glm": plain(GLM),
    "glm4": plain(replace(GLM, norms=(*LLAMA.norms, "post_self_attn_layernorm", "post_mlp_layernorm"))),
    "phi3": plain(Style(bias=False, mlp_bias=False, qkv="qkv_proj", up=(FUSED,))),
    "phi": plain(PHI),
    "starcoder2": plain(
        Style(bias="use_bias", mlp_bias="use_bias", norm_bias=True, up=("c_fc",), down="c_proj", tied=True)
    ),
    "bitnet": bitnet,
    "apertus": apertus,
    "diffllama": diffllama,
}
