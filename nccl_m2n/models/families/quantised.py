# SPDX-License-Identifier: Apache-2.0
"""Quantised checkpoints, as far as a configuration describes them: fp8 with one scale for each block."""

from __future__ import annotations

import re
from collections.abc import Iterator

from nccl_m2n.errors import CommandError
from nccl_m2n.models.config import Config
from nccl_m2n.models.families.parts import Entry

_MATRICES = re.compile(r".*(_proj|_mqa|\.w[123]|\.wq_b|\.wk)\.weight")
_KEPT = re.compile(r".*(eh_proj|weights_proj)\.weight|.*(visual|vision).*")
BLOCK = (128, 128)  # rows and columns of a block where nothing says it


def quantised(c: Config, entries: Iterator[Entry]) -> Iterator[Entry]:
    """What a family describes, as a checkpoint with the configuration's ``quantization_config`` has it.

    Raises:
        CommandError: If it is quantised in a way whose tensors are not known.
    """
    method = c.quantization.get("quant_method")
    if method is None or (method == "mxfp4" and c.family == "gpt_oss"):
        return entries
    if method == "fp8" and "weight_block_size" in c.quantization:
        return with_scales(c, entries)
    raise CommandError(
        f"{c.label} says quant_method {method!r:.40}, whose tensors no configuration describes; give the checkpoint"
    )


def with_scales(c: Config, entries: Iterator[Entry]) -> Iterator[Entry]:
    """The same tensors as published in fp8: projections in float8, each followed by its scales."""
    rows, columns = c.block or BLOCK
    kept = c.quantization.get("modules_to_not_convert")
    skipped = (
        tuple(f"{name}." for name in kept if isinstance(name, str)) if isinstance(kept, list | tuple) else ()
    )
    for name, shape, dtype in entries:
        if not _MATRICES.fullmatch(name) or _KEPT.fullmatch(name) or any(part in name for part in skipped):
            yield name, shape, dtype
            continue
        yield name, shape, "float8_e4m3fn"
        yield f"{name}_scale_inv", (-(-shape[0] // rows), -(-shape[1] // columns)), "float32"
