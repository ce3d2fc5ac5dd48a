# SPDX-License-Identifier: Apache-2.0
"""Does an array of this shape fit a local shape, and how? The one answer, for whoever takes arrays."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TypeAlias

Factors: TypeAlias = tuple[tuple[int, ...], ...]  # for each dimension of the layout, those of the array


@lru_cache(maxsize=4096)
def factor_shape(shape: tuple[int, ...], local_shape: tuple[int, ...]) -> Factors | None:
    """How the dimensions of an array make up those of a local shape, in row-major order; None where they do not.

    A dimension of the local shape may be split over several of the array's that follow each other, and dimensions
    of extent 1 may be there or not: neither changes which element is which.

    Returns:
        For each dimension of the local shape the extents that make it up. Extents of 1 are left out, unless there
        is nothing else: a dimension with more than one factor is really split.

    Example:
        >>> from nccl_m2n.layout.fit import factor_shape
        >>> factor_shape((4, 6, 5), (24, 5)), factor_shape((24,), (24, 1)), factor_shape((5, 24), (24, 5))
        (((4, 6), (5,)), ((24,), (1,)), None)
    """
    if math.prod(shape) != math.prod(local_shape):
        return None
    found = _groups(shape, local_shape)
    if found is None:
        return None
    return tuple(tuple(n for n in group if n != 1) or (1,) for group in found)


@lru_cache(maxsize=4096)
def _groups(shape: tuple[int, ...], local_shape: tuple[int, ...]) -> Factors | None:
    """The array's dimensions in groups, one for each local dimension, an empty one where nothing is left to take."""
    if not local_shape:
        return None if shape else ()
    for count in (*range(1, len(shape) + 1), 0):
        if math.prod(shape[:count]) == local_shape[0]:
            rest = _groups(shape[count:], local_shape[1:])
            if rest is not None:
                return (shape[:count], *rest)
    return None
