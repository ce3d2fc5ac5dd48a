# SPDX-License-Identifier: Apache-2.0
"""Families as transformers saves them: all of them placed, nothing silently whole, cut as its own plans cut."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from nccl_m2n import Topology, Transfer, plan
from nccl_m2n.cli import main
from nccl_m2n.cli.output import methods_data
from nccl_m2n.models import Manifest
from nccl_m2n.models.families import GENERATORS
from nccl_m2n.sharding import Parallelism, layouts
from nccl_m2n.sharding.families import RULES
from nccl_m2n.sharding.model_layouts import ModelLayouts
from tests.families import table, tiny
from tests.families.real import REAL

FAMILIES = sorted(tiny.models())
# What a configuration cannot tell, or what transformers saves otherwise than it is published.
OTHERWISE = {
    "gemma3": "published as vision_tower.vision_model.…",
    "hunyuan_v1_moe": "no description",
    "longcat_flash": "transformers makes matrices of experts that do nothing",
    "mimo_v2_flash": "no description",
}


def test_there_are_as_many_as_are_claimed() -> None:
    assert len(FAMILIES) >= 90
    assert set(RULES) - set(FAMILIES) == {"kimi_k2", "llama4_text"}
    assert set(GENERATORS) <= set(RULES)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_is_divided_in_five_ways(family: str) -> None:
    for sizes in table.SIZES:
        assert table.passed(tiny.models()[family].manifest, sizes), sizes


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_silently_whole(family: str) -> None:
    manifest = tiny.models()[family].manifest
    lost = {n: b for n, b in table.whole(manifest).items() if not table.ENGINES_OWN.search(n)}
    assert sum(lost.values()) <= 0.02 * manifest.nbytes, lost


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in OTHERWISE])
def test_its_configuration_gives_the_names_and_shapes_of_its_checkpoint(family: str) -> None:
    assert table.described(family)


_CUTS = {"colwise": 0, "colwise_gather_output": 0, "rowwise": 1}
# Where transformers cuts otherwise than vLLM and Megatron: matrices stored as (in, out), and one gathered.
_ELSEWHERE = re.compile(r"linear_attn\.out_proj|experts\.down_proj$|patch_embedding\.linear")


def test_matrices_are_cut_where_the_plans_of_transformers_cut_them() -> None:
    checked = 0
    for family in FAMILIES:
        one = tiny.models()[family]
        side = ModelLayouts(one.manifest, Parallelism())
        plan = [
            (re.compile(re.escape(k).replace(r"\*", r"\d+") + r"(\.weight)?"), v) for k, v in one.plan.items()
        ]
        for name in one.manifest:
            cut = next((_CUTS.get(v) for pattern, v in plan if pattern.fullmatch(name)), None)
            if cut is not None and not _ELSEWHERE.search(name):
                assert side.matched[name].rule.tp == cut, (family, name)
                checked += 1
    assert checked > 1_200


@pytest.mark.parametrize(
    "family", ["phi3", "mixtral", "granitemoehybrid", "qwen3_next", "gpt2", "qwen3_vl", "jamba"]
)
def test_every_byte_of_it_arrives(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the words of its configuration alone: weights made up, moved, and compared where they arrive."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tiny.models()[family].manifest.config))
    sizes = ["--source", "tp=2,pp=2", "--destination", "tp=4", "--steps", "1"]
    assert main(["refit", "--model", str(path), *sizes]) == 0
    assert "made-up weights" in capsys.readouterr().out.splitlines()[0]


def test_a_tensor_cut_by_segments_is_what_the_engine_would_load() -> None:
    """Phi-3's packed matrix over 8 ranks of 8 query and 4 key-value heads, sliced by plain NumPy."""
    one = tiny.models()["phi3"].manifest
    name = "model.layers.2.self_attn.qkv_proj.weight"
    whole = np.arange(one[name].size).reshape(one[name].shape)
    q, k, v = np.split(whole, [8 * 16, 8 * 16 + 4 * 16])
    layout = ModelLayouts(one, Parallelism(tp=8)).layout(name)
    for rank in range(8):
        expected = [
            q[16 * rank : 16 * (rank + 1)],
            *(p[16 * (rank // 2) : 16 * (rank // 2 + 1)] for p in (k, v)),
        ]
        assert np.array_equal(layout.slice_global(whole, rank), np.concatenate(expected))


def test_the_page_has_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    assert "\n".join(table.rows()) in page, (
        "run python -m tests.families.table, and put its lines into docs/models.md"
    )


def test_a_new_family_touches_models_sharding_and_storage_only() -> None:
    """No other room names one."""
    package = Path(__file__).parents[2] / "nccl_m2n"
    names = re.compile(
        r"""["'](?:""" + "|".join(f for f in RULES if "_" in f or f in ("llama", "bert")) + r""")["']"""
    )
    for room in ("refit", "execution", "planning", "layout", "transport", "simulation"):
        for path in (package / room).rglob("*.py"):
            assert names.search(path.read_text(encoding="utf-8")) is None, path


@pytest.mark.parametrize("name", REAL)
def test_real_configurations_have_their_parameters(name: str) -> None:
    config, billions = REAL[name]
    count = sum(info.size for info in Manifest.from_config(config).values())
    assert count == pytest.approx(billions * 1e9, rel=1e-3)


@pytest.mark.parametrize("name", ["GPT-OSS-120B", "Llama-4-Scout", "Llama-4-Maverick"])
def test_real_models_cross_the_network_once(name: str) -> None:
    manifest = Manifest.from_config(REAL[name][0])
    trainer, generator = (
        Parallelism.parse("tp=2,pp=4,ep=8,etp=1,dp=4"),
        Parallelism.parse("tp=8,dp=4,ep=32,order=vllm"),
    )
    before, after = layouts(manifest, trainer), layouts(manifest, generator, start_rank=trainer.size)
    transfers = [Transfer(before[n], after[n], info.dtype, n) for n, info in manifest.items()]
    made = plan(transfers, Topology.regular(trainer.size + generator.size, 8))
    reshard = methods_data(made)["reshard"]
    assert reshard["network_bytes"] == reshard["network_bytes_bound"] > 0
