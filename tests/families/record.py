# SPDX-License-Identifier: Apache-2.0
"""Make tiny models of many families with transformers, save them, and record what lies in the files.

``python -m tests.families.record`` needs torch and transformers; some minutes on two cores, no download.
"""

from __future__ import annotations

import gzip
import inspect
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from nccl_m2n.sharding.families import RULES
from tests.families.tiny import PATH, packed

# All that transformers makes under the name of its own; Kimi-K2 is DeepSeek-V3's.
FAMILIES = [family for family in RULES if family not in ("kimi_k2", "llama4_text")]

SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 128),
    **dict.fromkeys(
        ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "intermediate_size_mlp"), 256
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads", "linear_num_key_heads"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(
        ("index_n_heads", "index_topk", "qk_rope_head_dim", "time_step_rank", "mamba_dt_rank"), 8
    ),
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "v_head_dim", "index_head_dim", "mamba_d_head"), 16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_num_value_heads"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "mamba_head_dim", "mamba_d_state"), 16),
    **dict.fromkeys(("ssm_state_size", "state_size", "hidden_size_per_layer_input"), 16),
    **dict.fromkeys(("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), 64),
    **dict.fromkeys(("expert_ffn_hidden_size", "shared_intermediate_size"), 64),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 512),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 32),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "zero_expert_num", "mamba_expand"), 2),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "eos_token_id"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "bos_token_id"), 1),
    "num_key_value_heads": 4,
    "moe_intermediate_size": 48,
    "mamba_d_ssm": 256,
    "num_kv_shared_layers": 0,
    "pad_token_id": 0,
}
VISION: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "embed_dim", "vision_output_dim", "projector_input_dim"), 64),
    **dict.fromkeys(("intermediate_size", "out_hidden_size"), 128),
    **dict.fromkeys(("num_hidden_layers", "depth", "spatial_merge_size"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "head_dim", "patch_size"), 8),
    "image_size": 32,
    "in_channels": 3,
    "num_position_embeddings": 16,
    "projector_output_dim": 64,
    "deepstack_visual_indexes": [0, 1],
    "fullatt_block_indexes": [1],
}
_TOWER = {
    k: VISION[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
}
_TOWER |= {"image_size": 32, "patch_size": 8}
_TEXT = {
    k: SMALL[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
}
_TEXT |= {"num_key_value_heads": 4, "head_dim": 16, "vocab_size": 512}
_KINDS = ["conv", "full_attention", "conv", "full_attention"]
SPECIAL: dict[str, dict[str, Any]] = {  # what a family needs beside
    "mamba2": {"num_heads": 16, "head_dim": 16},
    "dots1": {"n_shared_experts": 1},
    "lfm2": {"layer_types": _KINDS},
    "lfm2_moe": {"layer_types": _KINDS, "num_dense_layers": 1},
    "kimi_linear": {
        "linear_attn_config": {
            "num_heads": 8,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
            "kda_layers": [1, 2, 3],
            "full_attn_layers": [4],
        }
    },
    "gemma3": {
        "vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False, **_TOWER},
        "mm_tokens_per_image": 4,
        "text_config": {"model_type": "gemma3_text", **_TEXT},
    },
    "mistral3": {
        "vision_config": {"model_type": "pixtral", "head_dim": 8, **_TOWER},
        "text_config": {"model_type": "mistral", **_TEXT},
    },
}
BASE = ("bert", "distilbert", "modernbert")  # saved without a head
SEEING = ("gemma3", "llama4", "mistral3", "qwen3_5", "qwen3_5_moe")
# What says nothing of a tensor's name or shape.
_IDLE = re.compile(
    "token_id|initializer|dropout|_eps$|epsilon|_act$|activation|use_cache|problem|id2|label|chunk|return_dict|"
    "output_(att|hid|router|scores)|architectures|_version|lambda|multiplier|scaling|theta|rope_(para|type)|jitter|"
    "loss|norm_topk|time_step_(limit|min|max|floor)|residual|summary|softmax|temperature"
)


def configuration(family: str) -> Any:
    """A tiny model's, as transformers has it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[family]
    parts = getattr(kind, "sub_configs", None) or {}
    if "text_config" not in parts:
        return kind(**_known(kind, SMALL) | SPECIAL.get(family, {}))
    made = {
        key: _known(part, SMALL if key == "text_config" else VISION)
        for key, part in parts.items()
        if part.__name__ not in ("AutoConfig", "PreTrainedConfig")
    }
    return kind(**made | SPECIAL.get(family, {}))


def _known(kind: Any, values: dict[str, Any]) -> dict[str, Any]:
    try:
        keys = set(kind().to_dict())
    except Exception:  # a configuration that cannot be made of nothing
        keys = set(inspect.signature(kind.__init__).parameters)
    keys |= set(getattr(kind, "attribute_map", {}))
    return {key: value for key, value in values.items() if key in keys}


def record(family: str) -> dict[str, Any]:
    """One model made, saved, and read."""
    import safetensors
    import torch
    from transformers.models.auto import modeling_auto as auto

    config = configuration(family)
    kinds = [auto.MODEL_FOR_CAUSAL_LM_MAPPING, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, auto.MODEL_MAPPING]
    if family in BASE:
        kinds = kinds[2:]
    elif "_vl" in family or family in SEEING:
        kinds = kinds[1:]
    kind = next(kind[type(config)] for kind in kinds if type(config) in kind)
    model = kind(config).to(torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        with safetensors.safe_open(Path(folder) / "model.safetensors", "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            tensors = {name: (one.get_shape(), one.get_dtype()) for name, one in slices.items()}
        said = json.loads((Path(folder) / "config.json").read_text())
    plan = dict(getattr(model, "tp_plan", None) or {})
    return {"config": _telling(said), "tensors": packed(tensors), "plan": plan}


def _telling(config: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in config.items() if value is not None and not _IDLE.search(key)}
    return {key: _telling(value) if isinstance(value, dict) else value for key, value in kept.items()}


def main() -> None:
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    import transformers

    transformers.utils.logging.disable_progress_bar()
    made = {}
    for family in sys.argv[1:] or FAMILIES:
        made[family] = record(family)
        print(family, len(made[family]["tensors"]), file=sys.stderr, flush=True)
    text = json.dumps({"transformers": transformers.__version__, "models": made}, separators=(",", ":"))
    PATH.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


if __name__ == "__main__":
    main()
