# SPDX-License-Identifier: Apache-2.0
"""Names and sizes of element types, from NumPy, ml_dtypes, PyTorch or plain text.

Bytes move, never typed elements, so any type with a size will do; names are kept for agreement
between ranks and for casts in flight.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from nccl_m2n.checks import shown
from nccl_m2n.errors import LayoutError

# Types that NumPy itself does not know, with their size in bytes (ml_dtypes' and PyTorch's names).
_EXTENDED = {
    "bfloat16": 2,
    "float8_e4m3": 1,
    "float8_e4m3b11fnuz": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e3m4": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
}
# What people write besides. 'half', 'float' (of 8 bytes) and 'double' are NumPy's own.
_SHORT = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "fp64": "float64",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}


def dtype_name(dtype: Any) -> str:
    """The canonical name of an element type.

    Args:
        dtype: A name, a short one such as ``"bf16"`` too, a NumPy (or ml_dtypes) dtype or scalar type, or a PyTorch
            dtype.

    Raises:
        LayoutError: If it is none of these.

    Example:
        >>> import numpy as np
        >>> from nccl_m2n.dtypes import dtype_name
        >>> dtype_name(np.float32), dtype_name("torch.bfloat16"), dtype_name("<i4")
        ('float32', 'bfloat16', 'int32')
    """
    text = dtype if isinstance(dtype, str) else str(dtype) if type(dtype).__module__ == "torch" else None
    if text is not None:
        text = text.removeprefix("torch.")
        text = _SHORT.get(text, text)
    if text in _EXTENDED:
        return text
    try:
        if dtype is None or text == "":  # NumPy takes these for float64
            raise TypeError
        made = np.dtype(dtype if text is None else text)
    except TypeError:
        raise LayoutError(
            f"expected an element type, such as 'bfloat16' or numpy.float32, got {shown(dtype)}"
        ) from None
    if made.hasobject or made.itemsize == 0:
        raise LayoutError(
            f"expected an element type of fixed size, got {made!r}; Python objects cannot be moved"
        )
    return (
        made.name
        if (made.fields is None and made.kind != "V") or made.name in _EXTENDED
        else f"V{made.itemsize}"
    )


@lru_cache(maxsize=256)
def item_size(name: str) -> int:
    """Bytes of one element of the type called `name`."""
    return _EXTENDED.get(name) or np.dtype(name).itemsize


def is_float(name: str) -> bool:
    """Whether values of this type may be cast in flight to and from other float types."""
    return name.startswith(("float", "bfloat")) and not name.startswith("float4")


def narrower(a: str, b: str) -> str:
    """The type that crosses the wire between elements of types `a` and `b`: the smaller one, else `a`."""
    return b if item_size(b) < item_size(a) else a


def element_unit(size: int) -> int:
    """The largest power of two, at most 16, that divides an element's `size` in bytes.

    Elements are moved in units of this many bytes; whatever starts at a multiple of 16 bytes and
    consists of whole units can be cut every 16 bytes without cutting a unit.
    """
    return min(size & -size, 16)
