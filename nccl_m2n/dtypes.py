# SPDX-License-Identifier: Apache-2.0
"""Names, sizes and ranges of element types, from NumPy, ml_dtypes, PyTorch or plain text; and which casts are meant.

Bytes move, never typed elements, so any type with a size will do; names are kept for agreement
between ranks and for casts in flight.
"""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np

from nccl_m2n.errors import LayoutError

# Types that NumPy itself does not know, with their size in bytes (ml_dtypes' and PyTorch's names).
_EXTENDED = {
    "bfloat16": 2,
    "complex32": 4,
    "float8_e4m3": 1,
    "float8_e4m3b11fnuz": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e3m4": 1,
    "float8_e8m0fnu": 1,
    "float6_e2m3fn": 1,  # ml_dtypes keeps these and the next ones one to a byte
    "float6_e3m2fn": 1,
    "float4_e2m1fn": 1,
    "float4_e2m1fn_x2": 1,
    "int2": 1,
    "int4": 1,
    "uint2": 1,
    "uint4": 1,
}
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}  # what people write


class _Float(NamedTuple):
    """A float type that can be cast in flight."""

    number: int  # in copy_parts.cu
    largest: float  # finite value
    least: float  # normal value


_FLOATS = {
    "float64": _Float(1, sys.float_info.max, sys.float_info.min),
    "float32": _Float(2, (2 - 2**-23) * 2.0**127, 2.0**-126),
    "float16": _Float(3, 65504.0, 2.0**-14),
    "bfloat16": _Float(4, (2 - 2**-7) * 2.0**127, 2.0**-126),
    "float8_e4m3fn": _Float(5, 448.0, 2.0**-6),
    "float8_e5m2": _Float(6, 57344.0, 2.0**-14),
}
RAW = 0  # the number of any type that is only ever moved as bytes

Cast: TypeAlias = bool | str | Collection[str] | Mapping[str, str]


def dtype_name(dtype: object) -> str:
    """The canonical name of an element type.

    Args:
        dtype: A name, a NumPy (or ml_dtypes) dtype or scalar type, or a PyTorch dtype. Structured types are told
            apart by their size alone.

    Raises:
        LayoutError: If it is none of these, or its bytes are in another order than this machine's.

    Example:
        >>> import numpy as np
        >>> from nccl_m2n.dtypes import dtype_name
        >>> dtype_name(np.float32), dtype_name("torch.bfloat16"), dtype_name("bf16"), dtype_name("<i4")
        ('float32', 'bfloat16', 'bfloat16', 'int32')
    """
    if isinstance(dtype, np.dtype):
        return _numpy_name(dtype)
    text = dtype if isinstance(dtype, str) else str(dtype) if type(dtype).__module__ == "torch" else None
    if text is not None:
        text = text.removeprefix("torch.")
        text = _SHORT.get(text, text)
        if text in _EXTENDED:
            return text
    try:
        if dtype is None or text == "":  # NumPy would take these for float64
            raise TypeError
        made = np.dtype(dtype if text is None else text)  # type: ignore[call-overload]
    except (TypeError, ValueError, SyntaxError):
        raise LayoutError(
            f"expected an element type, such as 'bfloat16' or numpy.float32, got {dtype!r}"
        ) from None
    return _numpy_name(made)


@lru_cache(maxsize=256)
def _numpy_name(made: np.dtype[np.generic]) -> str:
    if made.hasobject or made.itemsize == 0:
        raise LayoutError(
            f"expected an element type of fixed size, got {made!r}; Python objects cannot be moved"
        )
    if not made.isnative:
        raise LayoutError(
            f"expected elements in this machine's byte order, got {made!r}; pass "
            "array.astype(array.dtype.newbyteorder('='))"
        )
    if made.name in _EXTENDED or made.kind not in "SUV":
        return made.name
    return f"V{made.itemsize}" if made.kind == "V" else made.str[1:]


@lru_cache(maxsize=256)
def item_size(name: str) -> int:
    """Bytes of one element of the type called `name`."""
    return _EXTENDED.get(name) or np.dtype(name).itemsize


