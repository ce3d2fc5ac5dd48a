# SPDX-License-Identifier: Apache-2.0
"""Arrays as plain unsigned integers, and checksums over them that depend on value and place."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from nccl_m2n.dtypes import element_unit, item_size
from nccl_m2n.execution.memory import as_bytes, numpy_type
from nccl_m2n.execution.views import ArrayView
from nccl_m2n.transport.gpu import import_cupy
from nccl_m2n.typing import Array, Library

CHUNK = 1 << 22  # elements hashed at once: their 64-bit copies take some 100 MB


def bits(view: ArrayView, shape: Sequence[int], dtypes: Sequence[str]) -> Array:
    """The elements that a view sees as unsigned integers, in its own memory (NumPy or CuPy) where possible.

    Args:
        view: Where they lie.
        shape: The shape wanted, if the view splits a dimension of it further.
        dtypes: Element types to cast to, one after the other, where the view has another.

    Returns:
        Shape ``(*shape, units)``, where an element has one unit of at most 8 bytes, or several.
    """
    item = item_size(dtypes[-1])
    if not view.size:
        return _units(np.zeros((*shape, item), np.uint8), item)
    array = as_bytes(view).reshape(*shape, -1)
    if any(dtype != view.dtype for dtype in dtypes):
        if view.device:
            array = import_cupy().asnumpy(array)
        cast = np.ascontiguousarray(array).view(numpy_type(view.dtype))[..., 0]
        for dtype in dtypes:
            cast = cast.astype(numpy_type(dtype))
        array = np.ascontiguousarray(cast)[..., None].view(np.uint8)
    return _units(array, item)


def _units(array: Array, item: int) -> Array:
    """Bytes joined in units."""
    unit = min(element_unit(item), 8)
    if array.shape[-1] == 0:
        return array
    return array.view(f"u{unit}")


def checksum(array: Array, start: Sequence[int], shape: Sequence[int]) -> int:
    """A 64-bit checksum of a box of a tensor.

    The sum, over all elements, of a mix of the element's bits and its index in the whole tensor: what is swapped,
    shifted or missing changes it, and the boxes that make up another box add up to its checksum.

    Args:
        array: The box as `bits` gives it.
        start: First index of the box in the whole tensor.
        shape: The whole tensor's shape.
    """
    if not math.prod(array.shape):
        return 0
    rows = max(1, CHUNK // max(1, math.prod(array.shape[1:])))
    total = 0
    if not start:
        return _mixed(array.reshape(1, -1), (0,), (1,))
    for first in range(0, array.shape[0], rows):
        total += _mixed(array[first : first + rows], (start[0] + first, *start[1:]), shape)
    return total % 2**64


def _mixed(array: Array, start: Sequence[int], shape: Sequence[int]) -> int:
    xp: Library = np if isinstance(array, np.ndarray) else __import__("sys").modules["cupy"]
    units = array.shape[-1]
    index = xp.arange(units, dtype=xp.uint64)
    step = units
    for d in reversed(range(len(start))):
        along = xp.arange(start[d], start[d] + array.shape[d], dtype=xp.uint64) * xp.uint64(step % 2**64)
        index = index + along.reshape(-1, *[1] * (len(start) - d))
        step *= shape[d]
    mixed = (array.astype(xp.uint64) + xp.uint64(0x9E3779B97F4A7C15)) ^ (
        index * xp.uint64(0xBF58476D1CE4E5B9)
    )
    mixed *= xp.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> xp.uint64(32)
    mixed *= xp.uint64(0xD6E8FEB86659FD93)
    mixed ^= mixed >> xp.uint64(29)
    return int(mixed.sum(dtype=xp.uint64))
