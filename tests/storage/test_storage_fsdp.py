# SPDX-License-Identifier: Apache-2.0
"""FSDP2's and HSDP's storage, with TP, with stacked experts, and GPT-OSS as published."""

from __future__ import annotations

import numpy as np
import pytest

from nccl_m2n.errors import CommandError
from nccl_m2n.sharding import Parallelism
from nccl_m2n.storage import fsdp
from tests.storage import small
from tests.storage.sides import Side, check_views, refit, vllm_side


@pytest.mark.parametrize(("tp", "shards", "dp"), [(1, 4, 1), (1, 3, 2), (2, 4, 1), (2, 5, 2), (4, 2, 1)])
def test_with_tensor_parallelism_and_replicas(tp: int, shards: int, dp: int) -> None:
    config = small.LLAMA | {"vocab_size": 104}
    manifest, full = small.full_model(config)
    rows = {n: 1 for n in manifest if n.endswith(("o_proj.weight", "down_proj.weight"))}
    columns = {n: 0 for n in manifest if n not in rows and not n.endswith("norm.weight")}
    sides = Parallelism(tp=tp, fsdp=shards, dp=dp)
    states = {
        4 + r: small.fsdp_state(full, shards, r // tp % shards, rows | columns, tp, r % tp)
        for r in range(sides.size)
    }
    trainer = Side(states, {r: fsdp(manifest, sides, r, s, start_rank=4) for r, s in states.items()})
    check_views(trainer, full)
    refit(trainer, lambda values: vllm_side(config, values, 2, 1, 2, False, 0), full)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(("ep", "shards"), [(1, 3), (1, 4), (2, 4), (4, 8)])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_with_stacked_experts(family: str, ep: int, shards: int, dim: int) -> None:
    """Experts over ep on dimension 0, and then over what is left of the FSDP ranks on dimension 0 or 1."""
    config = small.QWEN3_MOE if family == "qwen3_moe" else small.GPT_OSS | {"unstack": True}
    manifest, full = small.full_model(config)
    sides, inner = Parallelism(fsdp=shards, ep=ep), shards // ep
    states = {}
    for rank in range(shards):
        states[8 + rank] = small.fsdp_state(full, shards, rank, {}, 1, 0)
        for name in [n for n in states[8 + rank] if ".experts." in n]:
            del states[8 + rank][name]
        for name, array in small.stacked(full, 8).items():
            mine, shard = small.cut(array, 0, rank % ep, ep), rank // ep
            chunk = -(-mine.shape[dim] // inner)
            at = slice(shard * chunk, (shard + 1) * chunk)
            states[8 + rank][name] = (mine[at] if dim == 0 else mine[:, at]).copy()
    parameters = {r: fsdp(manifest, sides, r, s, start_rank=8, stacked_dim=dim) for r, s in states.items()}
    trainer = Side(states, parameters)
    check_views(trainer, full)
    refit(trainer, lambda values: vllm_side(config, values, 2, 1, 2, True, 0), full)


def test_gpt_oss_stacked_as_published() -> None:
    config = small.GPT_OSS
    manifest, full = small.full_model(config)
    sides = Parallelism(fsdp=3)
    states = {8 + r: small.fsdp_state(full, 3, r, {}, 1, 0) for r in range(3)}
    trainer = Side(states, {r: fsdp(manifest, sides, r, s, start_rank=8) for r, s in states.items()})
    check_views(trainer, full)
    for destination in [(4, 1, 1, False), (2, 1, 2, True), (2, 2, 1, True)]:
        refit(trainer, lambda values, d=destination: vllm_side(config, values, *d, 0), full)


def test_bad_storage_is_refused() -> None:
    manifest, full = small.full_model(small.QWEN3_MOE)
    state = small.stacked(full, 8)
    with pytest.raises(CommandError, match="stacked experts need stacked_dim"):
        fsdp(manifest, Parallelism(fsdp=1), 0, state)
    with pytest.raises(CommandError, match="not divided by tensor parallelism, got etp=2"):
        fsdp(manifest, Parallelism(fsdp=2, tp=2), 0, state, stacked_dim=0)
    name = next(n for n in state if n.endswith("experts.gate_up_proj"))
    with pytest.raises(CommandError, match=rf"{name} on rank 0: expected \(8, 32, 24\), got \(8, 3\)"):
        fsdp(manifest, Parallelism(), 0, state | {name: np.zeros((8, 3))}, stacked_dim=0)
    name = "model.layers.0.self_attn.q_proj.weight"
    with pytest.raises(CommandError, match=rf"{name} on rank 0: expected \(24, 24\).* got \(48, 24\)"):
        fsdp(manifest, Parallelism(fsdp=2), 0, {name: full[name]})
