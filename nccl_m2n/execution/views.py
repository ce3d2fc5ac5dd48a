# SPDX-License-Identifier: Apache-2.0
"""Array views: where an array's elements lie, whatever library made it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nccl_m2n.dtypes import dtype_name, item_size
from nccl_m2n.errors import LayoutError

DLPACK_CPU = (1, 3)  # kDLCPU and kDLCUDAHost


@dataclass(frozen=True)
class ArrayView:
    """Where an array lies. Make one with `view_array`, or by hand for a raw pointer.

    Args:
        pointer: Address of the first element.
        shape: In elements.
        strides: Bytes from one element to the next, in each dimension.
        dtype: Canonical name of the element type.
        device: Whether it is GPU memory.
        writable: Whether it may be written.
        owner: What keeps the memory alive; held as long as the view.
    """

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: bool = True
    writable: bool = True
    owner: Any = field(default=None, compare=False, repr=False)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def span(self) -> tuple[int, int]:
        """First address and one past the last that any element touches; equal for an empty array."""
        if not self.size:
            return self.pointer, self.pointer
        reach = [(n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)]
        low, high = sum(r for r in reach if r < 0), sum(r for r in reach if r > 0)
        return self.pointer + low, self.pointer + high + item_size(self.dtype)


def contiguous_strides(shape: Sequence[int], item: int) -> tuple[int, ...]:
    """Byte strides of a row-major array."""
    strides, step = [], item
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def view_array(array: Any) -> ArrayView:
    """See where an array lies, without copying it.

    Takes NumPy and CuPy arrays, PyTorch tensors (told by duck typing, bfloat16 and fp8 included), whatever
    has ``__cuda_array_interface__``, ``__array_interface__`` or DLPack, and an `ArrayView` as it is.

    Raises:
        LayoutError: If it is none of these.
    """
    if isinstance(array, ArrayView):
        return array
    if isinstance(array, np.ndarray):
        name = dtype_name(array.dtype)
        return ArrayView(
            array.ctypes.data, array.shape, array.strides, name, False, array.flags.writeable, array
        )
    if hasattr(array, "data_ptr") and hasattr(array, "element_size"):
        return _view_torch(array)
    if hasattr(array, "__cuda_array_interface__"):
        return _view_interface(array, array.__cuda_array_interface__, device=True)
    if hasattr(array, "__dlpack_device__"):
        return _view_dlpack(array)
    if hasattr(array, "__array_interface__"):
        return _view_interface(array, array.__array_interface__, device=False)
    raise LayoutError(
        f"expected an array (NumPy, CuPy, PyTorch, DLPack or __cuda_array_interface__), got {type(array).__name__}"
    )


def _view_torch(tensor: Any) -> ArrayView:
    if hasattr(tensor, "to_local"):
        raise LayoutError("expected this rank's local tensor, got a DTensor; pass tensor.to_local()")
    item = tensor.element_size()
    strides = tuple(s * item for s in tensor.stride())
    on_device = tensor.device.type == "cuda"
    if tensor.device.type not in ("cpu", "cuda"):
        raise LayoutError(f"expected a tensor on a CPU or a CUDA device, got one on {tensor.device}")
    return ArrayView(
        tensor.data_ptr(), tuple(tensor.shape), strides, dtype_name(tensor.dtype), on_device, True, tensor
    )


def _view_interface(array: Any, interface: dict[str, Any], *, device: bool) -> ArrayView:
    own = getattr(array, "dtype", None)  # names bfloat16 and fp8, which a typestr cannot
    name = dtype_name(own if own is not None else interface["typestr"])
    shape = tuple(interface["shape"])
    strides = interface.get("strides") or contiguous_strides(shape, item_size(name))
    pointer, read_only = interface["data"]
    return ArrayView(pointer or 0, shape, tuple(strides), name, device, not read_only, array)


def _view_dlpack(array: Any) -> ArrayView:
    if array.__dlpack_device__()[0] in DLPACK_CPU:
        return view_array(np.from_dlpack(array))
    from nccl_m2n.transport.gpu import import_cupy

    return view_array(import_cupy().from_dlpack(array))
