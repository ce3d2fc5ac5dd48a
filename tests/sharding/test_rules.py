# SPDX-License-Identifier: Apache-2.0
"""Rules to layouts: the right dimension on the right ranks, and rules of the user's own."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest

from nccl_m2n import Layout, Mesh, Replicate, Segment, Shard, StridedShard
from nccl_m2n.errors import CommandError
from nccl_m2n.models import Manifest
from nccl_m2n.models.catalogue import MODELS
from nccl_m2n.sharding import Parallelism, Rule, layouts, load_rules, rules_for
from nccl_m2n.sharding.experts import Home
from nccl_m2n.sharding.scales import scale_layout
from tests.storage import small


def of(model: str, sizes: str, name: str, **options: object) -> Layout:
    return layouts(Manifest.named(model), Parallelism.parse(sizes), **options)[name]  # type: ignore[arg-type]


def test_a_dense_model() -> None:
    at = "model.layers.3."
    mesh = Mesh.arange((2, 4), names=("dp", "tp"))
    placed = layouts(Manifest.named("Qwen2.5-7B"), Parallelism(tp=4, dp=2))
    for name, placement in {
        f"{at}self_attn.q_proj.weight": Shard(0),
        f"{at}self_attn.q_proj.bias": Shard(0),
        f"{at}self_attn.v_proj.weight": Shard(0),
        f"{at}self_attn.o_proj.weight": Shard(1),
        f"{at}mlp.gate_proj.weight": Shard(0),
        f"{at}mlp.down_proj.weight": Shard(1),
        f"{at}input_layernorm.weight": Replicate(),
        "model.embed_tokens.weight": Shard(0),
        "lm_head.weight": Shard(0),
        "model.norm.weight": Replicate(),
    }.items():
        assert placed[name] == Layout(
            Manifest.named("Qwen2.5-7B")[name].shape, mesh, [Replicate(), placement]
        )


def test_key_value_heads_are_repeated_where_ranks_are_more() -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    layout = of("Qwen2.5-7B", "tp=8", name)
    assert layout.placements == (Shard(0, segments=(Segment(512, parts=4),)),)
    assert [layout.pieces(r)[0].box.start[0] for r in range(8)] == [0, 0, 128, 128, 256, 256, 384, 384]
    with pytest.raises(
        CommandError, match=r"k_proj.* cannot be placed by .*6 tensor-parallel ranks cannot repeat 4"
    ):
        of("Qwen2.5-7B", "tp=6", name)


def test_pipeline_stages_and_the_ends_of_the_model() -> None:
    placed = layouts(Manifest.named("Llama-3.1-8B"), Parallelism(pp=4, tp=2), start_rank=10)
    assert placed["model.embed_tokens.weight"].ranks == (10, 11)
    assert placed["model.layers.7.mlp.up_proj.weight"].ranks == (10, 11)
    assert placed["model.layers.8.mlp.up_proj.weight"].ranks == (12, 13)
    assert placed["model.norm.weight"].ranks == placed["lm_head.weight"].ranks == (16, 17)


def test_a_tied_embedding_is_on_the_first_and_the_last_stage() -> None:
    manifest = Manifest.from_config(small.QWEN2)
    layout = layouts(manifest, Parallelism(pp=4, tp=2))["model.embed_tokens.weight"]
    assert layout.mesh.array.tolist() == [[0, 1], [6, 7]]
    assert layout.placements == (Replicate(), Shard(0))


def test_each_expert_lives_with_its_owners() -> None:
    name = "model.layers.0.mlp.experts.{}.up_proj.weight"
    placed = layouts(Manifest.named("Qwen3-30B-A3B"), Parallelism(ep=8, dp=16))
    assert placed[name.format(0)].ranks == (0, 8)
    assert placed[name.format(127)].ranks == (7, 15)
    assert (
        placed[name.format(16)] is placed["model.layers.9.mlp.experts.31.gate_proj.weight"]
    )  # described once
    halves = layouts(Manifest.named("Qwen3-30B-A3B"), Parallelism(tp=4, ep=2, etp=2))
    assert halves[name.format(64)].ranks == (2, 3)
    assert halves[name.format(64)].placements == (Shard(0),)
    assert halves["model.layers.0.mlp.experts.64.down_proj.weight"].placements == (Shard(1),)
    assert halves["model.layers.0.mlp.gate.weight"].placements == (Replicate(),)


def test_experts_that_do_not_divide_and_experts_with_several_slots() -> None:
    assert [len(slots) for slots in Home.of(10, 4).slots] == [3, 3, 2, 2]
    assert Home.of(3, 2, [0, 1, 2, 0]).owners == (((0, (0,)), (1, (1,))), ((0, (1,)),), ((1, (0,)),))
    with pytest.raises(
        CommandError, match="expert_slots has 3 slots of 3 experts for 2 expert-parallel ranks"
    ):
        Home.of(3, 2, [0, 1, 2])
    with pytest.raises(CommandError, match="each of the 4 experts"):
        Home.of(4, 2, [0, 1, 2, 0])


def test_latent_attention_and_prediction_layers() -> None:
    placed = layouts(Manifest.named("DeepSeek-V3"), Parallelism(tp=8, pp=2))
    at = "model.layers.60.self_attn."
    assert (
        placed[f"{at}q_b_proj.weight"].placements == placed[f"{at}kv_b_proj.weight"].placements == (Shard(0),)
    )
    assert placed[f"{at}q_a_proj.weight"].placements == (Replicate(),)
    assert placed[f"{at}kv_a_proj_with_mqa.weight"].placements == (Replicate(),)
    assert placed["model.layers.61.eh_proj.weight"].ranks == tuple(range(8, 16))
    assert placed["model.layers.61.shared_head.head.weight"].placements == (Shard(0),)


def test_fsdp_shards_what_tensor_parallelism_left() -> None:
    placed = layouts(Manifest.named("Llama-3.1-8B"), Parallelism(fsdp=4, tp=2, dp=2))
    at = "model.layers.0."
    assert placed[f"{at}mlp.up_proj.weight"].placements == (Replicate(), StridedShard(0, 2), Shard(0))
    assert placed[f"{at}mlp.down_proj.weight"].placements == (Replicate(), Shard(0), Shard(1))
    assert placed[f"{at}input_layernorm.weight"].placements == (Replicate(), Shard(0), Replicate())
    with pytest.raises(CommandError, match="fsdp over units that tensor-parallel ranks repeat"):
        of("Qwen2.5-7B", "tp=8,fsdp=2", f"{at}self_attn.k_proj.weight")


def test_dtensor_agrees_on_fsdp_over_tp() -> None:
    """torch's own offsets for the same placements."""
    pytest.importorskip("torch")
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
    from torch.distributed.tensor.placement_types import Shard as TorchShard
    from torch.distributed.tensor.placement_types import _StridedShard

    layout = layouts(Manifest.from_config(small.LLAMA), Parallelism(fsdp=3, tp=2))[
        "model.layers.0.mlp.up_proj.weight"
    ]
    for rank in range(6):
        placements = [_StridedShard(0, split_factor=2), TorchShard(0)]
        shape, offset = _compute_local_shape_and_global_offset(
            (48, 24), (3, 2), layout.mesh.coordinate(rank).__getitem__, placements
        )
        assert layout.local_shape(rank) == tuple(shape)
        assert layout.pieces(rank)[0].box.start == tuple(offset)


