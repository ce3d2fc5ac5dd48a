# SPDX-License-Identifier: Apache-2.0
"""Rules of decoders without experts."""

from __future__ import annotations

from nccl_m2n.sharding.families.parts import (
    KEY_VALUE,
    LAYER,
    QUERY,
    Rules,
    attention,
    column,
    ends,
    mlp,
    norms,
    row,
    whole,
)
from nccl_m2n.sharding.rules import Rule

_ATTENTION = f"{LAYER}self_attn."
# Llama, Mistral, Qwen and all that have their names: where norms stand makes no difference.
DENSE: Rules = attention() + mlp() + norms() + ends()

_HEAD_ROWS = ("num_attention_heads * head_dim", *["num_key_value_heads * head_dim"] * 2)
_GATE_UP = column(f"{LAYER}mlp.", "gate_up_proj", segments=2)
PHI3: Rules = (
    *column(_ATTENTION, "qkv_proj", segments=_HEAD_ROWS),
    *_GATE_UP,
    *DENSE,
)
PHI: Rules = (
    *row(_ATTENTION, "dense", **QUERY),
    *mlp(up=("fc1",), down="fc2"),
    *ends(norm="model.final_layernorm.*"),
    *DENSE,
)
STARCODER2: Rules = mlp(up=("c_fc",), down="c_proj") + DENSE
COHERE: Rules = (  # norms of queries and keys with one row a head
    Rule(f"{_ATTENTION}q_norm.weight", tp=0, shape=(None, None), **QUERY),
    Rule(f"{_ATTENTION}k_norm.weight", tp=0, shape=(None, None), **KEY_VALUE),
    *DENSE,
)
APERTUS: Rules = whole(f"{LAYER}mlp.act_fn.", "*") + DENSE
DIFFLLAMA: Rules = whole(_ATTENTION, "lambda_*", shape=(None,)) + DENSE
GEMMA4: Rules = (
    # vLLM gathers what the projection of all layers' inputs gives, and has the layers' own on every rank
    Rule("{text}embed_tokens_per_layer.weight", tp=0, padded=True, stage="first"),
    *column("{text}", "per_layer_model_projection", stage="all"),
    Rule("{text}per_layer_projection_norm.weight", stage="all"),
    *whole(LAYER, "per_layer_input_gate.weight", "per_layer_projection.weight", "layer_scalar"),
    *DENSE,
)

RULES: dict[str, Rules] = {
    **dict.fromkeys(
        (
            *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "granite", "smollm3"),
            *("arcee", "bitnet", "cwm", "ernie4_5", "exaone4", "helium", "hunyuan_v1_dense"),
            *("internlm3", "ministral", "ministral3", "nemotron", "olmo", "olmo2", "olmo3", "seed_oss"),
        ),
        DENSE,
    ),
    **dict.fromkeys(("cohere", "cohere2", "stablelm"), COHERE),
    **dict.fromkeys(("phi3", "glm", "glm4"), PHI3),
    "phi": PHI,
    "starcoder2": STARCODER2,
    "apertus": APERTUS,
    "diffllama": DIFFLLAMA,
    "gemma4_text": GEMMA4,
}
