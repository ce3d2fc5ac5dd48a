# SPDX-License-Identifier: Apache-2.0
"""Rules of state-space models, of linear attention, and of decoders that mix them with attention."""

from __future__ import annotations

from dataclasses import replace

from nccl_m2n.sharding.families.dense import DENSE
from nccl_m2n.sharding.families.experts import EXPERTS, GRANITE_MOE, latent
from nccl_m2n.sharding.families.parts import (
    LAYER,
    Rules,
    Units,
    attention,
    column,
    ends,
    experts,
    mlp,
    norms,
    row,
    whole,
)
from nccl_m2n.sharding.rules import Rule


def mamba1(at: str) -> Rules:
    """Mamba's mixer, by channels."""
    return (
        *column(at, "in_proj", segments=2),
        *column(at, "conv1d", "dt_proj"),
        *row(at, "x_proj", "out_proj"),
        Rule(f"{at}A_log", tp=0),
        Rule(f"{at}D", tp=0),
    )


def mamba2(at: str, heads: str, head_dim: str, groups: str, state: str) -> Rules:
    """Mamba2's mixer, by heads; groups below the tensor-parallel ranks are held by several of them."""
    inner, group = f"{heads} * {head_dim}", f"{groups} * {state}"
    packed = f"{heads} * 1"
    return (
        *column(at, "in_proj", segments=(inner, inner, group, group, packed)),
        *column(at, "conv1d", segments=(inner, group, group)),
        *row(at, "out_proj", units=heads),
        *(
            Rule(f"{at}{name}", tp=0, units=heads, repeat=False)
            for name in ("A_log", "D", "dt_bias", "norm.weight")
        ),
    )


_KEYS = "linear_num_key_heads * linear_key_head_dim"
_VALUES = "linear_num_value_heads * linear_value_head_dim"


def gated_delta(at: str = f"{LAYER}linear_attn.") -> Rules:
    """Gated delta networks: Qwen3-Next packs by key head, Qwen3.5 end to end."""
    keys: Units = {"units": "linear_num_key_heads", "repeat": False}
    values: Units = {"units": "linear_num_value_heads", "repeat": False}
    return (
        *column(at, "in_proj_qkvz", "in_proj_ba", **keys),
        *column(at, "in_proj_qkv", "conv1d", segments=(_KEYS, _KEYS, _VALUES), repeat=False),
        *column(at, "in_proj_[zab]", **values),
        *(
            Rule(f"{at}{name}", tp=0, units="linear_num_value_heads", repeat=False)
            for name in ("A_log", "dt_bias")
        ),
        *row(at, "out_proj", **values),
        *whole(at, "norm.weight", shape=(None,)),
    )


def prediction(rules: Rules) -> Rules:
    """The same layers as prediction layers, which the last stage has: ``mtp.layers.N``."""
    return (
        *column("mtp.", "fc", stage="last"),
        *norms("mtp.", stage="last"),
        *(
            replace(rule, pattern=f"mtp.layers.*.{rule.pattern.removeprefix(LAYER)}", stage="last")
            for rule in rules
            if rule.pattern.startswith(LAYER)
        ),
    )


_FEED_FORWARD: Rules = mlp(f"{LAYER}feed_forward.") + experts(f"{LAYER}feed_forward.")
_FINAL = ends(norm="model.final_layernorm.*")
_BAMBA = mamba2(f"{LAYER}mamba.", "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state")
BAMBA: Rules = _BAMBA + _FEED_FORWARD + _FINAL + DENSE
JAMBA: Rules = mamba1(f"{LAYER}mamba.") + _FEED_FORWARD + _FINAL + DENSE
QWEN3_5: Rules = gated_delta() + EXPERTS
QWEN3_NEXT: Rules = prediction(EXPERTS) + QWEN3_5

_BACKBONE = "backbone.layers.{layer}."
_MIXER = f"{_BACKBONE}mixer."
_BACKBONE_ENDS: Rules = (
    *norms(_BACKBONE),
    *ends("backbone.embeddings.weight", "backbone.norm_f.weight"),
)
NEMOTRON_H: Rules = (
    *mamba2(_MIXER, "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size"),
    *attention(_MIXER),
    *mlp(_MIXER),
    *experts(_MIXER),
    *whole(_MIXER, "fc1_latent_proj.*", "fc2_latent_proj.*"),
    *_BACKBONE_ENDS,
)
LFM2: Rules = (
    *attention(output="out_proj"),
    *mlp(f"{LAYER}feed_forward.", ("w1", "w3"), "w2"),
    *experts(f"{LAYER}feed_forward.", ("w1", "w3"), "w2"),
    *column(f"{LAYER}conv.", "in_proj", segments=3),
    *column(f"{LAYER}conv.", "conv"),
    *row(f"{LAYER}conv.", "out_proj"),
    *ends(norm="model.embedding_norm.weight"),
    *norms(),
)
_LINEAR: Units = {"units": "linear_num_heads", "repeat": False}
_KIMI = f"{LAYER}self_attn."
KIMI_LINEAR: Rules = (
    *column(_KIMI, "b_proj", "[fg]_b_proj", "[qkv]_proj", "[qkv]_conv1d", **_LINEAR),
    Rule(f"{_KIMI}A_log", tp=2, shape=(None,) * 4, **_LINEAR),
    Rule(f"{_KIMI}dt_bias", tp=0, **_LINEAR),
    *whole(_KIMI, "[fg]_a_proj.weight"),
    *latent(),
    *experts(f"{LAYER}block_sparse_moe.", ("w1", "w3"), "w2"),
    *mlp(f"{LAYER}block_sparse_moe.shared_experts."),
    *mlp(f"{LAYER}block_sparse_moe."),
    *DENSE,
)

RULES: dict[str, Rules] = {
    **dict.fromkeys(("bamba", "falcon_h1"), BAMBA),
    "granitemoehybrid": _BAMBA + GRANITE_MOE,
    "jamba": JAMBA,
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), QWEN3_NEXT),
    "qwen3_next": QWEN3_NEXT,
    "nemotron_h": NEMOTRON_H,
    "mamba": mamba1(_MIXER) + _BACKBONE_ENDS,
    "mamba2": mamba2(_MIXER, "num_heads", "head_dim", "n_groups", "state_size") + _BACKBONE_ENDS,
    **dict.fromkeys(("lfm2", "lfm2_moe"), LFM2),
    "kimi_linear": KIMI_LINEAR,
}
