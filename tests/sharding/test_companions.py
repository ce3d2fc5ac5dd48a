# SPDX-License-Identifier: Apache-2.0
"""What follows a weight: scales, packed words, zero points, adapters; and quantised models by their configuration."""

from __future__ import annotations

from typing import Any

import pytest

from nccl_m2n import Replicate, Shard, StridedShard
from nccl_m2n.errors import CommandError
from nccl_m2n.models import Manifest
from nccl_m2n.models.catalogue import MODELS
from nccl_m2n.sharding import Parallelism, layouts

AT = "model.layers.0."
CONFIG = {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 1}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def placed(
    shapes: dict[str, tuple[int, ...]], quantization: dict[str, Any], sizes: str = "tp=4"
) -> dict[str, tuple[Any, ...]]:
    """The local shape of each tensor on rank 1, and its placements along tp."""
    manifest = Manifest(
        {AT + name: (shape, "uint8") for name, shape in shapes.items()},
        config=CONFIG | {"quantization_config": quantization},
    )
    made = layouts(manifest, Parallelism.parse(sizes))
    return {name: (made[AT + name].local_shape(1), *made[AT + name].placements) for name in shapes}


def test_block_scales_of_the_size_that_the_configuration_says() -> None:
    shapes = {
        "mlp.up_proj.weight": (64, 256),
        "mlp.up_proj.weight_scale_inv": (64, 8),  # MXFP8: 1 × 32
        "mlp.down_proj.weight": (256, 512),
        "mlp.down_proj.weight_scale_inv": (256, 16),
    }
    made = placed(shapes, {"weight_block_size": [1, 32]})
    assert made["mlp.up_proj.weight_scale_inv"] == ((16, 8), Shard(0))
    assert made["mlp.down_proj.weight_scale_inv"] == ((256, 4), Shard(1))
    shapes["mlp.down_proj.weight_scale_inv"] = (256, 15)
    with pytest.raises(CommandError, match="has 15 elements for the 512 of dimension 1 of its weight"):
        placed(shapes, {"weight_block_size": [1, 32]})


def test_scales_of_rows_and_of_a_whole_weight() -> None:
    shapes = {
        "mlp.up_proj.weight": (64, 256),
        "mlp.up_proj.weight_scale": (64, 1),
        "mlp.up_proj.input_scale": (),
        "mlp.down_proj.weight": (256, 64),
        "mlp.down_proj.weight_scale": (256, 1),
        "self_attn.k_proj.weight": (64, 256),
        "self_attn.k_proj.weight_scale": (1,),
        "self_attn.q_proj.weight": (64, 256),
        "self_attn.q_proj.weight_scale": (64,),
    }
    made = placed(shapes, {})
    assert made["mlp.up_proj.weight_scale"] == ((16, 1), Shard(0))
    assert made["mlp.up_proj.input_scale"] == ((), Replicate())
    assert made["mlp.down_proj.weight_scale"] == ((256, 1), Replicate())
    assert made["self_attn.k_proj.weight_scale"] == ((1,), Replicate())
    assert made["self_attn.q_proj.weight_scale"] == ((16,), Shard(0))


