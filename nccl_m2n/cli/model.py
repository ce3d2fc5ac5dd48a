# SPDX-License-Identifier: Apache-2.0
"""Which model is meant: its parameters, its rules, and its weights where it has any."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

from nccl_m2n.errors import CommandError
from nccl_m2n.models import Manifest
from nccl_m2n.models.catalogue import MODELS
from nccl_m2n.models.checkpoint import Checkpoint, find_in_directory
from nccl_m2n.models.config import Config
from nccl_m2n.models.find import PACKAGES, holds_tensors, installed_checkpoint
from nccl_m2n.models.reading import exists
from nccl_m2n.sharding import Rule, load_rules, rules_for
from nccl_m2n.sharding.model_layouts import unknown_names

_FIRST_NUMBER = re.compile(r"(?:^|\.)(\d+)\.")  # of a parameter's name: its layer


@dataclass(frozen=True)
class Model:
    """A model as the commands know it."""

    manifest: Manifest
    rules: tuple[Rule, ...]
    checkpoint: Checkpoint | None  # None where there is no data
    unknown: tuple[str, ...] = ()  # parameters that no rule knows, left whole on every rank

    @property
    def label(self) -> str:
        """What it is called."""
        return self.manifest.label

    def unknown_text(self) -> str:
        """How much of the model no rule knows, for people; empty where all of it is known."""
        if not self.unknown:
            return ""
        share = sum(self.manifest[name].nbytes for name in self.unknown) / max(1, self.manifest.nbytes)
        more = f" and {len(self.unknown) - 1} more" if len(self.unknown) > 1 else ""
        return (
            f"whole on every rank, for no rule knows them: {self.unknown[0]}{more}, {share:.1%} of the bytes"
        )


def find_model(arguments: argparse.Namespace, data: bool) -> Model:
    """The model that the arguments name.

    Args:
        arguments: With `model`, `rules` and `layers`.
        data: Whether a model that an installed package carries must be installed.

    Raises:
        CommandError: If there is no such model, its files are damaged, or its rules are.
    """
    path = _path_of(arguments.model, data)
    checkpoint = None
    if path is None:
        manifest = _named(arguments.model)
    elif holds_tensors(path):
        checkpoint = Checkpoint.open(path)
        manifest = checkpoint.manifest
    else:
        manifest = Manifest.from_config(path)
    if not manifest:
        raise CommandError(f"{arguments.model} holds no tensors")
    if checkpoint is not None and not exists(arguments.model):
        manifest = Manifest(
            manifest, arguments.model, manifest.config
        )  # known by its name, not by its file's
    if arguments.layers is not None:
        manifest = first_layers(manifest, arguments.layers, checkpoint is None)
    replicate = arguments.replicate_unknown
    rules = load_rules(arguments.rules) if arguments.rules else rules_for(manifest, unknown=replicate)
    if not replicate:
        return Model(manifest, rules, checkpoint)
    return Model(manifest, (*rules, Rule("*")), checkpoint, tuple(unknown_names(manifest, rules)))


def _path_of(text: str, data: bool) -> Path | None:
    path = Path(text)
    if not exists(path):
        try:
            found = installed_checkpoint(text)
        except CommandError:
            if data or text.startswith("package:"):
                raise
            return None  # planned by its shipped description
        if found is None and (path.suffix in (".safetensors", ".json") or path.is_absolute()):
            raise CommandError(f"there is no file {text}")
        return found
    return find_in_directory(path, weights=data) if path.is_dir() else path


def _named(text: str) -> Manifest:
    try:
        return Manifest.named(text)
    except CommandError:
        known = ", ".join(dict.fromkeys([*MODELS, *PACKAGES]))
        raise CommandError(
            f"there is no file, folder or shipped model named {text!r}; shipped are {known}; for another "
            "give the path of its .safetensors file or config.json"
        ) from None


def first_layers(manifest: Manifest, layers: int, described: bool) -> Manifest:
    """The model cut to its first layers, with all that it has outside of layers.

    Args:
        manifest: The whole model.
        layers: How many are kept.
        described: Whether the configuration describes the tensors; else they are in a file.

    Raises:
        CommandError: If the model has fewer layers.
    """
    config = manifest.config or {}
    numbers = {name: _layer(name) for name in manifest}
    has = Config(config, manifest.label).number("num_hidden_layers", max(numbers.values()) + 1)
    if layers > has:
        raise CommandError(f"--layers {layers}: {manifest.label} has {has} layers")
    fewer = {**config, "num_hidden_layers": layers}
    label = f"{manifest.label}, {layers} of {has} layers"
    if described and config:
        return Manifest(Manifest.from_config(fewer), label, fewer)
    kept = {name: info for name, info in manifest.items() if numbers[name] < layers}
    return Manifest(kept, label, fewer if config else None)


def _layer(name: str) -> int:
    found = _FIRST_NUMBER.search(name)
    return int(found[1]) if found else -1
