# SPDX-License-Identifier: Apache-2.0
"""Names and sizes of element types."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from nccl_m2n import LayoutError
from nccl_m2n.dtypes import (
    Cast,
    Casts,
    cast_name,
    cast_number,
    dtype_name,
    element_unit,
    is_float,
    item_size,
    keeps_range,
    narrower,
)
from nccl_m2n.execution.memory import numpy_type

FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


@pytest.mark.parametrize(
    ("spellings", "name", "size"),
    [
        (["float32", "<f4", "f", np.float32, np.dtype("float32"), "torch.float32"], "float32", 4),
        (["float16", "fp16", "half"], "float16", 2),
        (
            ["bfloat16", "bf16", "torch.bfloat16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16)],
            "bfloat16",
            2,
        ),
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
        ([np.dtype(("f4", (2,)))], "V8", 8),
        (["S3", np.dtype("S3")], "S3", 3),
        (["U3", np.dtype("U3")], "U3", 12),
        (["int4", "torch.int4", ml_dtypes.int4], "int4", 1),
        (["complex32", "torch.complex32"], "complex32", 4),
        (["datetime64[ns]", "M8[ns]"], "datetime64[ns]", 8),
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
        (np.dtypes.StringDType(), r"expected an element type of fixed size"),
        (None, r"expected an element type, such as .*, got None"),
        ("(2", r"expected an element type, such as .*, got '\(2'"),
        (">f4", r"this machine's byte order, got dtype\('>f4'\); pass array\.astype\("),
        (np.dtype([("a", "u1"), ("b", ">i4")]), r"this machine's byte order"),
    ],
)
def test_what_is_no_type(given: object, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        dtype_name(given)


def test_what_can_be_cast() -> None:
    assert narrower("float32", "bfloat16") == narrower("bfloat16", "float32") == "bfloat16"
    assert (narrower("float16", "bfloat16"), narrower("bfloat16", "float16")) == ("float16", "bfloat16")
    assert all(map(is_float, FLOATS))
    assert not any(map(is_float, ("int32", "bool", "complex64", "V4", "float4_e2m1fn_x2", "float8_e4m3")))
    assert [cast_name(cast_number(name)) for name in FLOATS] == list(FLOATS)
    assert cast_number("float8_e4m3") == cast_number("int32") == 0


@pytest.mark.parametrize("a", FLOATS)
@pytest.mark.parametrize("b", FLOATS)
def test_a_range_that_is_kept(a: str, b: str) -> None:
    """As ml_dtypes has it: the largest value but for a step of bfloat16, and the least normal one, survive."""
    first, second = (ml_dtypes.finfo(numpy_type(name)) for name in (a, b))
    ends = np.array([float(first.max) * (1 - 2**-7), float(first.smallest_normal)])
    with np.errstate(over="ignore"):
        there = ends.astype(second.dtype).astype(np.float64)
    kept = bool(np.isfinite(there).all()) and ends[1] >= float(second.smallest_normal)
    assert keeps_range(a, b) == kept


KEPT = [("float32", "bfloat16"), ("float32", "float64"), ("float16", "float32"), ("float8_e5m2", "float16")]
LOST = [
    ("float32", "float16"),
    ("bfloat16", "float8_e4m3fn"),
    ("float16", "float8_e5m2"),
    ("bfloat16", "float16"),
]


@pytest.mark.parametrize(("a", "b"), KEPT + LOST)
@pytest.mark.parametrize(
    ("cast", "named"),
    [
        (False, False),
        (True, False),
        ("bf16", False),
        (["float16", "float8_e4m3fn", "torch.float8_e5m2"], True),
        ({"w*": "float16", "*.weight": "fp16"}, None),
        ({"other": "float16"}, False),
    ],
    ids=str,
)
def test_a_narrower_range_has_to_be_named(a: str, b: str, cast: Cast, named: bool | None) -> None:
    asked = Casts.of(cast)
    asked.check("w.1", a, a)
    asked.check("w.1", "int8", "int8")
    if named is None:
        named = b == "float16"
    if cast is not False and (named or (a, b) in KEPT):
        asked.check("w.1", a, b)
        return
    remedy = "cast=True" if cast is False else f"whose range is narrower.*cast='{b}'"
    with pytest.raises(LayoutError, match=rf"'w\.1'.*{a} and then {b}.*{remedy}"):
        asked.check("w.1", a, b)


@pytest.mark.parametrize("cast", [1, None, 2.5, "yes", "int8", ["float32", 3], {"w": "int4"}, ...], ids=str)
def test_what_is_no_cast(cast: Cast) -> None:
    with pytest.raises(LayoutError, match=r"expected (cast|an element type)"):
        Casts.of(cast)


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
