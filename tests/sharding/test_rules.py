# SPDX-License-Identifier: Apache-2.0
"""Rules to layouts: the right dimension on the right ranks, and rules of the user's own."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nccl_m2n import Box, Layout, Mesh, Replicate, Segment, Shard, StridedShard
from nccl_m2n.cli import main
from nccl_m2n.errors import CommandError
from nccl_m2n.models import Manifest
from nccl_m2n.models.catalogue import MODELS
from nccl_m2n.sharding import Parallelism, Rule, layouts, load_rules, rules_for
from nccl_m2n.sharding.companions import Companion, companion_layout
from nccl_m2n.sharding.experts import Home
from nccl_m2n.sharding.model_layouts import ModelLayouts
from tests.storage import small


def of(model: str, sizes: str, name: str, **options: object) -> Layout:
    return layouts(Manifest.named(model).select(name), Parallelism.parse(sizes), **options)[name]  # type: ignore[arg-type]


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
    repeated = of(
        "Qwen2.5-7B", "tp=8,fsdp=2", f"{at}self_attn.k_proj.weight"
    )  # a head of 128 rows for two ranks
    assert [repeated.pieces(r)[0].box.start[0] for r in range(16)] == [
        *(0, 0, 128, 128, 256, 256, 384, 384),
        *(64, 64, 192, 192, 320, 320, 448, 448),
    ]


def test_fsdp_cuts_the_shard_of_tensor_parallelism_where_that_is_uneven() -> None:
    """1003 rows over TP2 are 502 and 501, which FSDP3 cuts as torch does: 168, 168, 166 and 167 each."""
    manifest = Manifest({"w": ((1003, 5), "float32")})
    layout = layouts(manifest, Parallelism(fsdp=3, tp=2), [Rule("w", tp=0)])["w"]
    assert [layout.local_shape(r)[0] for r in range(6)] == [168, 167, 168, 167, 166, 167]
    torch = pytest.importorskip("torch")
    halves = torch.arange(1003).chunk(2)
    for rank in range(6):
        (piece,) = layout.pieces(rank)
        expected = halves[rank % 2].chunk(3)[rank // 2]
        assert (piece.box.start[0], piece.box.stop[0]) == (int(expected[0]), int(expected[-1]) + 1)


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
        {
            "model.embed_tokens.weight": ((vocab, 3), "bfloat16"),
            "model.layers.0.input_layernorm.weight": ((3,), "bool"),
        }
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
    cut = Layout((576, 300), Mesh.arange((4,)), [Shard(0)])  # boundaries at 144, 288, 432
    with pytest.raises(CommandError, match=r"\[0:144\] of dimension 0, cutting the blocks of 128"):
        scales_of(cut, (5, 3))
    assert scales_of(Layout((5, 8), Mesh.arange((2,)), [Replicate()]), (1, 1)).local_shape(1) == (1, 1)


def scales_of(layout: Layout, shape: tuple[int, int]) -> Layout:
    return companion_layout(layout, Companion("w", layout.shape, ((0, 128), (1, 128))), shape)


def test_uneven_shards_of_a_quantised_weight_must_fall_on_its_blocks() -> None:
    """96 rows over 5 are 20 a rank, blocks have 32."""
    config = {"quantization_config": {"weight_block_size": [32, 32]}}
    manifest = Manifest(
        {"w.weight": ((96, 64), "float8_e4m3fn"), "w.weight_scale_inv": ((3, 2), "float32")}, config=config
    )
    with pytest.raises(CommandError, match=r"cannot be placed .* cutting the blocks of 32 .*; choose sizes"):
        layouts(manifest, Parallelism(tp=5), [Rule("w.weight", tp=0)])
    placed = layouts(manifest, Parallelism(tp=3), [Rule("w.weight", tp=0)])
    assert placed["w.weight_scale_inv"].placements == (Shard(0),)


def test_scales_of_an_empty_shard_are_empty() -> None:
    scale = scales_of(
        Layout((256, 8), Mesh.arange((4,)), [Shard(0, segments=(Segment(256, parts=2),))]), (2, 1)
    )
    assert [scale.pieces(r)[0].box.start[0] for r in range(4)] == [0, 0, 1, 1]
    scale = scales_of(Layout.from_pieces((128, 8), {0: [Box((0, 0), (128, 8))], 1: []}), (1, 1))
    assert [scale.local_shape(r) for r in range(2)] == [(1, 1), (0, 1)]


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
    names = list(manifest)[:60] + list(manifest)[-2:]
    by_name, by_family = (layouts(m.select(names.__contains__), Parallelism(dp=2)) for m in (bare, manifest))
    assert by_name == by_family
    with pytest.raises(
        CommandError, match=r"lacks the key 'num_.*heads', which says how the tensor may be cut"
    ):
        layouts(bare, Parallelism(tp=2))


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
        (
            [Rule("model.*")],
            "no rule matches the parameter lm_head.weight of shape (101, 24); give a rule for it, or pass",
        ),
        ([Rule("*", tp=1)], "of shape (24,) cannot be placed by Rule('*', tp=1)"),
        ([Rule("*", ep="name")], "has no expert number, but its rule says ep='name'"),
        ([Rule("*", tp=0, units="nothing")], "lacks the key 'nothing'"),
    ]:
        with pytest.raises(CommandError, match=re.escape(message)):
            layouts(manifest, Parallelism(tp=2), rules)
    for entry, message in [
        ({"tp": 0}, "expected a rule, with a pattern and any of"),
        ({"pattern": "*", "dim": 0}, "expected a rule, with a pattern"),
        (
            {"pattern": "*", "stage": "middle"},
            "expected one of first, last, tied, all as stage, got 'middle'",
        ),
        ({"pattern": "*", "ep": "all"}, "expected a dimension or 'name' as ep, got 'all'"),
        ({"pattern": "*", "tp": "0"}, "expected int or NoneType as tp, got '0'"),
        ({"pattern": "*", "tp": True}, "as tp, got True"),
        ({"pattern": ["*"]}, "expected str as pattern, got ['*']"),
        (
            {"pattern": "*", "segments": [2, 2]},
            "expected a tp dimension, and units only as their first factors as segments, got (2, 2)",
        ),
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


def test_what_no_rule_knows_is_refused_or_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tensors = dict(Manifest.from_config(small.LLAMA)) | {
        "model.layers.0.mlp.new.weight": ((24, 24), "float32")
    }
    manifest = Manifest(tensors, "new", small.LLAMA)  # type: ignore[arg-type]
    with pytest.raises(
        CommandError, match=r"no rule matches the parameter model.layers.0.mlp.new.weight .*--repl"
    ):
        layouts(manifest, Parallelism(tp=2))
    with pytest.warns(UserWarning, match=r"1 parameters that no rule knows, 3\.\d% of the bytes, are whole"):
        placed = layouts(manifest, Parallelism(tp=2, pp=2), replicate_unknown=True)
    assert placed["model.layers.0.mlp.new.weight"].placements == (Replicate(),)
    assert placed["model.layers.0.mlp.new.weight"].ranks == (0, 1)  # its layer's
    unlike = Manifest(manifest, "new", small.LLAMA | {"model_type": "lamma"})
    with pytest.raises(
        CommandError, match=r"model_type 'lamma'\); closest are llama.*give rules of your own"
    ):
        layouts(unlike, Parallelism(tp=2))
    with pytest.warns(UserWarning, match=r"parameters that no rule knows, 100\.0% of the bytes"):
        layouts(unlike, Parallelism(tp=2), replicate_unknown=True)
    assert main(["plan", "--model", str(stored(tmp_path)), "--source", "tp=2", "--destination", "tp=1"]) == 2
    assert "no rule matches the parameter odd.weight" in capsys.readouterr().err
    command = ["plan", "--replicate-unknown", "--model", str(stored(tmp_path))]
    assert main([*command, "--source", "tp=2", "--destination", "tp=1"]) == 0
    said = capsys.readouterr().out.splitlines()[1]
    assert said == "whole on every rank, for no rule knows them: odd.weight, 50.0% of the bytes"


def stored(folder: Path) -> Path:
    """A checkpoint with one tensor that a rule knows and one that none does."""
    head = {n: {"dtype": "F32", "shape": [2, 2], "data_offsets": [at, at + 16]} for n, at in KNOWN_AND_NOT}
    data = json.dumps(head).encode()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    path = folder / "model.safetensors"
    path.write_bytes(len(data).to_bytes(8, "little") + data + bytes(32))
    return path


KNOWN_AND_NOT = [("model.embed_tokens.weight", 0), ("odd.weight", 16)]


def test_heads_that_do_not_divide_are_refused_where_the_engine_would() -> None:
    def one(sizes: str, part: str, **config: int) -> None:
        manifest = Manifest.from_config(small.LLAMA | {"head_dim": 6} | config).select(
            f"*.0.self_attn.{part}_proj*"
        )
        layouts(manifest, Parallelism.parse(sizes))

    for sizes, part, config, message in [
        (
            "tp=8",
            "q",
            {"num_attention_heads": 28},
            "28 num_attention_heads cannot be divided among 8 .* divisor of 28",
        ),
        ("tp=8", "o", {"num_attention_heads": 28}, "28 num_attention_heads cannot be divided among 8"),
        (
            "tp=16",
            "q",
            {},
            "16 tensor-parallel ranks are more than 8 num_attention_heads; take a divisor of 8",
        ),
        (
            "tp=7",
            "k",
            {},
            "7 tensor-parallel ranks cannot repeat 4 .* evenly; take a divisor or a multiple of 4",
        ),
        ("tp=3", "k", {"num_key_value_heads": 4}, "4 num_key_value_heads cannot be divided among 3"),
    ]:
        with pytest.raises(CommandError, match=message):
            one(sizes, part, **config)  # type: ignore[arg-type]
    one("tp=7", "q", num_attention_heads=28)


def test_heads_are_found_in_the_language_part_of_a_configuration() -> None:
    shapes = {"model.language_model.layers.0.self_attn.k_proj.weight": ((24, 24), "float32")}
    nested = {"model_type": "qwen3_vl", "text_config": {"num_attention_heads": 8, "num_key_value_heads": 2}}
    (layout,) = layouts(Manifest(shapes, config=nested), Parallelism(tp=4)).values()
    assert layout.placements == (Shard(0, segments=(Segment(24, parts=2),)),)
    with pytest.raises(CommandError, match="lacks the key 'num_attention_heads'"):
        layouts(Manifest(shapes, config={"model_type": "qwen3_vl"}), Parallelism(tp=4))


def test_numbers_in_names_mean_what_the_rule_says() -> None:
    names = [
        *("model.layers.0.x.weight", "model.layers.3.x.weight", "model.visual.blocks.31.x.weight"),
        *("vision.encoder.layers.7.x.weight", "mtp.layers.0.x.weight", "late.layers.1.x.weight"),
    ]
    manifest = Manifest(dict.fromkeys(names, ((4,), "float32")))
    rules = [
        Rule("late.layers.*", stage="last"),
        Rule("mtp.layers.{layer}.*", stage="first"),
        Rule("*.blocks.*"),
        Rule("*encoder.layers.*"),
        Rule("*"),
    ]
    placed = layouts(manifest, Parallelism(pp=4), rules)
    assert [placed[n].ranks for n in names] == [(0,), (3,), (0, 1, 2, 3), (0, 1, 2, 3), (0,), (3,)]
    deep = {
        "w.5.experts.2.a": ((4,), "float32"),
        "w.5.experts.3.a": ((4,), "float32"),
        "w.0.b": ((4,), "float32"),
    }
    rules = [Rule("w.{expert}.experts.{layer}.a"), Rule("w.*")]
    placed = layouts(Manifest(deep), Parallelism(pp=2, ep=3, dp=3), rules)  # layers 0 to 3, experts 0 to 5
    assert (placed["w.5.experts.2.a"].ranks, placed["w.5.experts.3.a"].ranks) == ((5,), (5,))


def test_rules_of_packed_repeated_and_padded_dimensions() -> None:
    config = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 3, "groups": 2}
    shapes = {"qkv": (24, 2), "gate_up": (2, 12, 5), "mamba": (16, 1), "pad": (3, 10)}
    manifest = Manifest({n: (s, "float32") for n, s in shapes.items()}, config=config)
    rules = [
        Rule(
            "qkv", tp=0, segments=("num_attention_heads * head_dim", *["num_key_value_heads * head_dim"] * 2)
        ),
        Rule("gate_up", tp=1, segments=2),
        Rule("mamba", tp=0, segments=("4 * 2", "groups * 4")),
        Rule("pad", tp=1, multiple=2),
    ]
    placed = layouts(manifest, Parallelism(tp=4), rules)

    def held(name: str, dim: int) -> list[list[tuple[int, int]]]:
        return [[(p.box.start[dim], p.box.stop[dim]) for p in placed[name].pieces(r)] for r in range(4)]

    assert held("qkv", 0) == [
        [(0, 3), (12, 15), (18, 21)],
        [(3, 6), (12, 15), (18, 21)],
        [(6, 9), (15, 18), (21, 24)],
        [(9, 12), (15, 18), (21, 24)],
    ]
    assert held("gate_up", 1)[1] == [(2, 4), (8, 10)]
    assert held("mamba", 0)[3] == [(6, 8), (12, 16)]
    assert held("pad", 1) == [[(0, 4)], [(4, 8)], [(8, 10)], []]  # 16 of which 10 are there
    with pytest.raises(CommandError, match=r"segments \('5', 3\) add up to 8, dimension 0 has 24"):
        layouts(manifest.select("qkv"), Parallelism(tp=4), [Rule("qkv", tp=0, segments=("5", 3))])
    with pytest.raises(CommandError, match="12 elements are no 5 equal parts"):
        layouts(manifest.select("gate_up"), Parallelism(tp=4), [Rule("gate_up", tp=1, segments=5)])


@pytest.mark.parametrize(
    "field", [f for f in fields(Rule) if f.name not in ("pattern", "shape")], ids=lambda f: f.name
)
def test_no_field_of_a_rule_is_forgotten_where_layouts_are_shared(field: Any) -> None:
    """Two tensors alike but for one field of their rules have layouts of their own."""
    other = {
        "tp": 1, "ep": 0, "units": 2, "padded": True, "stage": "last", "fsdp": 1, "segments": 2, "repeat": False,
        "multiple": 3,
    }[field.name]  # fmt: skip
    base = {"tp": 0, "units": 4} if field.name == "repeat" else {"tp": 0}
    rules = [Rule("a", **base), Rule("b", **(base | {field.name: other}))]  # type: ignore[arg-type]
    manifest = Manifest(dict.fromkeys("ab", ((8, 8), "float32")), config={"num_hidden_layers": 2})
    side = ModelLayouts(manifest, Parallelism(tp=2, pp=2), rules, padded_vocab=20)
    assert side.layout("a") is not side.layout("b")
