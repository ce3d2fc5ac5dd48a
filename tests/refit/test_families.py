# SPDX-License-Identifier: Apache-2.0
"""Whole small models of each family class from every source parallelism to every destination's, through `Refit`.

The storage of both sides is written and read by the plain NumPy code of `small`; every element of a model has
another value, and what arrives is compared bit for bit with what that code would have put there.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from nccl_m2n import LocalTransport, Refit, Topology
from tests.storage import small
from tests.storage.sides import Side, fsdp_side, megatron_side, vllm_side

RANKS = 16  # eight for each side
CONFIGS = {
    "dense": small.LLAMA | {"vocab_size": 104},
    "dense, tied, few key-value heads, biases": small.QWEN2,
    "moe": small.QWEN3_MOE | {"vocab_size": 104},
    "mla": small.DEEPSEEK | {"vocab_size": 104},
    "gpt_oss": small.GPT_OSS | {"vocab_size": 104, "unstack": True},
}
# Megatron-Core: tp, pp, ep, etp, data-parallel ranks, how experts are stored. FSDP2: shards, replicas, tp.
SOURCES: dict[str, tuple[Any, ...]] = {
    "megatron tp4 dp2": ("megatron", 4, 1, 1, 4, 2, "grouped"),
    "megatron tp2 pp2 ep2": ("megatron", 2, 2, 2, 2, 2, "grouped"),
    "megatron pp4 ep2 etp1": ("megatron", 1, 4, 2, 1, 2, "sequential"),
    "megatron tp2 ep4 etp1": ("megatron", 2, 1, 4, 1, 2, "legacy"),
    "megatron ep8": ("megatron", 1, 1, 8, 1, 8, "grouped"),
    "megatron tp4 pp2 ep4 etp1": ("megatron", 4, 2, 4, 1, 1, "grouped"),
    "fsdp8": ("fsdp", 8, 1, 1),
    "hsdp 3 × 2": ("fsdp", 3, 2, 1),
}
# vLLM: tp, pp, dp, whether experts are parallel.
DESTINATIONS: dict[str, tuple[Any, ...]] = {
    "vllm tp8": ("vllm", 8, 1, 1, False),
    "vllm tp2 dp4": ("vllm", 2, 1, 4, False),
    "vllm tp4 dp2, experts parallel": ("vllm", 4, 1, 2, True),
    "vllm tp2 pp2 dp2": ("vllm", 2, 2, 2, False),
    "vllm tp1": ("vllm", 1, 1, 1, False),
    "megatron tp2 pp2": ("megatron", 2, 2, 1, 2, 1, "grouped"),
}


def has(config: dict[str, Any], spec: tuple[Any, ...]) -> bool:
    """Whether a family can be kept so: Megatron has no more tensor-parallel ranks than query groups,
    and GPT-OSS is younger than its oldest way to store experts."""
    groups, legacy = config.get("num_key_value_heads", 8), spec[-1] == "legacy" and "unstack" in config
    return spec[0] != "megatron" or (groups % spec[1] == 0 and not legacy)


@lru_cache(maxsize=64)
def side(family: str, spec: tuple[Any, ...], start: int) -> tuple[Side, dict[int, small.Arrays]]:
    """One side, and a copy of the storage as it should be."""
    config = CONFIGS[family]
    kind, *sizes = spec
    full = model(family)
    if kind == "megatron":
        made = megatron_side(config, full, *sizes, start)
    elif kind == "fsdp":
        made = fsdp_side(config, full, *sizes, start)
    else:
        made = vllm_side(config, full, *sizes, start)
    for state in made.states.values():  # what Megatron has not is left out on both sides
        for name in [n for n in state if n.endswith("shared_head.head.weight")]:
            del state[name]
    return made, {rank: {name: a.copy() for name, a in state.items()} for rank, state in made.states.items()}


@lru_cache(maxsize=8)
def model(family: str) -> small.Arrays:
    config = CONFIGS[family]
    _, full = small.full_model(config)
    copy = f"model.layers.{config['num_hidden_layers']}.embed_tokens.weight"
    if copy in full:  # Megatron keeps one array for both
        full[copy] = full["model.embed_tokens.weight"]
    return full


PAIRS = [
    pytest.param(family, source, destination, id=f"{family}: {a} → {b}")
    for family, config in CONFIGS.items()
    for a, source in SOURCES.items()
    for b, destination in DESTINATIONS.items()
    if has(config, source) and has(config, destination)
]


@pytest.mark.parametrize(("family", "source", "destination"), PAIRS)
def test_every_byte_arrives_by_reshard(family: str, source: Any, destination: Any) -> None:
    trainer, _ = side(family, source, 0)
    generator, expected = side(family, destination, 8)
    for state in generator.states.values():
        for array in state.values():
            array.fill(-1)
    topology = Topology.regular(RANKS, 4)
    with Refit(LocalTransport(RANKS), trainer.parameters, generator.parameters, topology) as refit:
        refit.run(version=7)
        assert refit.version is None
        refit.wait(timeout=50)
        assert refit.version == 7
        assert refit.report is not None
        assert refit.report.share == 1.0
        assert refit.report.network_bytes == refit.report.network_bytes_bound
    for rank, state in expected.items():
        for name, array in state.items():
            got = generator.states[rank][name]
            assert array.tobytes() == got.tobytes(), f"{name} on rank {rank}: {np.argwhere(array != got)[:3]}"


def test_there_are_forty_pairs_of_each_class() -> None:
    for kind in ("dense", "moe", "mla"):
        assert sum(p.values[0].startswith(kind) for p in PAIRS) >= 40
