# SPDX-License-Identifier: Apache-2.0
"""Rules of decoders with experts, and with latent attention."""

from __future__ import annotations

from nccl_m2n.sharding.families.dense import DENSE
from nccl_m2n.sharding.families.parts import (
    KEY_VALUE,
    LAYER,
    QUERY,
    Rules,
    column,
    experts,
    mlp,
    row,
    stacked,
    whole,
)
from nccl_m2n.sharding.rules import Rule

_ATTENTION = f"{LAYER}self_attn."
_SPARSE = f"{LAYER}block_sparse_moe."

EXPERTS: Rules = experts() + stacked() + DENSE
MIXTRAL: Rules = experts(_SPARSE, ("w1", "w3"), "w2") + DENSE
MINIMAX_M2: Rules = (
    Rule(f"{_ATTENTION}q_norm.weight", tp=0, **QUERY),  # over all heads, of which a rank has its own
    Rule(f"{_ATTENTION}k_norm.weight", tp=0, **KEY_VALUE),
    *MIXTRAL,
)
# Expert matrices stacked, gate and up end to end, and a layer's shared block.
GRANITE_MOE: Rules = (
    Rule(f"{_SPARSE}input_linear.weight", tp=1, ep=0, segments=2),
    Rule(f"{_SPARSE}output_linear.weight", tp=2, ep=0),
    *whole(_SPARSE, "router.layer.weight"),
    *column(f"{LAYER}shared_mlp.", "input_linear", segments=2),
    *row(f"{LAYER}shared_mlp.", "output_linear"),
    *DENSE,
)


def latent(at: str = _ATTENTION) -> Rules:
    """Multi-head latent attention: the low-rank projections are whole, those out of them go by heads."""
    return (
        *column(at, "q_b_proj", "kv_b_proj", **QUERY),
        *whole(
            at, "q_a_proj.weight", "q_a_proj.bias", "kv_a_proj_with_mqa.weight", "kv_a_proj_with_mqa.bias"
        ),
        # the indexer of sparse attention looks at all tokens on every rank
        *whole(f"{at}indexer.", "wq_b.weight", "wk.weight", "weights_proj.weight", "k_norm.*"),
    )


# Prediction layers behind the others have an embedding and a head of their own.
_PREDICTION: Rules = (
    Rule(f"{LAYER}embed_tokens.weight", tp=0, padded=True),
    Rule(f"{LAYER}shared_head.head.weight", tp=0, padded=True),
    *whole(LAYER, "eh_proj.weight"),
)
LATENT: Rules = experts() + stacked() + latent() + _PREDICTION + DENSE
LONGCAT: Rules = (
    *latent(f"{_ATTENTION}?."),
    *row(f"{_ATTENTION}?.", "o_proj", **QUERY),
    *column(f"{_ATTENTION}?.", "q_proj", **QUERY),
    *mlp(f"{LAYER}mlps.?."),
    *whole(f"{LAYER}mlp.router.", "classifier.weight", "classifier.bias"),
    *LATENT,
)
GPT_OSS: Rules = (
    Rule(f"{_ATTENTION}sinks", tp=0, **QUERY),
    # stacked experts with gate and up in turn, so that a plain cut keeps the pairs together
    Rule(f"{LAYER}mlp.experts.gate_up_proj_blocks", tp=1, ep=0),
    Rule(f"{LAYER}mlp.experts.gate_up_proj_scales", tp=1, ep=0),
    Rule(f"{LAYER}mlp.experts.gate_up_proj_bias", tp=1, ep=0),
    Rule(f"{LAYER}mlp.experts.gate_up_proj", tp=2, ep=0),
    Rule(f"{LAYER}mlp.experts.down_proj_blocks", tp=2, ep=0),
    Rule(f"{LAYER}mlp.experts.down_proj_scales", tp=2, ep=0),
    Rule(f"{LAYER}mlp.experts.down_proj_bias", ep=0),
    Rule(f"{LAYER}mlp.experts.down_proj", tp=1, ep=0),
    # the same one by one, where one side keeps them so (Manifest.unstack)
    Rule(f"{LAYER}mlp.experts.{{expert}}.gate_up_proj", tp=1),
    Rule(f"{LAYER}mlp.experts.{{expert}}.gate_up_proj_bias", tp=0),
    Rule(f"{LAYER}mlp.experts.{{expert}}.down_proj", tp=0),
    Rule(f"{LAYER}mlp.experts.{{expert}}.down_proj_bias"),
    *whole(f"{LAYER}mlp.", "router.weight", "router.bias"),
    *DENSE,
)
LLAMA4: Rules = (
    *(
        Rule(f"{LAYER}feed_forward.experts.gate_up_proj", tp=2, ep=0, segments=2),
        Rule(f"{LAYER}feed_forward.experts.down_proj", tp=1, ep=0),
    ),
    *experts(f"{LAYER}feed_forward."),
    *mlp(f"{LAYER}feed_forward."),
    *DENSE,
)
HUNYUAN_MOE: Rules = mlp(f"{LAYER}mlp.shared_mlp.") + whole(f"{LAYER}mlp.gate.", "wg.weight") + EXPERTS
AFMOE: Rules = (
    *column(_ATTENTION, "gate_proj", **QUERY),
    *whole(f"{LAYER}mlp.", "router.gate.weight"),
    *EXPERTS,
)
MIMO: Rules = (Rule(f"{_ATTENTION}attention_sink_bias", tp=0, **QUERY), *EXPERTS)

RULES: dict[str, Rules] = {
    **dict.fromkeys(
        (
            *(
                "qwen2_moe",
                "qwen3_moe",
                "olmoe",
                "flex_olmo",
                "glm4_moe",
                "dots1",
                "ernie4_5_moe",
                "exaone_moe",
            ),
            "solar_open",
        ),
        EXPERTS,
    ),
    **dict.fromkeys(("mixtral", "phimoe"), MIXTRAL),
    **dict.fromkeys(("granitemoe", "granitemoeshared"), GRANITE_MOE),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm_moe_dsa", "glm4_moe_lite", "minicpm3"),
        LATENT,
    ),
    "minimax_m2": MINIMAX_M2,
    "longcat_flash": LONGCAT,
    "gpt_oss": GPT_OSS,
    "llama4_text": LLAMA4,
    "hunyuan_v1_moe": HUNYUAN_MOE,
    "afmoe": AFMOE,
    "mimo_v2_flash": MIMO,
}
