# SPDX-License-Identifier: Apache-2.0
"""Published configurations at their real sizes, as far as they decide a name or a shape, with their parameters."""

from __future__ import annotations

from typing import Any

from nccl_m2n.models.catalogue import MODELS

_LLAMA4 = {
    "model_type": "llama4_text",
    "vocab_size": 202048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
REAL: dict[str, tuple[dict[str, Any], float]] = {  # name -> configuration, parameters in billions
    "Qwen3-Next-80B-A3B": (
        {
            "model_type": "qwen3_next",
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 5120,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "num_experts": 512,
            "full_attention_interval": 4,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "tie_word_embeddings": False,
        },
        79.7,
    ),
    "MiniMax-M2": (
        {
            "model_type": "minimax_m2",
            "vocab_size": 200064,
            "hidden_size": 3072,
            "intermediate_size": 1536,
            "num_hidden_layers": 62,
            "num_attention_heads": 48,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_local_experts": 256,
            "tie_word_embeddings": False,
        },
        228.7,
    ),
    "DeepSeek-V3.2": (
        MODELS["DeepSeek-V3"]
        | {
            "model_type": "deepseek_v32",
            "index_n_heads": 64,
            "index_head_dim": 128,
            "num_nextn_predict_layers": 0,
        },
        671.9,
    ),
    "Kimi-K2": (MODELS["Kimi-K2"], 1026.5),
    "GLM-4.6": (
        {
            "model_type": "glm4_moe",
            "vocab_size": 151552,
            "hidden_size": 5120,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "num_hidden_layers": 92,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "n_routed_experts": 160,
            "n_shared_experts": 1,
            "first_k_dense_replace": 3,
            "attention_bias": True,
            "use_qk_norm": True,
            "tie_word_embeddings": False,
        },
        352.8,
    ),
    "GPT-OSS-120B": (MODELS["GPT-OSS-120B"], 116.8),
    "Llama-4-Scout": (_LLAMA4 | {"num_local_experts": 16, "interleave_moe_layer_step": 1}, 107.8),
    "Llama-4-Maverick": (_LLAMA4 | {"num_local_experts": 128, "interleave_moe_layer_step": 2}, 400.7),
}
