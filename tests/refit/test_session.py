# SPDX-License-Identifier: Apache-2.0
"""`Refit`: cases from the field, refusals before any byte moves, versions, subsets, casts."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nccl_m2n import (
    Box,
    DisagreementError,
    Layout,
    LayoutError,
    LocalTransport,
    Mesh,
    Parameter,
    Piece,
    PlanError,
    Refit,
    Segment,
    Shard,
    Topology,
    TransportError,
)
from nccl_m2n.models import Manifest
from nccl_m2n.sharding import Parallelism, layouts
from nccl_m2n.storage import vllm

from .sessions import assert_holds, copies, holds, moved, needs, refit, sharded, together, values

FOUR, EIGHT = range(4), range(4, 8)


# --- Cases from the field ---


@pytest.mark.parametrize("zeroed", [False, True])
def test_vocabulary_of_32001_in_32064_rows(zeroed: bool) -> None:
    full = values((32001, 3), np.int32)
    manifest = Manifest({"model.embed_tokens.weight": (full.shape, "int32")}, config={"model_type": "llama"})
    name, array = "model.embed_tokens.weight", np.full((4, 8016, 3), -1, np.int32)
    destination = {
        4 + r: vllm(manifest, Parallelism(tp=4), 4 + r, {name: array[r]}, start_rank=4, zero_padding=zeroed)
        for r in range(4)
    }
    moved(holds(sharded(full.shape, FOUR), full, name), destination)
    rows = array.reshape(-1, 3)
    assert rows.shape == (32064, 3)
    assert np.array_equal(rows[:32001], full)
    assert (rows[32001:] == (0 if zeroed else -1)).all()


def test_vocabulary_of_151552_over_six_ranks() -> None:
    full = values((151552, 2), np.int32)
    source, destination = sharded(full.shape, range(4)), sharded(full.shape, range(4, 10))
    assert [destination.local_shape(r)[0] for r in (4, 8, 9)] == [25259, 25259, 25257]
    wanted = needs(destination, np.int32)
    moved(holds(source, full), wanted)
    assert_holds(wanted, destination, full)


def test_a_tensor_larger_than_staging() -> None:
    """129280 × 7168 through 256 MiB, at a hundredth of the width: 2.3 MiB through 64 KiB."""
    full = values((12928, 45), np.int32)
    destination = sharded(full.shape, range(4, 7), 1)  # columns: nothing lies ready, all is staged
    wanted = needs(destination, np.int32)
    made = moved(holds(sharded(full.shape, range(4), 1), full), wanted, staging_bytes=64 << 10)
    assert_holds(wanted, destination, full)
    assert int(made.plan.staging.max()) <= 64 << 10
    assert made.plan.rounds > 10


def test_129280_by_7168_is_planned_within_its_staging() -> None:
    from nccl_m2n import Topology, Transfer, plan

    shape = (129280, 7168)
    transfer = Transfer(sharded(shape, range(8)), sharded(shape, range(8, 16), 1), "bfloat16", "w")
    made = plan(transfer, Topology.regular(16, 8), staging_bytes=256 << 20)
    made.check()
    assert int(made.staging.max()) <= 256 << 20


def test_tied_embedding_of_the_first_and_the_last_stage() -> None:
    manifest = Manifest.from_config(
        Manifest.named("Qwen2.5-7B").config | {"tie_word_embeddings": True, "num_hidden_layers": 4}
    )
    name, sides = "model.embed_tokens.weight", Parallelism(tp=2, pp=4)
    source, destination = layouts(manifest, sides)[name], layouts(manifest, Parallelism(tp=4), start_rank=8)
    assert set(source.ranks) == {0, 1, 6, 7}
    full = values((152064, 1), np.int32)
    narrow, wide = Layout(full.shape, source.mesh, source.placements), destination[name]
    wide = Layout(full.shape, wide.mesh, wide.placements)
    wanted = needs(wide, np.int32)
    moved(holds(narrow, full), wanted)
    assert_holds(wanted, wide, full)


def test_prediction_layers_on_one_side_only() -> None:
    full, source, destination = values((8, 3)), sharded((8, 3), FOUR), sharded((8, 3), EIGHT)
    have = together(holds(source, full), holds(source, full, "model.layers.61.eh_proj.weight"))
    wanted = needs(destination)
    with pytest.raises(
        LayoutError, match="'model.layers.61.eh_proj.weight'.*not on the destination side.*skip"
    ):
        refit(have, wanted)
    made = moved(have, wanted, missing="skip")
    assert [t.name for t in made.transfers] == ["w"]
    assert_holds(wanted, destination, full)
    with pytest.raises(LayoutError, match="'extra'.*not on the source side"):
        refit(holds(source, full), together(needs(destination), needs(destination, name="extra")))


def test_expert_0_in_two_slots_of_one_rank() -> None:
    full = values((4, 6))
    twice = Layout.from_pieces(
        (4, 6), {4: [Piece(Box((0, 0), (4, 6)), (0, 0)), Piece(Box((0, 0), (4, 6)), (8, 0))]}
    )
    wanted = needs(twice, fill=-1)
    moved(holds(sharded((4, 6), FOUR), full), wanted)
    slots = wanted[4][0].array.reshape(3, 4, 6)
    assert np.array_equal(slots[[0, 2]], [full, full])
    assert (slots[1] == -1).all()


def blocks_of(layout: Layout, shape: tuple[int, int]) -> Layout:
    """Of blocks of 128 rows and columns each rank holds those that it has a part of."""
    pieces = {
        rank: [
            Box(tuple(a // 128 for a in piece.box.start), tuple(-(-b // 128) for b in piece.box.stop))
            for piece in layout.pieces(rank)
        ]
        for rank in layout.ranks
    }
    return Layout.from_pieces(shape, pieces)


def test_scales_whose_shards_end_inside_a_block() -> None:
    """576 rows over 4 ranks: 144 rows each, so that ranks 0 and 1 both have rows of block 1."""
    weight = sharded((576, 256), EIGHT)
    scales = blocks_of(weight, (5, 2))
    assert [scales.local_shape(r)[0] for r in EIGHT] == [2, 2, 2, 2]
    full, name = values((5, 2), np.float32), "w_scale_inv"
    wanted = needs(scales, np.float32, name)
    moved(holds(blocks_of(sharded((576, 256), range(3)), (5, 2)), full, name), wanted)
    assert_holds(wanted, scales, full, name)


@pytest.mark.parametrize(
    "dtype", [np.bool_, np.int8, np.uint16, np.int64, np.complex64, ml_dtypes.float8_e4m3fn]
)
def test_any_type_goes_as_bytes(dtype: Any) -> None:
    full = values((7, 5), np.uint8).astype(dtype)
    destination = sharded(full.shape, EIGHT, 1)
    wanted = needs(destination, dtype)
    moved(holds(sharded(full.shape, FOUR), full), wanted)
    assert_holds(wanted, destination, full)


def test_a_scalar_buffer() -> None:
    full = np.array(41, np.int64)
    wanted = needs(copies((), 1, 2))
    moved(holds(copies((), 0), full), wanted)
    assert_holds(wanted, copies((), 1, 2), full)


def test_two_destination_names_for_one_array() -> None:
    full, source, destination = values((8, 3)), sharded((8, 3), FOUR), sharded((8, 3), EIGHT)
    arrays = {r: np.zeros(destination.local_shape(r), int) for r in EIGHT}
    wanted = {r: [Parameter(n, destination, a) for n in ("embed", "head")] for r, a in arrays.items()}
    have = together(holds(source, full, "embed"), holds(source, full, "head"))
    with pytest.raises(
        LayoutError, match="apart from all others in memory, got destination array 'head' over"
    ):
        refit(have, wanted)
    one = {r: held[1:] for r, held in wanted.items()}
    assert moved(have, one, missing="skip").skipped == {"source": ("embed",), "destination": ()}
    assert_holds(one, destination, full, "head")


def test_a_destination_that_holds_a_slice_only() -> None:
    full = values((8, 6))
    part = Layout.from_pieces((8, 6), {4: [Box((2, 1), (5, 4))], 5: [Box((6, 0), (8, 2))]})
    wanted = needs(part)
    moved(holds(sharded((8, 6), FOUR), full), wanted)
    assert_holds(wanted, part, full)


def test_fp8_weights_travel_with_their_scales() -> None:
    weight = values((256, 8), np.uint8).view(ml_dtypes.float8_e4m3fn)
    scale, shape = values((2, 1), np.float32), (256, 8)
    source, destination = sharded(shape, range(2)), copies(shape, 2)
    names = ("w", "w_scale_inv")
    have = together(holds(source, weight), holds(blocks_of(source, (2, 1)), scale, names[1]))
    wanted = together(needs(destination, weight.dtype), needs(copies((2, 1), 2), np.float32, names[1]))
    moved(have, wanted)
    assert_holds(wanted, destination, weight)
    assert_holds(wanted, copies((2, 1), 2), scale, names[1])


# --- Casts ---

FLOATS = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]
WIDE = {np.float64: 4, np.float32: 3, ml_dtypes.bfloat16: 3, np.float16: 2, ml_dtypes.float8_e4m3fn: 1}
NARROWER = {(a, b) for a in FLOATS for b in FLOATS if WIDE[a] > WIDE[b]}  # range, not precision


@pytest.mark.parametrize("a", FLOATS)
@pytest.mark.parametrize("b", FLOATS)
def test_casts_in_flight(a: Any, b: Any) -> None:
    full = (values((9, 4), np.float64) / 7).astype(a)
    destination = sharded(full.shape, EIGHT, 1)
    wanted = needs(destination, b)
    have, name = holds(sharded(full.shape, FOUR), full), np.dtype(b).name
    for cast in (False, True) if (a, b) in NARROWER else (False,) if a != b else ():
        with pytest.raises(LayoutError, match=f"'w'.*{np.dtype(a).name} and then {name}"):
            refit(have, wanted, cast=cast)
    made = moved(have, wanted, cast=name if (a, b) in NARROWER else True)
    assert_holds(wanted, destination, full.astype(b))
    size = min(np.dtype(a).itemsize, np.dtype(b).itemsize)
    assert made.plan.traffic().network_bytes == 36 * size


def test_integers_are_not_cast() -> None:
    with pytest.raises(PlanError, match="'w'.*float types that can be cast, got int64"):
        refit(holds(sharded((8,), FOUR), values((8,))), needs(sharded((8,), EIGHT), np.float32), cast=True)


def test_bfloat16_kept_as_uint16() -> None:
    full = values((8, 2), ml_dtypes.bfloat16)
    layout = sharded((8, 2), FOUR)
    have = {
        r: [Parameter("w", layout, layout.slice_global(full, r).view(np.uint16), "bfloat16")] for r in FOUR
    }
    wanted = needs(sharded((8, 2), EIGHT), np.float32)
    moved(have, wanted, cast=True)
    assert_holds(wanted, sharded((8, 2), EIGHT), full.astype(np.float32))


# --- Refusals, before any byte moves ---


def test_a_type_that_is_not_the_one_declared_by_the_others() -> None:
    layout = sharded((8, 2), FOUR)
    have = holds(layout, values((8, 2), np.float32))
    have[2] = [Parameter("w", layout, np.zeros((2, 2), np.float16))]
    with pytest.raises(DisagreementError, match="'w', source side.*float32.*rank 0-1, 3.*float16.*rank 2"):
        refit(have, needs(sharded((8, 2), EIGHT), np.float32))


def test_a_layout_that_is_not_the_one_of_the_others() -> None:
    have = holds(sharded((8, 2), FOUR), values((8, 2)))
    have[3] = holds(sharded((8, 2), FOUR, 1), values((8, 2)))[3]
    with pytest.raises(DisagreementError, match=r"'w', source side.*S\(0\).*rank 0-2.*S\(1\).*rank 3"):
        refit(have, needs(sharded((8, 2), EIGHT)))


def test_a_rank_that_does_not_declare_its_part() -> None:
    have = holds(sharded((8, 2), FOUR), values((8, 2)))
    del have[1]
    with pytest.raises(DisagreementError, match="'w', source side.*got nothing from rank 1"):
        refit(have, needs(sharded((8, 2), EIGHT)))


def test_an_empty_shard_need_not_be_declared() -> None:
    layout, full = sharded((3, 2), EIGHT), values((3, 2))
    wanted = needs(layout)
    del wanted[7]
    moved(holds(sharded((3, 2), FOUR), full), wanted)
    assert np.array_equal(np.concatenate([wanted[r][0].array for r in (4, 5, 6)]), full)


def test_an_array_whose_shape_is_not_its_layouts() -> None:
    """Such as weights that a kernel has reordered."""
    layout = sharded((8, 6), EIGHT)
    wanted = needs(layout)
    wanted[5] = [Parameter("w", layout, np.zeros((3, 4), int))]
    with pytest.raises(
        LayoutError, match=r"rank 5: tensor 'w', destination array: expected local shape \(2, 6\)"
    ):
        refit(holds(sharded((8, 6), FOUR), values((8, 6))), wanted)
    assert not any(p.array.any() for side in wanted.values() for p in side)


def test_shapes_that_differ() -> None:
    with pytest.raises(PlanError, match=r"'w'.*\(8, 2\) at the source and \(8, 3\)"):
        refit(holds(sharded((8, 2), FOUR), values((8, 2))), needs(sharded((8, 3), EIGHT)))


def test_a_name_twice() -> None:
    side = holds(sharded((8, 2), FOUR), values((8, 2)))
    with pytest.raises(LayoutError, match="rank 0-3: expected one parameter of each name, got 'w' twice"):
        refit(together(side, side), needs(sharded((8, 2), EIGHT)))


def test_a_source_with_a_hole() -> None:
    hole = Layout.from_pieces((8, 2), {0: [Box((0, 0), (3, 2))], 1: [Box((4, 0), (8, 2))]})
    with pytest.raises(PlanError, match=r"tensor 'w'.*\[3:4, 0:2\]|tensor 'w'.*none for"):
        refit(holds(hole, values((8, 2))), needs(sharded((8, 2), EIGHT)))


def test_options_that_cannot_be() -> None:
    have, wanted = holds(sharded((8, 2), FOUR), values((8, 2))), needs(sharded((8, 2), EIGHT))
    with pytest.raises(PlanError, match="expected .*missing, got 'ignore'"):
        refit(have, wanted, missing="ignore")
    with pytest.raises(LayoutError, match="a mapping from rank to parameters"):
        Refit(LocalTransport(8), have[0], wanted)
    with pytest.raises(LayoutError, match="'w'.*got neither"):
        refit({0: [Parameter("w", copies((0, 2), 0))]}, {1: [Parameter("w", copies((0, 2), 1))]})


# --- Versions and subsets ---


def test_a_torn_model_is_never_taken_for_a_whole_one() -> None:
    full, destination = values((8, 3)), sharded((8, 3), EIGHT)
    have, wanted = holds(sharded((8, 3), FOUR), full), needs(destination)
    with refit(have, wanted) as made:
        assert made.version is None
        made.run(version=3)
        assert made.version is None
        made.wait()
        assert made.version == 3
        made.wait()  # nothing under way: nothing changes
        assert made.version == 3
        for side in have.values():
            side[0].array[...] += 100
        made.run()
        assert made.version is None
        made.wait()
        assert made.version is None  # a run without a version gives none
        assert_holds(wanted, destination, full + 100)


class Breaking(LocalTransport):
    """Its peers are gone from some exchange on."""

    gone = False

    def _gather(self, messages: Any, deadline: float) -> list[bytes]:
        if self.gone:
            raise TransportError("a peer is gone")
        return super()._gather(messages, deadline)


def test_no_rank_stamps_what_one_has_not() -> None:
    transport = Breaking(8)
    have, wanted = holds(sharded((8, 3), FOUR), values((8, 3))), needs(sharded((8, 3), EIGHT))
    made = Refit(transport, have, wanted)
    made.run(version=1)
    made.wait()
    made.run(version=2)
    transport.gone = True
    with pytest.raises(TransportError, match="a peer is gone"):
        made.wait()
    assert made.version is None


def test_subsets_are_prepared_once() -> None:
    full, source, destination = values((8, 3)), sharded((8, 3), FOUR), sharded((8, 3), EIGHT)
    have = together(holds(source, full, "draft.w"), holds(source, full, "w"))
    wanted = together(needs(destination, name="draft.w"), needs(destination, name="w"))
    with refit(have, wanted) as made:
        made.run(only=["draft.w"], version=1)
        made.wait()
        assert made.version == 1
        assert made.report.tensors == 1
        assert made.verify() == ["w"]
        assert made.verify(only="draft.w") == []
        before = dict(made._subsets._kept)
        made.run(only="draft.*")
        made.wait()
        assert made._subsets._kept == before
        with pytest.raises(
            LayoutError, match="names of parameters of this refit, or patterns of them, got 'nothing.such'"
        ):
            made.run(only=["nothing.such"])
        made.run()
        made.wait()
        assert made.verify() == []


def test_report() -> None:
    full = values((8, 4), np.float32)
    made = moved(holds(sharded((8, 4), FOUR), full), needs(sharded((8, 4), EIGHT), np.float32))
    report = made.report
    assert (report.network_bytes, report.network_bytes_bound, report.tensors) == (128, 128, 1)
    assert report.share == 1.0
    assert report.seconds > 0
    assert "1 tensors, 100.0% of their bytes by Reshard" in str(report)


# --- What crosses ---


class Listening(LocalTransport):
    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self.heard: list[bytes] = []

    def exchange(self, *arguments: Any, **options: Any) -> list[bytes]:
        heard = super().exchange(*arguments, **options)
        self.heard += heard
        return heard


def test_descriptions_are_text_and_said_once() -> None:
    import json

    transport = Listening(64)
    source, destination = sharded((64, 4), range(32)), sharded((64, 4), range(32, 64), 1)
    full, names = values((64, 4)), [f"layers.{i}.weight" for i in range(50)]
    have = together(*[holds(source, full, name) for name in names])
    wanted = together(*[needs(destination, name=name) for name in names])
    Refit(transport, have, wanted, Topology.regular(64, 8))
    texts = [m for m in transport.heard if m and len(m) != 32]
    for text in texts:
        for line in text.split(b"\n"):
            json.loads(line)  # nothing that could run code
    said = [text for text in texts if b"layers.7.weight" in text]
    assert len(said) == 2  # a side's first rank speaks for all
    assert all(text.count(b'"mesh"') == 1 for text in said)  # the layout once, however many have it


def test_axis_names_do_not_make_layouts_differ() -> None:
    full = values((8, 2))
    have: dict[int, Any] = {}
    for rank in FOUR:
        layout = Layout((8, 2), Mesh(list(FOUR), names=(f"axis of {rank}",)), [Shard(0)])
        have[rank] = holds(layout, full)[rank]
    wanted = needs(sharded((8, 2), EIGHT))
    moved(have, wanted)
    assert_holds(wanted, sharded((8, 2), EIGHT), full)


def test_key_value_heads_repeated() -> None:
    heads = Layout((4, 3), Mesh(list(EIGHT)), [Shard(0, segments=(Segment(4, parts=2),))])
    full, wanted = values((4, 3)), needs(heads)
    moved(holds(sharded((4, 3), FOUR), full), wanted)
    assert_holds(wanted, heads, full)
