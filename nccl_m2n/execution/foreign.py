# SPDX-License-Identifier: Apache-2.0
"""PyTorch tensors and DLPack, seen without importing the library that made them.

A DLPack capsule is read here, not by NumPy or CuPy, which know neither bfloat16 nor fp8 and forget that an array is
read-only.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from nccl_m2n.dtypes import dtype_name
from nccl_m2n.errors import LayoutError
from nccl_m2n.typing import Array

HOST, GPU = (1, 3), (2, 13)  # DLPack's kDLCPU, kDLCUDAHost; kDLCUDA, kDLCUDAManaged
READ_ONLY, COPIED = 1, 2  # flags of a DLPack capsule
# DLPack's codes of types: those whose size stands beside them, and those that are one type.
_SIZED = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex"}
_FP8 = ("e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")
_ONE = {6: "bool"} | {7 + i: f"float8_{name}" for i, name in enumerate(_FP8)}

# What a tensor may be that makes its memory mean something else: attribute, what to call it, what to do.
_TORCH = (
    ("is_nested", "a nested one", "pass its parts"),
    ("is_quantized", "a quantised one", "pass tensor.int_repr(), and the scale apart"),
    ("is_conj", "a lazily conjugated one", "pass tensor.resolve_conj()"),
    ("is_neg", "a lazily negative one", "pass tensor.resolve_neg()"),
    ("_is_zerotensor", "zeros without memory", "pass tensor.clone()"),
)


@dataclass(frozen=True)
class Seen:
    """Where an array of another library lies."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None  # in elements; None: row-major
    dtype: str
    gpu: int | None  # None: host memory
    writable: bool
    owner: object


def see_torch(tensor: Array) -> Seen:
    """A PyTorch tensor, or what looks like one.

    Raises:
        LayoutError: If its values are not its plain memory.
    """
    if hasattr(tensor, "to_local"):
        raise LayoutError("expected this rank's local tensor, got a DTensor; pass tensor.to_local()")
    if hasattr(tensor, "__tensor_flatten__"):
        raise LayoutError(
            f"expected a plain tensor, got a {type(tensor).__name__}, which is made of several; pass its parts"
        )
    kind = tensor.device.type
    if kind not in ("cpu", "cuda") or hasattr(tensor, "fake_mode"):
        where = "no device: it is fake" if hasattr(tensor, "fake_mode") else tensor.device
        raise LayoutError(f"expected a tensor on a CPU or a CUDA device, got one on {where}")
    if str(tensor.layout) != "torch.strided":
        raise LayoutError(
            f"expected a tensor with strides, got one of layout {tensor.layout}; pass tensor.to_dense() or its parts"
        )
    for attribute, what, remedy in _TORCH:
        told = getattr(tensor, attribute, False)
        if told() if callable(told) else told:
            raise LayoutError(f"expected a tensor whose values are its memory, got {what}; {remedy}")
    return Seen(
        tensor.data_ptr(),
        tuple(tensor.shape),
        tuple(tensor.stride()),
        dtype_name(tensor.dtype),
        None if kind == "cpu" else tensor.device.index,
        True,
        tensor,
    )


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    )


def see_dlpack(array: Array) -> Seen:
    """Whatever speaks DLPack; a JAX array is asked first whether it is all here.

    Raises:
        LayoutError: If it is sharded, deleted, on a device of another kind, or of a type that has no name.
    """
    if hasattr(array, "addressable_shards"):
        _check_jax(array)
    try:
        capsule = array.__dlpack__(max_version=(1, 1))
    except TypeError:  # written before versions were
        capsule = array.__dlpack__()
    name = b"dltensor_versioned"
    pointer = _capsule_pointer(capsule, name)
    if pointer:
        versioned = _Versioned.from_address(pointer)
        if versioned.major != 1:
            raise LayoutError(f"expected DLPack 1, got {versioned.major}.{versioned.minor}")
        tensor, writable = versioned.tensor, not versioned.flags & (READ_ONLY | COPIED)
    else:  # nothing says whether it may be written: NumPy takes it to be read-only, too
        tensor = _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
        writable = False
    if tensor.device_type not in HOST + GPU:
        raise LayoutError(
            f"expected an array on a CPU or a CUDA device, got one on DLPack's {tensor.device_type}"
        )
    return Seen(
        (tensor.data or 0) + tensor.byte_offset,
        tuple(tensor.shape[: tensor.ndim]),
        tuple(tensor.strides[: tensor.ndim]) if tensor.strides else None,
        _dlpack_type(tensor),
        tensor.device_id if tensor.device_type in GPU else None,
        writable,
        (capsule, array),
    )


def _check_jax(array: Array) -> None:
    if array.is_deleted():
        raise LayoutError("expected an array with values, got a JAX array that was deleted or donated")
    shards = len(array.sharding.device_set)
    if shards > 1:
        raise LayoutError(
            f"expected this rank's part, got a JAX array on {shards} devices; pass "
            "array.addressable_shards[i].data"
        )
    array.block_until_ready()


def _dlpack_type(tensor: _DLTensor) -> str:
    name = _ONE.get(tensor.code)
    if tensor.code in _SIZED and tensor.bits % 8 == 0:
        name = f"{_SIZED[tensor.code]}{tensor.bits}"
    if name is None or tensor.lanes != 1 or tensor.bits % 8:
        raise LayoutError(
            f"expected whole elements of a known type, got DLPack's type {tensor.code} of {tensor.bits} bits × "
            f"{tensor.lanes}; pass a view of it as bytes"
        )
    return dtype_name(name)


def _capsule_pointer(capsule: object, name: bytes) -> int:
    """The pointer in a capsule of that name, else 0. What nobody takes over is freed along with its capsule."""
    api = ctypes.pythonapi
    valid, pointer = api.PyCapsule_IsValid, api.PyCapsule_GetPointer
    valid.argtypes = pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    pointer.restype = ctypes.c_void_p
    return int(pointer(capsule, name) or 0) if valid(capsule, name) else 0
