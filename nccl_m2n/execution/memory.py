# SPDX-License-Identifier: Apache-2.0
"""Memory by its address: as bytes, as arrays of NumPy's or CuPy's, and which GPU's it is. Nothing is copied."""

from __future__ import annotations

import ctypes

import numpy as np

from nccl_m2n.checks import made_by
from nccl_m2n.dtypes import element_unit, item_size
from nccl_m2n.errors import TransportError
from nccl_m2n.execution.views import ArrayView
from nccl_m2n.text import pip_install
from nccl_m2n.transport.base import Transport
from nccl_m2n.transport.gpu import import_cupy
from nccl_m2n.typing import Array, Bytes, DType

GPU_MEMORY = 2  # cudaMemoryTypeDevice; what is managed or the host's is at home on no GPU


def bytes_at(address: int, size: int) -> Bytes:
    """`size` bytes of host memory; who keeps them alive is the caller's business."""
    block: Array = (ctypes.c_uint8 * size).from_address(
        address
    )  # NumPy's types do not know that it is a buffer
    return np.frombuffer(block, np.uint8)


def as_bytes(view: ArrayView) -> Array:
    """The bytes that a view sees, shape ``(*view.shape, item size)``: NumPy's for host memory, CuPy's for a device."""
    low, high = view.span
    shape, strides = (*view.shape, item_size(view.dtype)), (*view.strides, 1)
    if not view.device:
        if not view.size:
            return np.empty(shape, np.uint8)
        return np.ndarray(shape, np.uint8, bytes_at(low, high - low), view.pointer - low, strides)
    cupy = import_cupy()
    gpu = cupy.cuda.runtime.pointerGetAttributes(view.pointer).device if view.size else cupy.cuda.Device().id
    whole = cupy.cuda.UnownedMemory(low, max(high - low, 1), view.owner, gpu)
    return cupy.ndarray(shape, cupy.uint8, cupy.cuda.MemoryPointer(whole, view.pointer - low), strides)


def as_array(view: ArrayView) -> Array:
    """What a view sees, with its element type.

    On a device a type that CuPy lacks (bfloat16, fp8) is seen as unsigned integers of its size; where none has that
    size (6 or 16 bytes), as several of them, along one more dimension.

    Raises:
        TransportError: If ml_dtypes, which has NumPy's bfloat16 and fp8, is needed and missing.
    """
    made_by(view, ArrayView, "the view", hint="make one with view_array(array)")
    kind = _cupy_type(view.dtype) if view.device else numpy_type(view.dtype)
    array = as_bytes(view).view(kind)
    if array.shape[-1] == 1:
        array = array[..., 0]
    if not view.device:
        array.flags.writeable = view.writable
    return array


def numpy_type(name: str) -> np.dtype[np.generic]:
    """The NumPy dtype of a name; those that NumPy lacks come from ml_dtypes, what that lacks is seen as raw bytes.

    Raises:
        TransportError: If ml_dtypes is needed and missing.
    """
    try:
        return np.dtype(name)
    except TypeError:
        pass
    try:
        import ml_dtypes
    except ImportError:
        raise TransportError(
            f"expected ml_dtypes to cast {name} in host memory, got none; {pip_install('checkpoint')}"
        ) from None
    return np.dtype(getattr(ml_dtypes, name, f"V{item_size(name)}"))


def _cupy_type(name: str) -> DType:
    try:
        made = np.dtype(name)
    except TypeError:
        made = np.dtype("V1")
    # ml_dtypes enters its types in NumPy, which is no reason for CuPy to have kernels for them.
    known = made.isbuiltin == 1 and made.kind in "biufc"
    return import_cupy().dtype(made if known else f"u{min(element_unit(item_size(name)), 8)}")


def gpu_of(transport: Transport, rank: int) -> int | None:
    """Which GPU's memory a local rank's arrays are in; None where it is the host's."""
    return transport.devices.get(rank)


def gpu_at(address: int) -> int | None:
    """Which GPU's memory an address is in; None where it is at home on none."""
    found = import_cupy().cuda.runtime.pointerGetAttributes(address)
    return int(found.device) if found.type == GPU_MEMORY else None
