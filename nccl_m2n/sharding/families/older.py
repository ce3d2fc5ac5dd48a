# SPDX-License-Identifier: Apache-2.0
"""Rules of encoders, and of decoders from before Llama: fused query, key and value, and other names."""

from __future__ import annotations

from nccl_m2n.sharding.families.parts import QUERY, Rules, attention, column, ends, mlp, norms, row, whole
from nccl_m2n.sharding.rules import Rule

_H = "transformer.h.{layer}."
_H_ENDS: Rules = ends("transformer.wte.weight", "transformer.ln_f.*") + whole(
    "transformer.", "wpe.weight", stage="first"
)

# GPT-2 keeps its matrices as (in, out).
GPT2: Rules = (
    Rule(f"{_H}attn.c_attn.weight", tp=1, segments=3, **QUERY),
    Rule(f"{_H}attn.c_attn.bias", tp=0, segments=3, **QUERY),
    Rule(f"{_H}attn.c_proj.weight", tp=0, **QUERY),
    Rule(f"{_H}mlp.c_fc.weight", tp=1),
    Rule(f"{_H}mlp.c_fc.bias", tp=0),
    Rule(f"{_H}mlp.c_proj.weight", tp=0),
    *whole(_H, "attn.c_proj.bias", "mlp.c_proj.bias"),
    *whole(_H, "ln_[12].weight", "ln_[12].bias"),
    *_H_ENDS,
)
GPT_BIGCODE: Rules = (
    *column(
        f"{_H}attn.", "c_attn", segments=("num_attention_heads * head_dim", "1 * head_dim", "1 * head_dim")
    ),
    *row(f"{_H}attn.", "c_proj", **QUERY),
    *mlp(f"{_H}mlp.", ("c_fc",), "c_proj"),
    *whole(_H, "ln_[12].weight", "ln_[12].bias"),
    *_H_ENDS,
)
GPTJ: Rules = (
    *attention(f"{_H}attn.", "out_proj"),
    *mlp(f"{_H}mlp.", ("fc_in",), "fc_out"),
    *whole(_H, "ln_1.weight", "ln_1.bias"),
    *_H_ENDS,
)


def interleaved(at: str) -> Rules:
    """Query, key and value of one head after those of the other, so that a plain cut by heads keeps them."""
    return (
        *column(at, "query_key_value", **QUERY),
        *row(at, "dense", **QUERY),
    )


def four_h(at: str) -> Rules:
    """Two matrices with Megatron's first names."""
    return mlp(at, ("dense_h_to_4h",), "dense_4h_to_h")


BLOOM: Rules = (
    *interleaved(f"{_H}self_attention."),
    *four_h(f"{_H}mlp."),
    *norms(_H),
    *ends("transformer.word_embeddings.weight", "transformer.ln_f.*"),
    *whole("transformer.", "word_embeddings_layernorm.*", stage="first"),
)
_NEOX = "gpt_neox.layers.{layer}."
GPT_NEOX: Rules = (
    *interleaved(f"{_NEOX}attention."),
    *four_h(f"{_NEOX}mlp."),
    *norms(_NEOX),
    *ends("gpt_neox.embed_in.weight", "gpt_neox.final_layer_norm.*", "embed_out"),
)
_PERSIMMON = "model.layers.{layer}."
PERSIMMON: Rules = (
    *interleaved(f"{_PERSIMMON}self_attn."),
    *four_h(f"{_PERSIMMON}mlp."),
    *norms(_PERSIMMON),
    *ends(norm="model.final_layernorm.*"),
)
_OPT = "model.decoder.layers.{layer}."
OPT: Rules = (
    *attention(f"{_OPT}self_attn.", "out_proj"),
    *mlp(_OPT, ("fc1",), "fc2"),
    *norms(_OPT),
    *whole("model.decoder.", "embed_positions.weight", "project_in.weight", stage="first"),
    *whole("model.decoder.", "project_out.weight", stage="last"),
    *ends("model.decoder.embed_tokens.weight", "model.decoder.final_layer_norm.*"),
)
_MPT = "transformer.blocks.{layer}."
MPT: Rules = (
    *column(f"{_MPT}attn.", "Wqkv", segments=3, **QUERY),
    *row(f"{_MPT}attn.", "out_proj", **QUERY),
    *mlp(f"{_MPT}ffn.", ("up_proj",)),
    *norms(_MPT),
    *ends("transformer.wte.weight", "transformer.norm_f.*"),
)


def bert(at: str = "*") -> Rules:
    """BERT and RoBERTa, with or without a prefix."""
    layer = f"{at}encoder.layer.{{layer}}."
    return (
        *column(f"{layer}attention.self.", "query", "key", "value", **QUERY),
        *row(f"{layer}attention.output.", "dense", **QUERY),
        *mlp(layer, ("intermediate.dense",), "output.dense"),
        *whole(layer, "*LayerNorm.weight", "*LayerNorm.bias"),
        Rule(f"{at}embeddings.word_embeddings.weight", tp=0, padded=True, stage="first"),
        *whole(at, "embeddings.*", stage="first"),
        *whole(at, "pooler.*", "cls.*", "lm_head.dense.*", "lm_head.layer_norm.*", stage="last"),
        *(Rule(f"lm_head.{kind}", tp=0, padded=True, stage="last") for kind in ("bias", "decoder.*")),
    )


_DISTIL = "*transformer.layer.{layer}."
DISTILBERT: Rules = (
    *column(f"{_DISTIL}attention.", "[qkv]_lin", **QUERY),
    *row(f"{_DISTIL}attention.", "out_lin", **QUERY),
    *mlp(f"{_DISTIL}ffn.", ("lin1",), "lin2"),
    *norms(_DISTIL),
    Rule("*embeddings.word_embeddings.weight", tp=0, padded=True, stage="first"),
    *whole("*", "embeddings.*", stage="first"),
    *whole("", "vocab_*", "pre_classifier.*", "classifier.*", stage="last"),
)
_MODERN = "*layers.{layer}."
MODERNBERT: Rules = (
    *column(f"{_MODERN}attn.", "Wqkv", segments=3, **QUERY),
    *row(f"{_MODERN}attn.", "Wo", **QUERY),
    *column(f"{_MODERN}mlp.", "Wi", segments=2),
    *row(f"{_MODERN}mlp.", "Wo"),
    *norms(_MODERN),
    Rule("*embeddings.tok_embeddings.weight", tp=0, padded=True, stage="first"),
    *norms("*embeddings.", stage="first"),
    *whole("*", "final_norm.weight", stage="last"),
    *whole("", "head.*", "decoder.*", "classifier.*", stage="last"),
)

RULES: dict[str, Rules] = {
    "gpt2": GPT2,
    "gpt_bigcode": GPT_BIGCODE,
    "gptj": GPTJ,
    "bloom": BLOOM,
    "gpt_neox": GPT_NEOX,
    "persimmon": PERSIMMON,
    "opt": OPT,
    "mpt": MPT,
    **dict.fromkeys(("bert", "roberta"), bert()),
    "distilbert": DISTILBERT,
    "modernbert": MODERNBERT,
}