def test_gptq_packs_along_the_columns() -> None:
    def module(name: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
        return {
            f"{name}.qweight": (columns // 8, rows),
            f"{name}.qzeros": (columns // 32, rows // 8),
            f"{name}.scales": (columns // 32, rows),
            f"{name}.g_idx": (columns,),
        }

    shapes = module("mlp.up_proj", 128, 256) | module("mlp.down_proj", 256, 128)
    made = placed(shapes, {"quant_method": "gptq", "bits": 4, "desc_act": False})
    assert [made[f"mlp.up_proj.{k}"][0] for k in ("qweight", "qzeros", "scales", "g_idx")] == [
        *((32, 32), (8, 4), (8, 32), (256,)),
    ]
    assert [made[f"mlp.down_proj.{k}"][0] for k in ("qweight", "qzeros", "scales", "g_idx")] == [
        *((4, 256), (1, 32), (1, 256), (32,)),
    ]
    made = placed(shapes, {"quant_method": "gptq", "bits": 4, "desc_act": True})
    assert made["mlp.down_proj.scales"] == ((4, 256), Replicate())  # in an order of their own
    with pytest.raises(CommandError, match=r"\[0:16\] of dimension 1, cutting the blocks of 32"):
        placed(shapes, {"quant_method": "gptq", "bits": 4}, "tp=8")
    with pytest.raises(CommandError, match="whose shape neither the model nor its configuration says"):
        placed(shapes, {})


def test_awq_and_compressed_tensors_pack_otherwise() -> None:
    shapes: dict[str, tuple[int, ...]] = {
        "mlp.up_proj.qweight": (256, 16),
        "mlp.up_proj.scales": (2, 128),
        "mlp.up_proj.qzeros": (2, 16),
    }
    made = placed(shapes, {"quant_method": "awq", "bits": 4})
    assert [made[name][0] for name in shapes] == [(256, 4), (2, 32), (2, 4)]
    shapes = {
        "mlp.down_proj.weight_packed": (256, 16),
        "mlp.down_proj.weight_scale": (256, 4),
        "mlp.down_proj.weight_zero_point": (32, 4),
        "mlp.down_proj.weight_shape": (2,),
    }
    groups = {"group_0": {"weights": {"num_bits": 4, "group_size": 32}}}
    made = placed(shapes, {"quant_method": "compressed-tensors", "config_groups": groups})
    assert [made[name][0] for name in shapes] == [(256, 4), (256, 1), (32, 1), (2,)]


def test_adapters_follow_what_they_adapt() -> None:
    """Of a column-parallel matrix B is cut, of a row-parallel one A."""
    shapes = {
        "mlp.up_proj.lora_A.weight": (16, 64),
        "mlp.up_proj.lora_B.weight": (128, 16),
        "mlp.down_proj.lora_A.weight": (16, 128),
        "mlp.down_proj.lora_B.weight": (64, 16),
    }
    tensors = {f"base_model.model.{AT}{name}": (shape, "float32") for name, shape in shapes.items()}
    made = layouts(Manifest(tensors, config=CONFIG), Parallelism(tp=4))
    assert [layout.placements for layout in made.values()] == [
        (Replicate(),),
        (Shard(0),),
        (Shard(1),),
        (Replicate(),),
    ]


def test_fsdp_cuts_scales_by_themselves() -> None:
    shapes = {"mlp.up_proj.weight": (640, 256), "mlp.up_proj.weight_scale_inv": (5, 2)}
    made = placed(shapes, FP8, "fsdp=2")
    assert [made[name][0] for name in shapes] == [(320, 256), (2, 2)]
    assert StridedShard(0, 2) not in made["mlp.up_proj.weight_scale_inv"]


def test_deepseek_is_as_large_as_it_is_published() -> None:
    config = MODELS["DeepSeek-V3"] | {"quantization_config": FP8}
    assert Manifest.from_config(config, mtp=False).nbytes == pytest.approx(671e9, rel=0.01)
    manifest = Manifest.from_config(config)
    assert manifest.nbytes == pytest.approx(689e9, rel=0.01)
    assert dict(manifest) == dict(Manifest.named("DeepSeek-V3", fp8=True))


def test_quantised_models_of_other_families_are_described_or_refused() -> None:
    config = MODELS["Qwen3-30B-A3B"] | {"num_hidden_layers": 1}
    skip = [f"{AT}self_attn.q_proj"]
    manifest = Manifest.from_config(config | {"quantization_config": FP8 | {"modules_to_not_convert": skip}})
    assert manifest[f"{AT}mlp.experts.3.up_proj.weight_scale_inv"].shape == (6, 16)
    assert (
        manifest[f"{AT}mlp.gate.weight"].dtype == manifest[f"{AT}self_attn.q_proj.weight"].dtype == "bfloat16"
    )
    with pytest.raises(CommandError, match="quant_method 'gptq', whose tensors no configuration describes"):
        Manifest.from_config(config | {"quantization_config": {"quant_method": "gptq", "bits": 4}})
    with pytest.raises(CommandError, match="for 'weight_block_size', expected rows and columns"):
        Manifest.from_config(config | {"quantization_config": FP8 | {"weight_block_size": [128]}})
    oss = MODELS["GPT-OSS-20B"] | {"quantization_config": {"quant_method": "mxfp4"}}
    assert dict(Manifest.from_config(oss)) == dict(Manifest.named("GPT-OSS-20B", mxfp4=True))