def is_float(name: str) -> bool:
    """Whether values of this type may be cast in flight to and from other float types."""
    return name in _FLOATS


def keeps_range(source: str, destination: str) -> bool:
    """Whether a cast loses precision at most: the destination's range holds the source's, up to a step of bfloat16.

    Example:
        >>> from nccl_m2n.dtypes import keeps_range
        >>> keeps_range("float32", "bfloat16"), keeps_range("bfloat16", "float16")
        (True, False)
    """
    if source == destination:
        return True
    if not (is_float(source) and is_float(destination)):
        return False
    a, b = _FLOATS[source], _FLOATS[destination]
    return b.largest >= a.largest * (1 - 2**-7) and b.least <= a.least


@dataclass(frozen=True)
class Casts:
    """Which casts in flight somebody asked for; made by `Casts.of`.

    Attributes:
        allowed: Whether element types may differ at all.
        named: Patterns of tensors' names, each with the types that such tensors may become although their range is
            narrower.
    """

    allowed: bool
    named: tuple[tuple[str, frozenset[str]], ...] = ()

    @classmethod
    def of(cls, cast: Cast) -> Casts:
        """Read what a caller passed as `cast`.

        Args:
            cast: True for casts to a type whose range holds the source's. Casts to a narrower range (float16, fp8)
                have to be asked for by name besides: the destination's type or several, for all tensors, or a
                mapping from pattern of tensors' names to type.

        Raises:
            LayoutError: If it is none of these, or names no float type.

        Example:
            >>> from nccl_m2n.dtypes import Casts
            >>> Casts.of({"*.experts.*": "float8_e4m3fn"}).check("w", "float32", "bfloat16")
        """
        if isinstance(cast, bool):
            return cls(cast)
        if isinstance(cast, str):
            cast = [cast]
        if isinstance(cast, Mapping):
            return cls(True, tuple((str(name), frozenset([_castable(t)])) for name, t in cast.items()))
        if isinstance(cast, Collection):
            return cls(True, (("*", frozenset(map(_castable, cast))),))
        raise LayoutError(
            f"expected cast to be True, False, names of element types or a mapping from tensors to them, got {cast!r}"
        )

    def check(self, name: str, source: str, destination: str) -> None:
        """Refuse a cast of the tensor called `name` that was not asked for.

        Raises:
            LayoutError: Naming the tensor and the two types.
        """
        if source == destination:
            return
        told = (
            f"tensor {name!r}: expected one element type on both sides, got {source} and then {destination}"
        )
        if not self.allowed:
            raise LayoutError(f"{told}; pass cast=True to cast in flight")
        by_name = any(destination in types and fnmatch.fnmatchcase(name, of) for of, types in self.named)
        castable = is_float(source) and is_float(destination)  # what is not, `Transfer` refuses
        if castable and not by_name and not keeps_range(source, destination):
            raise LayoutError(
                f"{told}, whose range is narrower: values would be lost; pass cast={destination!r} if that is meant"
            )


def _castable(dtype: object) -> str:
    name = dtype_name(dtype)
    if not is_float(name):
        raise LayoutError(f"expected cast to name float types among {', '.join(_FLOATS)}, got {dtype!r}")
    return name


def cast_number(name: str) -> int:
    """The kernel's number of a type; `RAW` for one that cannot be cast."""
    found = _FLOATS.get(name)
    return RAW if found is None else found.number


def cast_name(number: int) -> str:
    """The type that the kernel knows by a number."""
    return next(name for name, each in _FLOATS.items() if each.number == number)


def narrower(a: str, b: str) -> str:
    """The type that crosses the wire between elements of types `a` and `b`: the smaller one, else `a`."""
    return b if item_size(b) < item_size(a) else a


def element_unit(size: int) -> int:
    """The largest power of two, at most 16, that divides an element's `size` in bytes.

    Elements are moved in units of this many bytes; whatever starts at a multiple of 16 bytes and
    consists of whole units can be cut every 16 bytes without cutting a unit.
    """
    return min(size & -size, 16)
