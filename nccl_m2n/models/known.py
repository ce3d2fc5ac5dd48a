# SPDX-License-Identifier: Apache-2.0
"""Models by name and by configuration: what each family's published checkpoints are made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nccl_m2n.errors import CommandError
from nccl_m2n.models.catalogue import SHIPPED
from nccl_m2n.models.families import FAMILIES, Config
from nccl_m2n.models.manifest import TensorInfo


def shipped(name: str) -> tuple[str, dict[str, Any]]:
    """The proper name and the configuration of a shipped model.

    Raises:
        CommandError: If no model of that name is shipped.
    """
    wanted = _plain(name.rsplit("/", 1)[-1])
    for label, config in SHIPPED.items():
        if _plain(label) == wanted:
            return label, dict(config)
    known = ", ".join(SHIPPED)
    raise CommandError(f"there is no file and no shipped model named {name!r}; shipped are {known}")


def describe(config: Mapping[str, Any], label: str = "config", **options: Any) -> dict[str, TensorInfo]:
    """Name, shape and dtype of every parameter of the model that a configuration describes."""
    family = config.get("model_type")
    if family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise CommandError(
            f"{label} has model_type {family!r}, which has no manifest here; known are {known}"
        )
    read = Config(config, label, options)
    tensors = {name: TensorInfo(shape, dtype) for name, shape, dtype in FAMILIES[family](read)}
    read.refuse_leftovers(family)
    return tensors


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "").replace(".", "")