@pytest.mark.parametrize(("vocab", "tp", "padded"), [(32001, 2, 32064), (151552, 6, 152064), (101, 8, 128)])
def test_a_padded_vocabulary_is_shared_evenly(vocab: int, tp: int, padded: int) -> None:
    manifest = Manifest(
        {"model.embed_tokens.weight": ((vocab, 3), "bfloat16"), "model.layers.0.x": ((), "bool")}
    )
    layout = layouts(manifest, Parallelism(tp=tp), padded_vocab=padded)["model.embed_tokens.weight"]
    bounds = [min(padded // tp * r, vocab) for r in range(tp + 1)]
    assert [layout.local_shape(r) for r in range(tp)] == [(b - a, 3) for a, b in itertools.pairwise(bounds)]
    with pytest.raises(CommandError, match=f"padded_vocab={vocab - 1} cannot hold {vocab} rows"):
        layouts(manifest, Parallelism(tp=1), padded_vocab=vocab - 1)


def test_scales_follow_their_weights() -> None:
    placed = layouts(Manifest.named("DeepSeek-V3", fp8=True), Parallelism(tp=4, ep=4, dp=4, etp=4))
    up = placed["model.layers.3.mlp.experts.5.up_proj.weight"]
    scale = placed["model.layers.3.mlp.experts.5.up_proj.weight_scale_inv"]
    assert (up.mesh, up.placements) == (scale.mesh, scale.placements)
    assert scale.shape == (16, 56)
    cut = Layout(
        (576, 300), Mesh.arange((4,)), [Shard(0)]
    )  # boundaries at 144, 288, 432: no multiples of 128
    scale = scale_layout(cut, (5, 3))
    rows = [(p.box.start[0], p.box.stop[0]) for r in range(4) for p in scale.pieces(r)]
    assert rows == [(0, 2), (1, 3), (2, 4), (3, 5)]
    assert scale_layout(Layout((5, 8), Mesh.arange((2,)), [Shard(0)]), (1, 1)).local_shape(1) == (1, 1)


def test_scales_of_an_empty_shard_are_empty() -> None:
    scale = scale_layout(Layout((5, 8), Mesh.arange((4,)), [Shard(0)]), (1, 1))
    assert [scale.local_shape(r) for r in range(4)] == [(1, 1), (1, 1), (1, 1), (0, 1)]


def test_bert_and_odd_tensors() -> None:
    placed = layouts(Manifest.named("all-MiniLM-L6-v2"), Parallelism(tp=2, pp=2))
    assert placed["encoder.layer.0.attention.self.query.bias"].placements == (Shard(0),)
    assert placed["encoder.layer.0.attention.output.dense.weight"].placements == (Shard(1),)
    assert placed["encoder.layer.5.output.dense.weight"].placements == (Shard(1),)
    assert placed["encoder.layer.5.output.dense.bias"].placements == (Replicate(),)
    assert placed["embeddings.position_embeddings.weight"].ranks == (0, 1)
    assert placed["pooler.dense.weight"].ranks == (2, 3)


@pytest.mark.parametrize("name", MODELS)
def test_every_shipped_model_has_rules_for_every_name(name: str) -> None:
    manifest = Manifest.named(name)
    placed = layouts(manifest, Parallelism(tp=2, pp=2, dp=2, ep=2))
    assert list(placed) == list(manifest)
    for key, layout in placed.items():
        assert layout.shape == manifest[key].shape
    bare = Manifest(dict(manifest))  # a checkpoint without its configuration: rules by the names
    placed_by_name = layouts(bare.select(lambda key: "shared_head" not in key), Parallelism(tp=2))
    for key in list(placed_by_name)[:60]:
        assert placed_by_name[key] == layouts_of_one(manifest, key)


def layouts_of_one(manifest: Manifest, name: str) -> Layout:
    return layouts(manifest.select(lambda key: key == name), Parallelism(tp=2))[name]


def test_rules_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "rules.json"
    path.write_text(json.dumps([{"pattern": "*.o_proj.weight"}, {"shipped": "llama"}]))
    manifest = Manifest.from_config(small.LLAMA)
    placed = layouts(manifest, Parallelism(tp=2), load_rules(path))
    assert placed["model.layers.0.self_attn.o_proj.weight"].placements == (Replicate(),)
    assert placed["model.layers.0.mlp.down_proj.weight"].placements == (Shard(1),)
    mine = load_rules([{"pattern": "*.layers.0.mlp.*", "tp": 1}, Rule("*")])
    placed = layouts(manifest, Parallelism(tp=2), mine)
    assert placed["model.layers.0.mlp.up_proj.weight"].placements == (Shard(1),)
    assert placed["model.layers.1.mlp.up_proj.weight"].placements == (Replicate(),)
    odd = Manifest({"w": ((3, 5), "int8"), "scalar": ((), "bool"), "layers.1.units": ((6,), "float32")})
    rules = [Rule("w", tp=1), Rule("layers.*", tp=0, units=2), Rule("*")]
    placed = layouts(odd, Parallelism(tp=4, fsdp=1), rules)
    assert [placed["w"].local_shape(r) for r in range(4)] == [(3, 2), (3, 2), (3, 1), (3, 0)]
    assert np.ptp([placed["layers.1.units"].local_shape(r) for r in range(4)]) == 0
    assert layouts(odd, Parallelism(fsdp=2), rules)["scalar"].placements == (Replicate(),)


def test_bad_rules_are_named(tmp_path: Path) -> None:
    manifest = Manifest.from_config(small.LLAMA)
    for rules, message in [
        ([Rule("model.*")], "no rule matches the parameter lm_head.weight; end the rules with"),
        ([Rule("*", tp=1)], "of shape (24,) cannot be placed by Rule(pattern='*', tp=1"),
        ([Rule("*", ep="name")], "has no expert number, but its rule says ep='name'"),
    ]:
        with pytest.raises(CommandError, match=re.escape(message)):
            layouts(manifest, Parallelism(tp=2), rules)
    for entry, message in [
        ({"tp": 0}, "is no rule; a rule has a pattern"),
        ({"pattern": "*", "dim": 0}, "is no rule"),
        ({"pattern": "*", "stage": "middle"}, "stage='middle', expected one of first, last, all"),
        ({"pattern": "*", "ep": "all"}, "ep='all', expected a dimension or 'name'"),
    ]:
        with pytest.raises(CommandError, match=re.escape(message)):
            load_rules([entry])
    (tmp_path / "rules.json").write_text("{}")
    with pytest.raises(CommandError, match="rules are a JSON list"):
        load_rules(tmp_path / "rules.json")
    with pytest.raises(CommandError, match="cannot read the rules"):
        load_rules(tmp_path / "none.json")
    with pytest.raises(CommandError, match="no shipped rules fit"):
        rules_for(Manifest({"w": ((1,), "int8")}))
