# SPDX-License-Identifier: Apache-2.0
"""Shapes: extents in elements."""

from __future__ import annotations

import math
from collections.abc import Sequence

from nccl_m2n.checks import whole_numbers
from nccl_m2n.errors import LayoutError

MAX_NDIM = 8


def as_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """A shape as a tuple of ints, or an error."""
    made = whole_numbers(shape, "the extents of a shape")
    if len(made) > MAX_NDIM:
        raise LayoutError(f"expected at most {MAX_NDIM} dimensions, got {len(made)}: {made}; merge some")
    if any(n < 0 for n in made):
        raise LayoutError(f"expected extents of 0 or more, got shape {made}")
    if math.prod(n for n in made if n) >= 2**59:
        raise LayoutError(f"expected fewer than 2**59 elements, so that bytes fit 64 bits, got shape {made}")
    return made


def shape_text(shape: Sequence[int]) -> str:
    """A shape for people."""
    return " × ".join(map(str, shape)) if shape else "scalar"
