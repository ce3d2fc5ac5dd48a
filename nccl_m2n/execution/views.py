# SPDX-License-Identifier: Apache-2.0
"""Array views: where an array's elements lie, whatever library made it.

What is moved is memory. An array whose values are not what its memory says (lazily conjugated, quantised, masked, …) is
refused here, by name of the property, and so is one that has no memory to speak of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from nccl_m2n.checks import MAX_ADDRESS, truth, whole_number, whole_numbers
from nccl_m2n.dtypes import dtype_name, item_size
from nccl_m2n.errors import LayoutError
from nccl_m2n.execution.foreign import Seen, see_dlpack, see_torch
from nccl_m2n.typing import Array, ReadJson


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
        gpu: Which GPU's memory it is, as CUDA numbers them, where the array says so.
    """

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: bool = True
    writable: bool = True
    owner: object = field(default=None, compare=False, repr=False)
    gpu: int | None = None

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


def view_array(array: Array) -> ArrayView:
    """See where an array lies, without copying it.

    Takes NumPy and CuPy arrays, PyTorch tensors (told by duck typing, bfloat16 and fp8 included), JAX arrays on one
    device, whatever has ``__cuda_array_interface__``, DLPack or ``__array_interface__``, and an `ArrayView` as it is.
    JAX arrays, and DLPack without a flag that says otherwise, are read-only.

    Raises:
        LayoutError: If it is none of these, or its values are not its plain memory: bytes in another order, lazily
            conjugated or negative, sparse, nested, quantised, masked, without memory, sharded over several devices.
    """
    view = _checked(array) if isinstance(array, ArrayView) else _view(array)
    if view.pointer == 0 and view.size:
        raise LayoutError(
            f"expected an array in memory, got {_kind(array)} without any; create or load its values first"
        )
    if len(view.shape) != len(view.strides) or min(view.shape, default=0) < 0:
        raise LayoutError(f"expected a stride for each extent of 0 or more, got {view}")
    return view


def _checked(view: ArrayView) -> ArrayView:
    """A view that somebody may have made by hand."""
    whole_number(view.pointer, "the pointer of a view", least=0, most=MAX_ADDRESS)
    whole_numbers(view.shape, "the shape of a view", least=0)
    whole_numbers(view.strides, "the strides of a view")
    truth(view.device, "device")
    truth(view.writable, "writable")
    name = dtype_name(view.dtype)
    return view if name == view.dtype else replace(view, dtype=name)


def _view(array: Array) -> ArrayView:
    if isinstance(array, np.ndarray):
        return _view_numpy(array)
    try:
        for trait, see in _WAYS.items():
            if hasattr(array, trait):
                return see(array)
    except LayoutError:
        raise
    except Exception as error:  # other libraries raise whatever they like, where an array has no memory
        raise LayoutError(
            f"expected an array whose memory can be seen, got {_kind(array)}: {type(error).__name__}: {error}"
        ) from error
    raise LayoutError(
        "expected an array (NumPy, CuPy, PyTorch, JAX, DLPack or __cuda_array_interface__), got "
        f"{type(array).__name__}"
    )


def _kind(array: object) -> str:
    kind = type(array)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _view_numpy(array: Array) -> ArrayView:
    if type(array) is not np.ndarray and isinstance(array, np.ma.MaskedArray):
        raise LayoutError(
            "expected an array without a mask, got a NumPy masked array; pass array.filled() or array.data"
        )
    name = dtype_name(array.dtype)
    return ArrayView(array.ctypes.data, array.shape, array.strides, name, False, array.flags.writeable, array)


def _view_torch(tensor: Array) -> ArrayView:
    return _made(see_torch(tensor))


def _view_cuda(array: Array) -> ArrayView:
    interface: ReadJson = array.__cuda_array_interface__
    if interface.get("mask") is not None:
        raise LayoutError("expected an array without a mask, got a masked one")
    own = getattr(array, "dtype", None)  # names bfloat16 and fp8, which a typestr cannot
    name = dtype_name(own if own is not None else interface["typestr"])
    shape = tuple(interface["shape"])
    strides = interface.get("strides") or contiguous_strides(shape, item_size(name))
    pointer, read_only = interface["data"]
    gpu = getattr(getattr(array, "device", None), "id", None)
    return ArrayView(
        pointer or 0,
        shape,
        tuple(strides),
        name,
        True,
        not read_only,
        array,
        gpu if isinstance(gpu, int) else None,
    )


def _view_dlpack(array: Array) -> ArrayView:
    return _made(see_dlpack(array))


def _made(seen: Seen) -> ArrayView:
    strides = (
        contiguous_strides(seen.shape, 1) if seen.strides is None else seen.strides
    )  # both count elements, as these libraries do
    item = item_size(seen.dtype)
    return ArrayView(
        seen.pointer,
        seen.shape,
        tuple(stride * item for stride in strides),
        seen.dtype,
        seen.gpu is not None,
        seen.writable,
        seen.owner,
        seen.gpu,
    )


def _view_interface(array: Array) -> ArrayView:
    """NumPy reads its own interface, with all that may stand in it; only the type may have a name that it lacks."""
    interface: ReadJson = array.__array_interface__
    if interface.get("mask") is not None:
        raise LayoutError("expected an array without a mask, got a masked one")
    seen = _view_numpy(np.asarray(array))
    data = interface.get("data")
    own_memory = isinstance(data, tuple) and data[0] == seen.pointer  # else it is NumPy's copy
    own = getattr(array, "dtype", None)
    name = seen.dtype if own is None else dtype_name(own)
    if item_size(name) != item_size(seen.dtype):
        raise LayoutError(f"expected elements as large as {name}'s, got {seen.dtype}")
    writable = seen.writable and own_memory
    return ArrayView(seen.pointer, seen.shape, seen.strides, name, False, writable, (seen.owner, array))


_WAYS: dict[str, Callable[[Array], ArrayView]] = {
    "data_ptr": _view_torch,
    "addressable_shards": _view_dlpack,  # JAX's, whose other interface does not know bfloat16
    "__cuda_array_interface__": _view_cuda,
    "__dlpack_device__": _view_dlpack,
    "__array_interface__": _view_interface,
}
