# SPDX-License-Identifier: Apache-2.0
"""The CUDA source of the pack kernel, compiled for the CPU, against its naive twin."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from nccl_m2n.execution.descriptors import block_hints, join, packed_boxes, split_shapes
from nccl_m2n.execution.kernels import WARPS_PER_BLOCK
from nccl_m2n.execution.lower import launches
from tests.copies import boxes_of, numpy_dtype
from tests.test_descriptors import scattered

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None, reason="needs g++ to compile the kernel for the CPU"
)


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    library = tmp_path_factory.mktemp("kernel") / "copy_parts.so"
    kernel = files("nccl_m2n.execution") / "copy_parts.cu"
    shim = Path(__file__).with_name("copy_parts_on_cpu.cpp")
    flags = ["-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-pthread", "-x", "c++"]
    subprocess.run(["g++", *flags, f'-DKERNEL="{kernel}"', shim, "-o", library], check=True, timeout=120)
    function = ctypes.CDLL(str(library)).launch

    def run(copies):
        table = launches(copies, np.zeros(len(copies), np.int64), 1)
        rows, shapes = split_shapes(table.copies)
        hints, _ = block_hints(table.first_tile, table.tiles, table.bounds, rows[:, -1], WARPS_PER_BLOCK)
        tables = [
            np.ascontiguousarray(one)
            for one in (rows, shapes, table.first_tile.astype(np.int32), hints.astype(np.int32))
        ]
        pointers = [one.ctypes.data_as(ctypes.c_void_p) for one in tables]
        function(*pointers, len(rows), int(table.tiles[0]))

    return run


CASES = [((5000,), "uint8"), ((37, 65), "int16"), ((3, 5, 7, 11), "float32"), ((2, 1025), "complex128"),
         ((2, 2, 2, 2, 2, 2, 2, 2), "int16"), ((130, 16), "float64"), ((9000,), "int32")]  # fmt: skip


@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_kernel_moves_any_strides(launch, shape, dtype):
    for seed in range(3):
        source, destination = scattered(shape, dtype, seed), scattered(shape, dtype, seed + 50)
        source[...] = np.random.default_rng(seed).integers(0, 250, shape).astype(dtype)
        launch(join(boxes_of([source]), boxes_of([destination])))
        np.testing.assert_array_equal(destination, source)


def test_kernel_finds_its_copy_among_many(launch):
    """Many copies of many lengths in one launch, each cut in the middle of a run."""
    rng = np.random.default_rng(0)
    sources = [
        scattered((int(a), int(b)), "int16", seed)
        for seed, (a, b) in enumerate(rng.integers(1, 60, (150, 2)))
    ]
    for array in sources:
        array[...] = rng.integers(0, 1 << 15, array.shape)
    destinations = [np.zeros(array.shape, array.dtype) for array in sources]
    table = join(boxes_of(sources), boxes_of(destinations))
    table = np.concatenate([table, table])
    middle = rng.integers(0, [array.size + 1 for array in sources])
    table["stop"][:150] = table["start"][150:] = middle
    launch(table)
    for source, destination in zip(sources, destinations, strict=True):
        np.testing.assert_array_equal(destination, source)


FLOATS = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]


@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("origin", FLOATS)
def test_kernel_casts_as_numpy_casts(launch, origin, target):
    if origin == target:
        return
    values = np.random.default_rng(1).normal(size=(40, 61)) * np.exp2(np.arange(-30, 31))
    values[0, :5] = [0.0, -0.0, np.inf, -np.inf, np.nan]
    with np.errstate(all="ignore"):
        source = np.ascontiguousarray(values.astype(numpy_dtype(origin)).T).T
        expected = source.astype(np.float32 if origin == "float64" else source.dtype).astype(
            numpy_dtype(target)
        )
    if origin == "float64" and target == "float32":
        expected = source.astype(np.float32)
    destination = np.zeros(values.shape, numpy_dtype(target))
    launch(join(boxes_of([source]), boxes_of([destination])))
    np.testing.assert_array_equal(destination.astype(np.float64), expected.astype(np.float64))
    packed = np.zeros(values.size, numpy_dtype(target))
    boxes = boxes_of([source])
    wire = boxes_of([packed.reshape(values.shape)])
    table = join(boxes, packed_boxes(boxes.extent, wire.item, wire.format))
    table["destination"] += packed.ctypes.data
    launch(table)
    np.testing.assert_array_equal(packed.astype(np.float64), expected.astype(np.float64).ravel())


@pytest.mark.parametrize("name", FLOATS[2:])
def test_every_code_of_a_small_format(launch, name):
    """Widening is exact, and narrowing what was widened gives it back."""
    dtype = numpy_dtype(name)
    codes = np.arange(1 << 8 * dtype.itemsize).astype(f"u{dtype.itemsize}").view(dtype)
    wide, back = np.zeros(codes.size, np.float32), np.zeros_like(codes)
    launch(join(boxes_of([codes]), boxes_of([wide])))
    np.testing.assert_array_equal(wide, codes.astype(np.float32))
    launch(join(boxes_of([wide]), boxes_of([back])))
    np.testing.assert_array_equal(back.astype(np.float32), codes.astype(np.float32))
