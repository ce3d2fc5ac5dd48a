# SPDX-License-Identifier: Apache-2.0
"""The naive twin of the pack kernel, and boxes of real NumPy arrays to try both on."""

from __future__ import annotations

import ctypes

import numpy as np

from nccl_m2n.dtypes import cast_name, cast_number
from nccl_m2n.execution.descriptors import DIMENSIONS, Boxes


def numpy_dtype(name: str) -> np.dtype:
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))


def boxes_of(arrays: list[np.ndarray]) -> Boxes:
    """One box a (possibly strided) array."""
    extent = np.ones((len(arrays), DIMENSIONS), np.int64)
    stride = np.zeros((len(arrays), DIMENSIONS), np.int64)
    for row, array in enumerate(arrays):
        extent[row, DIMENSIONS - array.ndim :] = array.shape
        stride[row, DIMENSIONS - array.ndim :] = array.strides
    return Boxes(
        address=np.array([array.ctypes.data for array in arrays], np.int64),
        extent=extent,
        stride=stride,
        item=np.array([array.itemsize for array in arrays], np.int64),
        format=np.array([cast_number(array.dtype.name) for array in arrays], np.int64),
    )


def run_copies(copies: np.ndarray) -> None:
    """Do what a table of copies says, one unit at a time."""
    for copy in copies:
        sizes = (int(copy["source_unit"]), int(copy["destination_unit"]))
        for unit in range(int(copy["start"]), int(copy["stop"])):
            row, inner = divmod(unit, int(copy["run"]))
            source = int(copy["source"]) + inner * sizes[0]
            destination = int(copy["destination"]) + inner * sizes[1]
            for d in range(DIMENSIONS):
                row, i = divmod(row, int(copy["extent"][d]))
                source += i * int(copy["source_stride"][d])
                destination += i * int(copy["destination_stride"][d])
            if copy["cast"]:
                kinds = (
                    numpy_dtype(cast_name(copy["cast"] // 16)),
                    numpy_dtype(cast_name(copy["cast"] % 16)),
                )
                value = np.frombuffer(ctypes.string_at(source, sizes[0]), kinds[0]).astype(kinds[1])
                ctypes.memmove(destination, value.tobytes(), sizes[1])
            else:
                assert source % sizes[0] == 0 and destination % sizes[1] == 0, "unaligned access"
                ctypes.memmove(destination, source, sizes[0])
