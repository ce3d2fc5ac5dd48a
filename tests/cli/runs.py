# SPDX-License-Identifier: Apache-2.0
"""Running the command line in processes of its own, and checkpoints written without the package's help."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
LIMIT = 50  # seconds
CODES = {"float32": "F32", "float16": "F16", "uint8": "U8", "int64": "I64", "uint16": "BF16"}

TINY_BERT = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "vocab_size": 101,
    "hidden_size": 12,
    "intermediate_size": 26,
    "num_hidden_layers": 3,
    "num_attention_heads": 12,
    "max_position_embeddings": 17,
    "type_vocab_size": 2,
    "torch_dtype": "float32",
}


def command(*arguments: str, ranks: int | None = None, script: str | None = None) -> list[str]:
    """The command line that runs ours, under mpiexec where a number of ranks is given."""
    start = [sys.executable, *(["-c", script] if script else ["-m", "nccl_m2n"]), *arguments]
    if ranks is None:
        return start
    pytest.importorskip("mpi4py")
    mpiexec = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")
    if mpiexec is None:
        pytest.skip("no mpiexec")
    return [mpiexec, "-n", str(ranks), *start]


def run(
    *arguments: str,
    ranks: int | None = None,
    script: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run it, within the time limit."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **(environment or {})}
    return subprocess.run(
        command(*arguments, ranks=ranks, script=script),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        cwd=ROOT,
        env=variables,
    )


def succeed(*arguments: str, ranks: int | None = None) -> str:
    """What a run printed that must succeed and say nothing on standard error."""
    done = run(*arguments, ranks=ranks)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def safetensors(tensors: Mapping[str, np.ndarray[Any, Any]]) -> bytes:
    """The bytes of a checkpoint."""
    header, data = {}, b""
    for name, array in tensors.items():
        held = array.tobytes()
        offsets = [len(data), len(data) + len(held)]
        header[name] = {"dtype": CODES[array.dtype.name], "shape": list(array.shape), "data_offsets": offsets}
        data += held
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def bert(seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """A tiny BERT's tensors, with random bits in them."""
    rng = np.random.default_rng(seed)
    hidden, wide = TINY_BERT["hidden_size"], TINY_BERT["intermediate_size"]
    shapes: dict[str, Sequence[Any]] = {
        "embeddings.word_embeddings.weight": (101, hidden),
        "embeddings.position_embeddings.weight": (17, hidden),
        "embeddings.token_type_embeddings.weight": (2, hidden),
        "embeddings.LayerNorm.weight": (hidden,),
        "embeddings.position_ids": (1, 17),
        "pooler.dense.weight": (hidden, hidden),
        "pooler.dense.bias": (hidden,),
    }
    for layer in range(3):
        at = f"encoder.layer.{layer}"
        for name in ("query", "key", "value"):
            shapes[f"{at}.attention.self.{name}.weight"] = (hidden, hidden)
            shapes[f"{at}.attention.self.{name}.bias"] = (hidden,)
        shapes[f"{at}.attention.output.dense.weight"] = (hidden, hidden)
        shapes[f"{at}.attention.output.LayerNorm.weight"] = (hidden,)
        shapes[f"{at}.intermediate.dense.weight"] = (wide, hidden)
        shapes[f"{at}.intermediate.dense.bias"] = (wide,)
        shapes[f"{at}.output.dense.weight"] = (hidden, wide)
    made: dict[str, np.ndarray[Any, Any]] = {}
    for i, (name, shape) in enumerate(shapes.items()):
        kind = "int64" if name.endswith("position_ids") else ("float32", "float16", "uint16")[i % 3]
        count = int(np.prod(shape)) * np.dtype(kind).itemsize
        made[name] = np.frombuffer(rng.bytes(count), kind).reshape(shape)
    return made


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny BERT's checkpoint and configuration."""
    folder = tmp_path_factory.mktemp("bert")
    (folder / "config.json").write_text(json.dumps(TINY_BERT))
    (folder / "model.safetensors").write_bytes(safetensors(bert()))
    return folder
