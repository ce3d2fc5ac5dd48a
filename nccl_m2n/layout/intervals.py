# SPDX-License-Identifier: Apache-2.0
"""One-dimensional sweeps over half-open intervals: the arithmetic under layouts and plans."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int64]


def chunk_bounds(extent: Ints, parts: Ints | int, index: Ints) -> tuple[Ints, Ints]:
    """Bounds of chunk `index` when `extent` elements are cut in `parts` ceil chunks.

    The one split rule of the package, the one of ``torch.chunk`` and DTensor: every chunk has
    ``ceil(extent / parts)`` elements until they run out. Arguments broadcast.

    ====== ===== ==========
    extent parts chunks
    ====== ===== ==========
    10     4     3, 3, 3, 1
    5      4     2, 2, 1, 0
    2      4     1, 1, 0, 0
    ====== ===== ==========
    """
    size = -(-extent // parts)
    start = np.minimum(index * size, extent)
    return start, np.minimum(start + size, extent)


def expand(counts: Ints) -> tuple[Ints, Ints]:
    """Row number, and place within the row, of every element of ragged rows with `counts` elements.

    Example:
        >>> import numpy as np
        >>> from nccl_m2n.layout.intervals import expand
        >>> [a.tolist() for a in expand(np.array([2, 0, 3]))]
        [[0, 0, 2, 2, 2], [0, 1, 0, 1, 2]]
    """
    row = np.repeat(np.arange(len(counts)), counts)
    first = np.cumsum(counts) - counts
    return row, np.arange(len(row)) - np.repeat(first, counts)


def overlaps(starts: Ints, stops: Ints, lo: Ints, hi: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Every overlap of the ranges ``[lo, hi)`` with sorted, disjoint, non-empty intervals.

    Returns:
        Range number, interval number, start and stop of each overlap, ordered by range and then by
        interval. Cost: a binary search a range, and what is returned.

    Example:
        >>> import numpy as np
        >>> from nccl_m2n.layout.intervals import overlaps
        >>> found = overlaps(np.array([0, 4]), np.array([4, 8]), np.array([3, 0]), np.array([6, 2]))
        >>> [a.tolist() for a in found]
        [[0, 0, 1], [0, 1, 0], [3, 4, 0], [4, 6, 2]]
    """
    first = np.searchsorted(stops, lo, side="right")
    last = np.searchsorted(starts, hi, side="left")
    row, k = expand(np.where(lo < hi, last - first, 0).clip(min=0))
    interval = first[row] + k
    return row, interval, np.maximum(starts[interval], lo[row]), np.minimum(stops[interval], hi[row])


def product_index(counts: Sequence[int]) -> Ints:
    """Row-major indices of all combinations, shape ``(len(counts), product of counts)``."""
    return np.indices(tuple(counts)).reshape(len(counts), math.prod(counts))


def ravel_index(index: Ints, counts: Sequence[int]) -> Ints:
    """Row-major numbers of combinations; the inverse of `product_index`."""
    number = np.zeros(index.shape[1], np.int64)
    for d, n in enumerate(counts):
        number = number * n + index[d]
    return number
