# SPDX-License-Identifier: Apache-2.0
"""Made-up values that tell their tensor and their place in it; the same wherever they are made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from nccl_m2n.typing import Array, Ints, Library

Seeds: TypeAlias = npt.NDArray[np.uint64]
Run: TypeAlias = slice | Ints  # indices of one dimension: those from start to stop, or a list

_GOLDEN = 0x9E3779B97F4A7C15
_DIMENSION = 0x632BE59BD9B4E019  # tells the numbers of one dimension from those of the next
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))  # splitmix64's


def made_up(seeds: Seeds, index: Sequence[Run], word: int, library: Library = np) -> Array:
    """A part of some tensors' values.

    An element is the sum of one scattered number for each of its indices: made as fast as memory is written, and
    another one wherever rows, columns, dimensions or tensors were mistaken.

    Args:
        seeds: A number of each tensor, shape (tensors,).
        index: What is wanted of each dimension.
        word: Bytes of a value.
        library: Makes the array: NumPy, or CuPy on its current device.

    Returns:
        Unsigned integers of `word` bytes, shape (tensors, *extents).
    """
    if not index:
        return library.asarray(_scattered(np.zeros(1, np.int64), seeds, word)[:, 0])
    made: Array = None
    for dim, wanted in reversed(list(enumerate(index))):  # the largest sum comes last, and alone
        run = np.arange(wanted.start, wanted.stop) if isinstance(wanted, slice) else wanted
        numbers = library.asarray(_scattered(run, seeds + np.uint64((dim + 1) * _DIMENSION % 2**64), word))
        made = (
            numbers
            if made is None
            else numbers.reshape(*numbers.shape, *[1] * (made.ndim - 1)) + made[:, None]
        )
    return made


def _scattered(run: Ints, seeds: Seeds, word: int) -> npt.NDArray[np.unsignedinteger]:
    """A number for each seed and index that looks like none of its neighbours', shape (seeds, indices)."""
    mixed = (seeds[:, None] + run.astype(np.uint64)) * np.uint64(_GOLDEN)
    for shift, factor in _MIX:
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return (mixed >> np.uint64(64 - 8 * word)).astype(f"u{word}")
