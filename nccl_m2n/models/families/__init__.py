# SPDX-License-Identifier: Apache-2.0
"""One generator for each architecture family: a configuration in, every (name, shape, dtype) out.

Names are those of the published checkpoints, so experts are one by one where the checkpoints have them so.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping

from nccl_m2n.errors import CommandError
from nccl_m2n.models.config import Config
from nccl_m2n.models.families import dense, encoders, experts, hybrid, latent, older, vision
from nccl_m2n.models.families.parts import Entry
from nccl_m2n.models.families.quantised import quantised
from nccl_m2n.models.manifest import TensorInfo
from nccl_m2n.models.reading import whole

GENERATORS: dict[str, Callable[[Config], Iterator[Entry]]] = {
    **dense.GENERATORS,
    **experts.GENERATORS,
    **latent.GENERATORS,
    **hybrid.GENERATORS,
    **older.GENERATORS,
    **vision.GENERATORS,
    **encoders.GENERATORS,
}
MOST_LAYERS = 10_000
MOST_TENSORS = 300_000  # several times those of the largest models with their experts one by one


def describe(
    config: Mapping[str, object], label: str = "config", options: Mapping[str, object] | None = None
) -> dict[str, TensorInfo]:
    """Name, shape and dtype of every parameter of the model that a configuration describes.

    Raises:
        CommandError: If its family is unknown, a key is missing or has a value that cannot be.
    """
    read = Config(config, label, options)
    if read.family not in GENERATORS:
        raise CommandError(
            f"{label} has model_type {read.family!r}, which has no manifest here; {closest(read.family, GENERATORS)}"
        )
    layers, each = read.number("num_hidden_layers", 0), max(1, read.number("num_experts", 0))
    if layers > MOST_LAYERS or layers * each > MOST_TENSORS:
        raise CommandError(
            f"{label} describes {layers:,} layers of {each:,} experts, more than any model has"
        )
    tensors = {}
    for name, shape, dtype in quantised(read, GENERATORS[read.family](read)):
        if not all(map(whole, shape)):
            raise CommandError(f"{label} describes {name} of shape {shape}, larger than any tensor")
        tensors[name] = TensorInfo(shape, dtype)
        if len(tensors) > MOST_TENSORS:
            raise CommandError(f"{label} describes more than {MOST_TENSORS:,} tensors")
    read.refuse_leftovers()
    return tensors


def closest(family: str | None, known: Mapping[str, object]) -> str:
    """The known families, those first whose names are most like an unknown one's, for messages."""
    like = difflib.get_close_matches(family or "", known, n=3, cutoff=0.5)
    rest = ", ".join(sorted(known.keys() - set(like)))
    return f"closest are {', '.join(like)}; known are also {rest}" if like else f"known are {rest}"
