# SPDX-License-Identifier: Apache-2.0
"""Manifests: from configurations, by name and from safetensors files, sound and damaged."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from nccl_m2n.errors import CommandError
from nccl_m2n.models import Manifest, TensorInfo
from nccl_m2n.models.checkpoint import Checkpoint

# Tensor counts and bytes as the published checkpoints' indexes state them.
PUBLISHED = {
    "Llama-3.1-8B": (291, 16_060_522_496),
    "Llama-3.1-70B": (723, 141_107_412_992),
    "Qwen2.5-7B": (339, 15_231_233_024),
    "Qwen3-30B-A3B": (18_867, 61_064_245_248),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_and_bytes_are_the_published_ones(name: str) -> None:
    manifest = Manifest.named(name)
    assert (len(manifest), manifest.nbytes) == PUBLISHED[name]


def test_names_are_found_whatever_their_case_and_owner() -> None:
    assert dict(Manifest.named("qwen/qwen2.5_7b")) == dict(Manifest.named("Qwen2.5-7B"))


def test_unknown_model_lists_the_known_ones() -> None:
    with pytest.raises(CommandError, match=r"'Llama-9'.*Llama-3.1-8B.*DeepSeek-V3.*Kimi-K2"):
        Manifest.load("Llama-9")


def test_unknown_family_and_missing_key_are_named() -> None:
    with pytest.raises(CommandError, match=r"model_type 'qwen22'.*closest are qwen2.*known are also"):
        Manifest.from_config({"model_type": "qwen22"})
    with pytest.raises(CommandError, match="lacks the key 'hidden_size'"):
        Manifest.from_config({"model_type": "llama", "vocab_size": 8})
    with pytest.raises(CommandError, match=r"fp8: no such option .* family llama"):
        Manifest.named("Llama-3.1-8B", fp8=True)


def test_deepseek_in_fp8_has_a_scale_for_each_block() -> None:
    manifest = Manifest.named("DeepSeek-V3", fp8=True)
    assert len(manifest) == 91_991
    name = "model.layers.3.self_attn.kv_a_proj_with_mqa.weight"
    assert manifest[name] == TensorInfo((576, 7168), "float8_e4m3fn")
    assert manifest[f"{name}_scale_inv"] == TensorInfo((5, 56), "float32")
    assert manifest["model.layers.3.mlp.gate.weight"].dtype == "bfloat16"
    plain = Manifest.named("DeepSeek-V3")
    assert list(plain) == [name for name in manifest if not name.endswith("_scale_inv")]
    assert not any(".layers.61." in name for name in Manifest.named("DeepSeek-V3", mtp=False))


def test_gpt_oss_in_its_published_form_packs_two_values_to_a_byte() -> None:
    plain, packed = Manifest.named("GPT-OSS-20B"), Manifest.named("GPT-OSS-20B", mxfp4=True)
    at = "model.layers.0.mlp.experts.down_proj"
    assert plain[at].shape == (32, 2880, 2880)
    assert packed[f"{at}_blocks"] == TensorInfo((32, 2880, 90, 16), "uint8")
    assert packed[f"{at}_scales"] == TensorInfo((32, 2880, 90), "uint8")


def test_selecting_and_printing() -> None:
    part = Manifest.named("Qwen2.5-7B").select("model.layers.0.self_attn.*.bias")
    assert [info.shape for info in part.values()] == [(3584,), (512,), (512,)]
    assert repr(part) == "<Manifest Qwen2.5-7B 3 tensors, 0.00 GB>"
    assert str(part).splitlines()[1] == "model.layers.0.self_attn.q_proj.bias  bfloat16   (3584,)"


# --- safetensors files ---


def write(path: Path, tensors: dict[str, tuple[str, tuple[int, ...]]], cut: int = 0) -> Path:
    sizes = {"F32": 4, "BF16": 2, "I64": 8, "BOOL": 1, "F8_E4M3": 1}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (code, shape) in tensors.items():
        length = math.prod(shape) * sizes[code]
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [at, at + length]}
        at += length
    head = json.dumps(header).encode()
    data = len(head).to_bytes(8, "little") + head + bytes(i % 251 for i in range(at))
    path.write_bytes(data[: len(data) - cut])
    return path


TENSORS = {"b": ("F32", (3, 5)), "a": ("BF16", (7,)), "empty": ("I64", (0, 4)), "scalar": ("BOOL", ())}


def test_a_file_gives_its_manifest_and_its_bytes(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write(tmp_path / "m.safetensors", TENSORS))
    assert dict(checkpoint.manifest) == {
        "b": TensorInfo((3, 5), "float32"),
        "a": TensorInfo((7,), "bfloat16"),
        "empty": TensorInfo((0, 4), "int64"),
        "scalar": TensorInfo((), "bool"),
    }
    assert checkpoint.manifest.nbytes == 60 + 14 + 1
    assert checkpoint.read_bytes("a").tolist() == list(range(60, 74))
    assert checkpoint.read_bytes("empty").size == 0


def test_the_library_that_made_the_format_agrees(tmp_path: Path) -> None:
    numpy = pytest.importorskip("safetensors.numpy")
    arrays = {f"t{i}": np.arange(i * 7, dtype=np.float32).reshape(i, 7) for i in range(4)}
    numpy.save_file(arrays, tmp_path / "m.safetensors")
    checkpoint = Checkpoint.open(tmp_path)  # the only file of a directory
    assert {name: info.shape for name, info in checkpoint.manifest.items()} == {
        n: a.shape for n, a in arrays.items()
    }
    for name, array in arrays.items():
        assert checkpoint.read_bytes(name).tobytes() == array.tobytes()


def test_an_index_joins_its_files(tmp_path: Path) -> None:
    write(tmp_path / "one.safetensors", {"x": ("F32", (2,)), "y": ("F8_E4M3", (3,))})
    write(tmp_path / "two.safetensors", {"z": ("F32", (4,))})
    index = tmp_path / "model.safetensors.index.json"
    where = {"z": "two.safetensors", "x": "one.safetensors", "y": "one.safetensors"}
    index.write_text(json.dumps({"weight_map": where}))
    (tmp_path / "config.json").write_text('{"num_key_value_heads": 2}')
    manifest = Manifest.load(tmp_path)
    assert list(manifest) == ["z", "x", "y"]
    assert manifest["y"].dtype == "float8_e4m3fn"
    assert manifest.config == {"num_key_value_heads": 2}
    assert dict(Manifest.from_file(index)) == dict(manifest)
    index.write_text(json.dumps({"weight_map": {"w": "two.safetensors"}}))
    with pytest.raises(CommandError, match=r"places w in two.safetensors, which does not hold it"):
        Manifest.load(index)
    index.write_text(json.dumps({"weight_map": {"w": "three.safetensors"}}))
    with pytest.raises(CommandError, match=r"cannot read the checkpoint .*three.safetensors"):
        Manifest.load(index)
    index.write_text("[]")
    with pytest.raises(CommandError, match="no 'weight_map'"):
        Manifest.load(index)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"abc", "no safetensors file: it has 3 bytes"),
        (b"\x89HDF\r\n\x1a\n" + bytes(64), "no safetensors file: its first 8 bytes give a header of"),
        ((99).to_bytes(8, "little") + b"{}", "truncated: its header takes 107 bytes, the file has 10"),
        ((2).to_bytes(8, "little") + b"{x", "header cannot be read: it is not JSON"),
        ((2).to_bytes(8, "little") + b"[]", "not a JSON object"),
        ((9).to_bytes(8, "little") + b'{"a": {}}', "entry of a lacks dtype"),
        ((12).to_bytes(8, "little") + b'{"a": "\\0b"}', "it is not JSON"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(data)
    with pytest.raises(CommandError, match=message):
        Manifest.load(path)


def test_bad_entries_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"truncated: scalar ends at byte .*, the file has"):
        Manifest.load(write(tmp_path / "m.safetensors", TENSORS, cut=1))
    for entry, message in [
        ({"dtype": "F3", "shape": [1], "data_offsets": [0, 1]}, "w has dtype F3; known are BOOL"),
        (
            {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
            r"w of shape \(2,\) .* takes 8 bytes.*give 4",
        ),
    ]:
        head = json.dumps({"w": entry}).encode()
        (tmp_path / "w.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + bytes(8))
        with pytest.raises(CommandError, match=message):
            Manifest.load(tmp_path / "w.safetensors")


def test_missing_files_and_empty_directories_are_named(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"holds no model.safetensors"):
        Manifest.load(tmp_path)
    with pytest.raises(CommandError, match="cannot read the checkpoint"):
        Manifest.from_file(tmp_path / "none.safetensors")
    (tmp_path / "config.json").write_text("nonsense")
    with pytest.raises(CommandError, match="cannot read the configuration"):
        Manifest.load(tmp_path)
