# SPDX-License-Identifier: Apache-2.0
"""One-dimensional sweeps over half-open intervals: the arithmetic under layouts and plans."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from nccl_m2n.typing import Bools, Ints


def shard_bounds(extent: Ints, parts: Ints | int, index: Ints) -> tuple[Ints, Ints]:
    """Bounds of shard `index` when `extent` elements are cut in `parts`, as ``torch.chunk`` cuts them.

    The one split rule of the package, DTensor's too: every shard has
    ``ceil(extent / parts)`` elements until they run out. Arguments broadcast.

    ====== ===== ==========
    extent parts shards
    ====== ===== ==========
    10     4     3, 3, 3, 1
    5      4     2, 2, 1, 0
    2      4     1, 1, 0, 0
    ====== ===== ==========
    """
    size = -(-extent // parts)
    start = np.minimum(index * size, extent)
    return start, np.minimum(start + size, extent)


def offsets(counts: Ints) -> Ints:
    """Where each of several things starts when they are laid end to end, as long as `counts` says.

    Example:
        >>> import numpy as np
        >>> from nccl_m2n.layout.intervals import offsets
        >>> offsets(np.array([2, 0, 3])).tolist()
        [0, 2, 2]
    """
    return np.cumsum(counts) - counts


def opens(*columns: npt.NDArray[Any]) -> Bools:
    """Which rows are not, in all columns, what the row before them is: the first of each group of equal neighbours.

    Example:
        >>> import numpy as np
        >>> from nccl_m2n.layout.intervals import opens
        >>> opens(np.array([1, 1, 2, 2]), np.array([7, 7, 7, 8])).tolist()
        [True, False, True, True]
    """
    new = np.ones(len(columns[0]), bool)
    if len(new):
        new[1:] = False
    for column in columns:
        new[1:] |= column[1:] != column[:-1]
    return new


def lengths(first: Ints, end: int) -> Ints:
    """How many rows each group has, when groups start at the rows `first` and the last one stops before row `end`.

    Example:
        >>> import numpy as np
        >>> from nccl_m2n.layout.intervals import lengths
        >>> lengths(np.array([0, 2, 5]), 6).tolist()
        [2, 3, 1]
    """
    return np.diff(np.append(first, end))


def expand(counts: Ints) -> tuple[Ints, Ints]:
    """Row number, and position within the row, of every element of ragged rows with `counts` elements.

    Example:
        >>> import numpy as np
        >>> from nccl_m2n.layout.intervals import expand
        >>> [a.tolist() for a in expand(np.array([2, 0, 3]))]
        [[0, 0, 2, 2, 2], [0, 1, 0, 1, 2]]
    """
    row = np.repeat(np.arange(len(counts)), counts)
    return row, np.arange(len(row)) - np.repeat(offsets(counts), counts)


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
