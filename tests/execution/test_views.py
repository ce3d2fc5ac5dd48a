# SPDX-License-Identifier: Apache-2.0
"""Where an array lies, whatever library made it."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nccl_m2n import LayoutError
from nccl_m2n.execution.views import ArrayView, contiguous_strides, view_array


class Interface:
    """Has nothing but NumPy's array interface."""

    def __init__(self, array: np.ndarray) -> None:
        self.__array_interface__ = array.__array_interface__
        self.array = array


class Dlpack:
    """Has nothing but DLPack."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


BASE = np.arange(24, dtype="int16").reshape(4, 6)


@pytest.mark.parametrize("make", [lambda a: a, Interface, Dlpack], ids=["numpy", "interface", "dlpack"])
@pytest.mark.parametrize("index", [..., (slice(None), slice(None, None, 2)), (slice(1, 3), slice(2, 5))])
def test_strided_arrays(make, index: Any) -> None:
    for array in (BASE[index], BASE[index].T):
        view = view_array(make(array))
        assert (view.pointer, view.shape, view.strides) == (array.ctypes.data, array.shape, array.strides)
        assert (view.dtype, view.device, view.writable) == ("int16", False, True)
        assert view.size == array.size
        assert view.span == np.lib.array_utils.byte_bounds(array)


def test_backwards() -> None:
    array = BASE[::-1, ::-2]
    view = view_array(array)
    assert view.strides == (-12, -4)
    assert view.span == np.lib.array_utils.byte_bounds(array)


def test_extended_types() -> None:
    assert view_array(np.zeros(3, ml_dtypes.bfloat16)).dtype == "bfloat16"
    assert view_array(np.zeros(3, ml_dtypes.float8_e4m3fn)).dtype == "float8_e4m3fn"


def test_read_only() -> None:
    array = np.zeros(3)
    array.flags.writeable = False
    assert not view_array(array).writable
    assert not view_array(Interface(array)).writable


def test_scalars_and_nothing() -> None:
    assert view_array(np.float32(3)[...]).shape == ()
    empty = view_array(np.zeros((0, 3)))
    assert empty.size == 0
    assert empty.span[0] == empty.span[1]


def test_a_view_is_taken_as_it_is() -> None:
    view = ArrayView(4096, (2, 3), contiguous_strides((2, 3), 4), "float32")
    assert view_array(view) is view
    assert view.strides == (12, 4)
    assert view.span == (4096, 4096 + 24)


def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(24, dtype=torch.int16).reshape(4, 6)[:, ::2].T
    view = view_array(tensor)
    assert (view.pointer, view.shape, view.strides) == (tensor.data_ptr(), (3, 4), (4, 12))
    assert view_array(torch.zeros(2, dtype=torch.bfloat16)).dtype == "bfloat16"
    assert view_array(torch.zeros(2, dtype=torch.float8_e4m3fn)).dtype == "float8_e4m3fn"
    with pytest.raises(LayoutError, match="expected a tensor on a CPU or a CUDA device, got one on meta"):
        view_array(torch.zeros(2, device="meta"))


def test_a_dtensor_is_refused() -> None:
    class Fake:
        data_ptr = element_size = to_local = None

    with pytest.raises(
        LayoutError, match=r"expected this rank's local tensor, got a DTensor; pass tensor.to_local"
    ):
        view_array(Fake())


@pytest.mark.parametrize("given", [[1, 2], None, 3, "abc", b"abc"])
def test_what_is_no_array(given: object) -> None:
    with pytest.raises(LayoutError, match=rf"expected an array \(NumPy, .*\), got {type(given).__name__}"):
        view_array(given)


def test_device_memory() -> None:
    class OnDevice:
        __cuda_array_interface__ = {"shape": (2, 3), "typestr": "<f4", "data": (4096, True), "version": 3}  # noqa: RUF012

    view = view_array(OnDevice())
    assert (view.pointer, view.strides, view.device, view.writable) == (4096, (12, 4), True, False)
