# SPDX-License-Identifier: Apache-2.0
"""The pack kernel: compiled once a device, launched on prepared tables."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

import numpy as np

from nccl_m2n.execution.descriptors import block_hints, split_shapes
from nccl_m2n.execution.lower import Launches
from nccl_m2n.transport.gpu import import_cupy
from nccl_m2n.typing import Library, Stream

WARPS_PER_BLOCK = 2  # also in copy_parts.cu
THREADS_PER_BLOCK = 32 * WARPS_PER_BLOCK


@lru_cache(maxsize=64)
def copy_kernel(device: int, defines: tuple[str, ...] = ()) -> Library:
    """The kernel as a launchable CuPy function of one device."""
    cupy = import_cupy()
    source = (files("nccl_m2n.execution") / "copy_parts.cu").read_text()
    with cupy.cuda.Device(device):
        return cupy.RawKernel(source, "copy_parts", options=("--std=c++17", *defines)).kernel


@dataclass(frozen=True)
class PreparedLaunch:
    """One launch of the kernel with everything it needs, ready to be repeated."""

    function: Library
    device: int
    grid: tuple[int]
    arguments: tuple[np.generic, ...]

    def start(self, stream: Stream) -> None:
        """Enqueue the launch on a CuPy stream of the kernel's device."""
        import_cupy().cuda.runtime.setDevice(self.device)  # a launch goes to the thread's current device
        self.function(self.grid, (THREADS_PER_BLOCK,), self.arguments, stream=stream)


class CopyTables:
    """The copy tables of all launches of one rank, in device memory.

    Args:
        launches: The tables.
        device: The GPU whose memory they describe.
        defines: Compiler options, for trying the kernel's settings.
    """

    def __init__(self, launches: Launches, device: int, defines: tuple[str, ...] = ()) -> None:
        cupy = import_cupy()
        rows, shapes = split_shapes(launches.copies)
        hints, hint_bounds = block_hints(
            launches.first_tile, launches.tiles, launches.bounds, rows[:, -1], WARPS_PER_BLOCK
        )
        tables = (rows, shapes, launches.first_tile.astype(np.int32), hints.astype(np.int32))
        with cupy.cuda.Device(device):
            stream = cupy.cuda.Stream(non_blocking=True)
            with stream:
                self._tables = [cupy.asarray(table) for table in tables]
            stream.synchronize()  # the launches come on other streams, and must not find half a table
        self._function, self._device = copy_kernel(device, defines), device
        self.nbytes = sum(int(table.nbytes) for table in self._tables)
        self.launches = [
            self._launch(first, stop - first, hint, tiles)
            for first, stop, hint, tiles in zip(
                launches.bounds[:-1].tolist(),
                launches.bounds[1:].tolist(),
                hint_bounds[:-1].tolist(),
                launches.tiles.tolist(),
                strict=True,
            )
        ]

    def _launch(self, first: int, count: int, hint: int, tiles: int) -> PreparedLaunch | None:
        """The launch of some rows; None where there is nothing to copy."""
        if count == 0:
            return None
        rows, shapes, first_tile, hints = self._tables
        arguments = (
            np.int64(rows.data.ptr + first * rows.strides[0]),
            np.int64(shapes.data.ptr),
            np.int64(first_tile.data.ptr + first * first_tile.itemsize),
            np.int64(hints.data.ptr + hint * hints.strides[0]),
            np.int32(count),
            np.int32(tiles),
        )
        blocks = -(-tiles // WARPS_PER_BLOCK)
        return PreparedLaunch(self._function, self._device, (blocks,), arguments)
