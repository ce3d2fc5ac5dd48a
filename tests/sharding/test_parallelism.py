# SPDX-License-Identifier: Apache-2.0
"""Parallel sizes: rank orders, expert grids, pipeline stages, text and errors."""

from __future__ import annotations

import re

import pytest

from nccl_m2n.errors import CommandError
from nccl_m2n.sharding import Parallelism


def test_megatron_order_is_tp_cp_dp_pp() -> None:
    sizes = Parallelism(tp=2, cp=2, dp=2, pp=2)
    assert sizes.size == 16
    assert sizes.dense(0).tolist() == [[[[0, 1], [2, 3]]], [[[4, 5], [6, 7]]]]  # dp, fsdp, cp, tp
    assert sizes.dense(1, start=100)[1, 0, 0].tolist() == [112, 113]


def test_vllm_order_is_tp_pp_dp() -> None:
    sizes = Parallelism(tp=2, dp=2, pp=2, order="vllm")
    assert sizes.dense(0).ravel().tolist() == [0, 1, 4, 5]
    assert sizes.dense(1).ravel().tolist() == [2, 3, 6, 7]
    assert sizes.experts(1).shape == (1, 1, 1, 4)  # divided by all of a stage's ranks
    assert Parallelism(tp=2, dp=2, pp=2, ep=4, order="vllm").experts(1).shape == (1, 1, 4, 1)


def test_experts_take_the_same_ranks_another_way() -> None:
    """Megatron's expert groups: etp fastest, then ep, then the replicas, inside a pipeline stage."""
    sizes = Parallelism(tp=2, dp=4, pp=2, ep=2, etp=1)
    assert sizes.experts(0).reshape(4, 2).tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert Parallelism(tp=2, dp=4, ep=2).experts(0).reshape(2, 2, 2).tolist() == [
        [[0, 1], [2, 3]],
        [[4, 5], [6, 7]],
    ]
    assert Parallelism(fsdp=4, ep=2, dp=2).experts(0).shape == (2, 2, 2, 1)


@pytest.mark.parametrize(
    ("text", "size", "dp", "etp"),
    [
        ("", 1, 1, 1),
        ("ep=4", 4, 4, 1),
        ("pp=2,ep=2", 4, 2, 1),
        ("tp=4", 4, 1, 4),
        ("tp=4,ep=4", 16, 4, 4),
        ("tp=4,ep=4,etp=1", 4, 1, 1),
        ("tp=2,cp=2,ep=2", 4, 1, 2),
        ("tp=8,order=vllm", 8, 1, 8),
        ("tp=4,ep=8,order=vllm", 8, 2, 1),
        ("tp=8, ep=2, order=vllm", 8, 1, 4),
        ("fsdp=8,tp=2", 16, 1, 2),
    ],
)
def test_what_is_left_out_is_filled_in(text: str, size: int, dp: int, etp: int) -> None:
    sizes = Parallelism.parse(text)
    assert (sizes.size, sizes.dp, sizes.etp) == (size, dp, etp)
    assert Parallelism.parse(str(sizes)) == sizes


def test_stages_own_layers() -> None:
    assert [len(s) for s in Parallelism(pp=4).stages(10)] == [3, 3, 2, 2]
    assert [len(s) for s in Parallelism(pp=4, order="vllm").stages(10)] == [
        2,
        3,
        3,
        2,
    ]  # vLLM's get_pp_indices
    assert [len(s) for s in Parallelism(pp=4, order="vllm").stages(61)] == [15, 15, 16, 15]
    assert Parallelism.parse("pp=3,layers=1:2:1").stages(4) == ((0,), (1, 2), (3,))
    interleaved = Parallelism.parse("pp=2,layers=0-1+4-5:2-3+6-7")
    assert interleaved.stages(8) == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert Parallelism.parse(str(interleaved)) == interleaved
    assert Parallelism().stages(0) == ((),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "tp=4,xp=2",
            "'xp' in 'tp=4,xp=2' is no parallel option; known are tp, pp, ep, etp, cp, dp, fsdp, order",
        ),
        ("tp", "'tp' in 'tp' has no value; write tp=NUMBER"),
        ("tp=", "'tp=' in 'tp=' has no value"),
        ("tp=two", "tp=two in 'tp=two': expected a whole number"),
        ("tp=0", "expected a whole number from 1 to 1048576 as tp, got 0"),
        ("tp=2,tp=4", "tp is given twice"),
        ("order=torch", "expected one of megatron, vllm as order, got 'torch'"),
        ("tp=2,dp=2,ep=3", "ep × etp = 3 × 2 ranks, which do not divide the 4 of a stage"),
        ("fsdp=3,ep=2,dp=2", "do not divide the 3 of a replica"),
        ("pp=2,layers=1:2:1", "layers=1:2:1 describes 3 stages, pp is 2"),
        ("pp=2,layers=1:x", "layers=1:x in 'pp=2,layers=1:x': expected 10:11:11 or"),
    ],
)
def test_bad_options_are_named(text: str, message: str) -> None:
    with pytest.raises(CommandError, match=re.escape(message)):
        Parallelism.parse(text)


def test_too_few_layers_or_ranks() -> None:
    with pytest.raises(CommandError, match="pp=8 asks for 8 pipeline stages of a model with 6 layers"):
        Parallelism(pp=8).stages(6)
    for layers in ("1:2", "0-1+1-1:2-3", "0-1:3-3"):
        with pytest.raises(CommandError, match="does not give each of the 4 layers to one stage"):
            Parallelism.parse(f"pp=2,layers={layers}").stages(4)
    Parallelism(tp=4).require(4, "source")
    with pytest.raises(CommandError, match=r"the destination tp=4,pp=2,dp=2 needs 16 ranks, there are 8"):
        Parallelism(tp=4, dp=2, pp=2).require(8, "destination")
