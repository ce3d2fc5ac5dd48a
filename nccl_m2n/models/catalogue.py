# SPDX-License-Identifier: Apache-2.0
"""Models known by name: what their published config.json says that decides a name or a shape."""

from __future__ import annotations

from nccl_m2n.errors import CommandError

_LLAMA: dict[str, object] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

_QWEN3_MOE: dict[str, object] = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": (),
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

_DEEPSEEK: dict[str, object] = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "n_shared_experts": 1,
    "moe_layer_freq": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

_GPT_OSS: dict[str, object] = {
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "head_dim": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "attention_bias": True,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

MODELS: dict[str, dict[str, object]] = {
    "Llama-3.1-8B": _LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "Llama-3.1-70B": _LLAMA
    | {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
    "Qwen2.5-7B": {
        "model_type": "qwen2",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
    "Qwen3-30B-A3B": _QWEN3_MOE
    | {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
    },
    "Qwen3-235B-A22B": _QWEN3_MOE
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
    },
    "DeepSeek-V3": _DEEPSEEK
    | {
        "vocab_size": 129280,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "n_routed_experts": 256,
        "first_k_dense_replace": 3,
        "num_nextn_predict_layers": 1,
    },
    "Kimi-K2": _DEEPSEEK
    | {
        "model_type": "kimi_k2",
        "vocab_size": 163840,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "n_routed_experts": 384,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
    },
    "GPT-OSS-20B": _GPT_OSS | {"num_hidden_layers": 24, "num_local_experts": 32},
    "GPT-OSS-120B": _GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128},
    "all-MiniLM-L6-v2": {
        "model_type": "bert",
        "architectures": ("BertModel",),
        "vocab_size": 30522,
        "hidden_size": 384,
        "intermediate_size": 1536,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "torch_dtype": "float32",
    },
}


def shipped(name: str) -> tuple[str, dict[str, object]]:
    """The proper name and the configuration of a model, whatever its name's case and its owner's name.

    Raises:
        CommandError: If there is none of that name.
    """
    wanted = _plain(name.rsplit("/", 1)[-1])
    for label, config in MODELS.items():
        if _plain(label) == wanted:
            return label, dict(config)
    known = ", ".join(MODELS)
    raise CommandError(f"there is no file and no shipped model named {name!r:.200}; shipped are {known}")


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "").replace(".", "")
