# SPDX-License-Identifier: Apache-2.0
"""Names and sizes of element types."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from nccl_m2n import LayoutError
from nccl_m2n.dtypes import dtype_name, element_unit, is_float, item_size, narrower


@pytest.mark.parametrize(
    ("spellings", "name", "size"),
    [
        (["float32", "<f4", "f", np.float32, np.dtype("float32"), "torch.float32"], "float32", 4),
        (["bfloat16", "torch.bfloat16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16)], "bfloat16", 2),
        (["float8_e4m3fn", ml_dtypes.float8_e4m3fn, "torch.float8_e4m3fn"], "float8_e4m3fn", 1),
        (["float8_e5m2", ml_dtypes.float8_e5m2], "float8_e5m2", 1),
        (["float8_e8m0fnu", "torch.float8_e8m0fnu"], "float8_e8m0fnu", 1),
        (["torch.float4_e2m1fn_x2"], "float4_e2m1fn_x2", 1),
        (["bool", bool, np.bool_, "?"], "bool", 1),
        (["int64", int, "q"], "int64", 8),
        (["uint16", "<u2"], "uint16", 2),
        (["complex64", np.complex64], "complex64", 8),
        (["complex128", complex], "complex128", 16),
        (["V3", np.dtype("V3")], "V3", 3),
        ([np.dtype([("a", "i4"), ("b", "i2")])], "V6", 6),
    ],
)
def test_names(spellings: list[object], name: str, size: int) -> None:
    assert {dtype_name(one) for one in spellings} == {name}
    assert item_size(name) == size
    assert dtype_name(name) == name


def test_torch_types() -> None:
    torch = pytest.importorskip("torch")
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "int16", "bool", "complex64", "uint16"):
        assert dtype_name(getattr(torch, name)) == name
        assert item_size(name) == getattr(torch, name).itemsize


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("bfloat17", r"expected an element type, such as .*, got 'bfloat17'"),
        (3.5, r"expected an element type, such as .*, got 3\.5"),
        (object, r"expected an element type of fixed size.*Python objects cannot be moved"),
        ("S0", r"expected an element type of fixed size"),
    ],
)
def test_what_is_no_type(given: object, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        dtype_name(given)


def test_casts() -> None:
    assert narrower("float32", "bfloat16") == narrower("bfloat16", "float32") == "bfloat16"
    assert (narrower("float16", "bfloat16"), narrower("bfloat16", "float16")) == ("float16", "bfloat16")
    assert all(map(is_float, ("float64", "float32", "float16", "bfloat16", "float8_e5m2")))
    assert not any(map(is_float, ("int32", "bool", "complex64", "V4", "float4_e2m1fn_x2")))


def test_units() -> None:
    assert [element_unit(n) for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)] == [
        1,
        2,
        1,
        4,
        2,
        8,
        4,
        16,
        8,
        16,
        16,
    ]
