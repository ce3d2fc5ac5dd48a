# SPDX-License-Identifier: Apache-2.0
"""Device memory as CuPy arrays of bytes."""

from __future__ import annotations

from typing import Any

from nccl_m2n.dtypes import element_unit, item_size
from nccl_m2n.execution.views import ArrayView
from nccl_m2n.transport.gpu import import_cupy


def as_cupy(view: ArrayView) -> Any:
    """The bytes that a view sees, shape ``(*view.shape, item size)``, without copying them."""
    cupy = import_cupy()
    low, high = view.span
    device = (
        cupy.cuda.runtime.pointerGetAttributes(view.pointer).device if view.size else cupy.cuda.Device().id
    )
    whole = cupy.cuda.UnownedMemory(low, max(high - low, 1), view.owner, device)
    item = item_size(view.dtype)
    at = cupy.cuda.MemoryPointer(whole, view.pointer - low)
    return cupy.ndarray((*view.shape, item), cupy.uint8, at, (*view.strides, 1))


def to_host(view: ArrayView) -> Any:
    """A NumPy copy of the bytes that a view sees."""
    return import_cupy().asnumpy(as_cupy(view))


def as_typed_cupy(view: ArrayView) -> Any:
    """What a view sees with its element type; one that CuPy lacks is seen as unsigned integers of its size."""
    cupy = import_cupy()
    try:
        kind = cupy.dtype(view.dtype)
    except TypeError:
        kind = cupy.dtype(f"u{element_unit(item_size(view.dtype))}")
    return as_cupy(view).view(kind)[..., 0]
