# SPDX-License-Identifier: Apache-2.0
"""A model small enough to watch, as a trainer keeps it (FSDP2) and as a generator keeps it (vLLM)."""

from __future__ import annotations

import numpy as np

from nccl_m2n.models import Manifest
from nccl_m2n.sharding import Parallelism, layouts

MODEL = Manifest.from_config(
    {
        "model_type": "qwen2",
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "torch_dtype": "float32",
    }
)
TRAINER = Parallelism(fsdp=4)  # ranks 0 to 3
GENERATOR = Parallelism(tp=2, dp=2, order="vllm")  # ranks 4 to 7


def trainer_arrays(rank: int) -> dict[str, np.ndarray]:
    """What ``{name: p.to_local() for name, p in model.named_parameters()}`` would be."""
    made = {}
    for name, layout in layouts(MODEL, TRAINER).items():
        full = np.random.default_rng(len(made)).standard_normal(layout.shape, np.float32)
        made[name] = layout.slice_global(full, rank)
    return made


def generator_arrays() -> dict[str, np.ndarray]:
    """What ``dict(model.named_parameters())`` would be: fused, sharded by two, the vocabulary padded to 1024."""
    shapes = {"model.embed_tokens.weight": (512, 64), "lm_head.weight": (512, 64), "model.norm.weight": (64,)}
    for layer in range(2):
        for name, shape in {
            "self_attn.qkv_proj.weight": (32 + 16 + 16, 64),
            "self_attn.qkv_proj.bias": (32 + 16 + 16,),
            "self_attn.o_proj.weight": (64, 32),
            "mlp.gate_up_proj.weight": (64 + 64, 64),
            "mlp.down_proj.weight": (64, 64),
            "input_layernorm.weight": (64,),
            "post_attention_layernorm.weight": (64,),
        }.items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
