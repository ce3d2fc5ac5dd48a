# SPDX-License-Identifier: Apache-2.0
"""Checkpoints and configurations from strangers: an error in one line, soon, whatever is in them."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nccl_m2n.cli import main
from nccl_m2n.errors import CommandError
from nccl_m2n.models import Manifest
from nccl_m2n.models.catalogue import MODELS
from nccl_m2n.models.checkpoint import Checkpoint
from nccl_m2n.models.families import GENERATORS
from tests.families import tiny

GOOD = {
    "b": {"dtype": "F32", "shape": [3, 5], "data_offsets": [0, 60]},
    "a": {"dtype": "BF16", "shape": [7], "data_offsets": [60, 74]},
}
DEEP = "[" * 100_000


def write(path: Path, header: object, data: int = 74) -> Path:
    text = header if isinstance(header, str) else json.dumps(header)
    head = text.encode("utf-8", "surrogatepass")
    path.write_bytes(len(head).to_bytes(8, "little") + head + bytes(data))
    return path


def entry(**changes: object) -> dict[str, object]:
    return {**GOOD, "a": {**GOOD["a"], **changes}}


HEADERS: dict[str, object] = {
    "overlapping": entry(data_offsets=[50, 64]),
    "a gap": entry(data_offsets=[62, 76]),
    "bytes behind": {"b": GOOD["b"]},
    "twice": json.dumps(GOOD)[:-1] + ', "b": {}}',
    "infinite": entry(shape=[float("inf")]),
    "not a number": entry(data_offsets=[60, float("nan")]),
    "dtype is a list": entry(dtype=["BF16"]),
    "dtype is null": entry(dtype=None),
    "shape of floats": entry(shape=[7.0]),
    "shape of bools": entry(shape=[True], dtype="U8"),
    "negative": entry(shape=[-7, -1]),
    "shape is text": entry(shape="7"),
    "shape is huge": entry(shape=[0, 10**30]),
    "number of many digits": json.dumps(GOOD).replace("60", "6" * 10_000),
    "too many dimensions": entry(shape=[1] * 9 + [7]),
    "offsets are three": entry(data_offsets=[60, 74, 80]),
    "name with NUL": {**GOOD, "x\0": {"dtype": "F32", "shape": [0], "data_offsets": [74, 74]}},
    "name of two lines": {**GOOD, "x\ny": {"dtype": "F32", "shape": [0], "data_offsets": [74, 74]}},
    "name that cannot be printed": json.dumps({**GOOD, "\ud800": 1}),
    "not UTF-8": "\udcff",
    "nested": '{"a": ' + DEEP,
    "closed and nested": '{"a": ' + DEEP + "]" * 100_000 + "}",
    "no object": "[]",
}


@pytest.mark.parametrize("kind", HEADERS)
def test_headers(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(write(tmp_path / "model.safetensors", HEADERS[kind]), capsys)


CONFIGS: dict[str, Any] = {
    "layers without end": {"num_hidden_layers": 10**8},
    "experts without end": {"model_type": "qwen3_moe", "num_experts": 10**12, "moe_intermediate_size": 8},
    "no heads": {"num_attention_heads": 0},
    "no key-value heads": {"num_key_value_heads": 0},
    "no width": {"hidden_size": 0},
    "width is text": {"hidden_size": "4096"},
    "width is a list": {"hidden_size": [4096]},
    "width is true": {"hidden_size": True},
    "width is infinite": {"hidden_size": float("inf")},
    "width is no number": {"hidden_size": float("nan")},
    "width has many digits": {"hidden_size": 10**40},
    "negative": {"vocab_size": -1},
    "family is a list": {"model_type": ["llama"]},
    "family is a mapping": {"model_type": {}},
    "no family": {"model_type": None},
    "dtype is a list": {"torch_dtype": ["float32"]},
    "dtype is a mapping": {"torch_dtype": {"a": 1}},
    "dtype is unknown": {"torch_dtype": "auto"},
    "dtype is objects": {"torch_dtype": "O"},
    "bias is text": {"attention_bias": "no"},
    "dense layers are a number": {"model_type": "qwen3_moe", "num_experts": 2, "mlp_only_layers": 3},
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_configurations(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MODELS["Llama-3.1-8B"] | CONFIGS[kind]))
    refused(path, capsys)


@pytest.mark.parametrize("text", ['{"a": ' + DEEP, '{"a": 1, "a": 2}', "\0", "", "[]", "nul"])
def test_configurations_that_are_none(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    refused(path, capsys)
    write(tmp_path / "model.safetensors", GOOD)
    refused(tmp_path, capsys)  # a checkpoint beside it is read with it


@pytest.mark.parametrize(
    "name",
    [
        "../model.safetensors",
        "/etc/passwd",
        "link.safetensors",
        "a/../../x",
        "fifo",
        "",
        ".",
        "\0",
        "x" * 5000,
        7,
        None,
        ["a"],
    ],
)
def test_indexes_that_lead_out_of_their_folder(
    name: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write(tmp_path / "model.safetensors", GOOD)
    (folder / "link.safetensors").symlink_to("../model.safetensors")
    os.mkfifo(folder / "fifo")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    refused(index, capsys)
    refused(folder, capsys)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "config.json"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["FIFO", "folder"])
def test_what_is_no_file(
    name: str, make: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / name)
    refused(tmp_path / name, capsys)
    refused(tmp_path, capsys)


@pytest.mark.parametrize("text", ["x\0y", "x" * 10_000, "\ud800", "x\ny"])
def test_names_that_no_file_can_have(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", text, "--source", "tp=1", "--destination", "tp=1"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def refused(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every reader and both commands refuse it in one line and in less than a second."""
    for read in (Manifest.load, Checkpoint.open, lambda p: Manifest.from_config(p)):
        began = time.process_time()
        with pytest.raises(CommandError) as caught:
            read(path)
        assert time.process_time() - began < 1
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 2000
    for command in ("plan", "refit"):
        assert main([command, "--model", str(path), "--source", "tp=1", "--destination", "tp=1"]) == 2
        captured = capsys.readouterr()
        assert (captured.out, captured.err.count("\n")) == ("", 1)


