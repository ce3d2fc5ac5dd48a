# SPDX-License-Identifier: Apache-2.0
"""The number formats that can be cast on the way, numbered as the kernel numbers them."""

from __future__ import annotations

from nccl_m2n.errors import LayoutError

RAW = 0  # any format that is only ever moved as bytes

FORMATS = {
    "float64": 1,
    "float32": 2,
    "float16": 3,
    "bfloat16": 4,
    "float8_e4m3fn": 5,
    "float8_e5m2": 6,
}


def format_number(name: str, *, cast: bool = False) -> int:
    """The kernel's number of a format.

    Args:
        name: Canonical dtype name.
        cast: Whether elements of it are to be cast, which only floating-point formats can be.

    Raises:
        LayoutError: If the elements would have to be cast and cannot be.
    """
    number = FORMATS.get(name, RAW)
    if cast and number == RAW:
        known = ", ".join(FORMATS)
        raise LayoutError(
            f"cannot cast {name} on the way; these can be: {known}. Cast the array before, or keep its dtype."
        )
    return number
