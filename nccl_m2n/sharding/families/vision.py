# SPDX-License-Identifier: Apache-2.0
"""Rules of models that see: their vision part, which the first stage has, beside those of their language part."""

from __future__ import annotations

from nccl_m2n.sharding.families.dense import DENSE
from nccl_m2n.sharding.families.experts import EXPERTS, LLAMA4
from nccl_m2n.sharding.families.hybrid import QWEN3_NEXT
from nccl_m2n.sharding.families.parts import LAYER, Rules, Units, Where, column, mlp, norms, row, whole
from nccl_m2n.sharding.rules import Rule

_FIRST: Where = {"stage": "first"}


def _heads(key: str) -> Units:
    return {"units": f"vision_config.{key}", "repeat": False, **_FIRST}


def qwen_vision(at: str = "*visual.") -> Rules:
    """Qwen's vision towers: one matrix for query, key and value, end to end; mergers of patches."""
    block, heads = f"{at}blocks.*.", _heads("num_heads")
    return (
        *column(f"{block}attn.", "qkv", segments=3, **heads),
        *row(f"{block}attn.", "proj", **heads),
        *column(f"{block}mlp.", "gate_proj", "up_proj", "linear_fc1", "fc1", **_FIRST),
        *row(f"{block}mlp.", "down_proj", "linear_fc2", "fc2", **_FIRST),
        *column(f"{at}*merger*", ".linear_fc1", ".mlp.0", **_FIRST),
        *row(f"{at}*merger*", ".linear_fc2", ".mlp.2", **_FIRST),
        *whole(at, "patch_embed.proj.*", "pos_embed.weight", "merger.ln_q.*", **_FIRST),
        *norms(at, **_FIRST),
    )


def tower(layer: str, output: str = "out_proj", attention: str = "self_attn.") -> Rules:
    """A vision transformer's layers: separate query, key and value; two matrices."""
    heads = _heads("num_attention_heads")
    return (
        *column(f"{layer}{attention}", "[qkv]_proj", **heads),
        *row(f"{layer}{attention}", output, **heads),
        *column(f"{layer}mlp.", "fc1", **_FIRST),
        *row(f"{layer}mlp.", "fc2", **_FIRST),
    )


_SIGLIP = "*vision_tower.*encoder.layers.*."
GEMMA3: Rules = (
    *tower(_SIGLIP),
    *whole("*vision_tower.*embeddings.", "patch_embedding.*", "position_embedding.weight", **_FIRST),
    *whole("*multi_modal_projector.", "mm_input_projection_weight", "mm_soft_emb_norm.weight", **_FIRST),
    *norms("*vision_tower.", **_FIRST),
    *DENSE,
)
LLAMA4_VISION: Rules = (
    *tower("*vision_model.model.layers.*.", "o_proj"),
    *column("*vision_model.vision_adapter.mlp.", "fc1", **_FIRST),
    *row("*vision_model.vision_adapter.mlp.", "fc2", **_FIRST),
    *whole(
        "*vision_model.",
        "class_embedding",
        "positional_embedding_vlm",
        "patch_embedding.linear.weight",
        **_FIRST,
    ),
    *norms("*vision_model.", **_FIRST),
    *column("*multi_modal_projector.", "linear_1", **_FIRST),
    *LLAMA4,
)
_PIXTRAL = "*vision_tower.transformer.layers.*."
MISTRAL3: Rules = (
    *tower(_PIXTRAL, "o_proj", "attention."),
    *mlp(f"{_PIXTRAL}feed_forward."),
    *norms("*vision_tower.", **_FIRST),
    *whole("*vision_tower.", "patch_conv.weight", "ln_pre.weight", **_FIRST),
    *column("*multi_modal_projector.", "linear_1", **_FIRST),
    *row("*multi_modal_projector.", "linear_2", **_FIRST),
    *whole("*multi_modal_projector.", "norm.weight", "patch_merger.merging_layer.weight", **_FIRST),
    *DENSE,
)
# As published the experts are (experts, in, out), as transformers 5 writes them (experts, out, in).
_VL_EXPERTS: Rules = (
    Rule(f"{LAYER}mlp.experts.gate_up_proj", tp=2, ep=0, segments=2, shape=(None, "hidden_size", None)),
    Rule(f"{LAYER}mlp.experts.down_proj", tp=1, ep=0, shape=(None, None, "hidden_size")),
)
RULES: dict[str, Rules] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), qwen_vision() + DENSE),
    "qwen3_vl_moe": qwen_vision() + _VL_EXPERTS + EXPERTS,
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), qwen_vision() + QWEN3_NEXT),
    "gemma3": GEMMA3,
    "llama4": LLAMA4_VISION,
    "mistral3": MISTRAL3,
}