def test_links_within_the_cache_of_the_hub_are_followed(tmp_path: Path) -> None:
    folder, blobs = tmp_path / "snapshots" / "0a1b", tmp_path / "blobs"
    folder.mkdir(parents=True)
    blobs.mkdir()
    write(blobs / "ff00", GOOD)
    (folder / "model-1.safetensors").symlink_to("../../blobs/ff00")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys("ab", "model-1.safetensors")}))
    assert list(Manifest.load(folder)) == ["a", "b"]


# --- mutations ---

ODD: list[object] = [
    None,
    True,
    -1,
    0,
    1,
    7,
    10**9,
    10**30,
    1.5,
    float("inf"),
    "",
    "0",
    "F32",
    [],
    [1],
    {},
    {"a": 1},
]


def mutated(value: Any, rng: random.Random) -> Any:
    """The same JSON value with one part of it replaced, dropped or doubled."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key, made = rng.choice(list(value)), dict(value)
        if rng.random() < 0.15:
            del made[key]
        elif rng.random() < 0.1:
            made[rng.choice(["x", "../x", "x\0", "__metadata__"])] = made[key]
        else:
            made[key] = mutated(made[key], rng)
        return made
    if isinstance(value, list | tuple) and value and rng.random() < 0.9:
        copy = list(value)
        copy[rng.randrange(len(copy))] = mutated(rng.choice(copy), rng)
        return copy
    if isinstance(value, int) and rng.random() < 0.4:
        return value + rng.choice([-1, 1, 60, -60])
    return rng.choice(ODD)


def test_ten_thousand_mutated_headers(tmp_path: Path) -> None:
    """Each is read as a sound checkpoint, or refused; never anything else."""
    rng, path, sound, refusals = random.Random(0), tmp_path / "m.safetensors", 0, 0
    for turn in range(10_000):
        header: Any = GOOD
        for _ in range(rng.randint(1, 3)):
            header = mutated(header, rng)
        text = json.dumps(header).encode()
        if turn % 4 == 0:
            at = rng.randrange(len(text))
            text = text[:at] + bytes([rng.randrange(256)]) + text[at + 1 :]
        path.write_bytes((len(text) + (turn % 50 == 0)).to_bytes(8, "little") + text + bytes(74))
        try:
            checkpoint = Checkpoint.open(path)
        except CommandError as error:
            refusals += "\n" not in str(error)
        else:
            sound += 1
            assert sum(checkpoint.read_bytes(name).size for name in checkpoint) == 74
    assert sound > 100
    assert sound + refusals == 10_000


def test_ten_thousand_mutated_configurations() -> None:
    rng, sound, refusals = random.Random(0), 0, 0
    small = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    small |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4)
    bases: list[Any] = [
        config | {k: v for k, v in small.items() if k in config} for config in MODELS.values()
    ]
    bases += [one.manifest.config for one in tiny.models().values()]
    assert {base["model_type"] for base in bases} >= GENERATORS.keys() - {"llama4_text"}
    for _ in range(10_000):
        config: Any = rng.choice(bases)
        for _ in range(rng.randint(1, 2)):
            config = mutated(config, rng)
        config = config if isinstance(config, dict) else {"model_type": config}
        try:
            manifest = Manifest.from_config(config)
        except CommandError as error:
            refusals += "\n" not in str(error)
        else:
            sound += 1
            assert all(min(info.shape, default=0) >= 0 for info in manifest.values())
    assert min(sound, refusals) > 1_000
    assert sound + refusals == 10_000
