# SPDX-License-Identifier: Apache-2.0
"""The pack kernel: compiled once a device, launched on prepared tables."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

import numpy as np

from nccl_m2n.execution.descriptors import split_shapes
from nccl_m2n.execution.lower import Launches
from nccl_m2n.transport.gpu import import_cupy

WARPS_PER_BLOCK = 8  # also in copy_parts.cu
THREADS_PER_BLOCK = 32 * WARPS_PER_BLOCK
BLOCKS_PER_MULTIPROCESSOR = 16  # at most, in one launch: the rest of the tiles come in turn


@lru_cache(maxsize=64)
def copy_kernel(device: int, defines: tuple[str, ...] = ()) -> Any:
    """The kernel as a launchable CuPy function of one device."""
    cupy = import_cupy()
    source = (files("nccl_m2n.execution") / "copy_parts.cu").read_text()
    with cupy.cuda.Device(device):
        return cupy.RawKernel(source, "copy_parts", options=("--std=c++17", *defines)).kernel


@dataclass(frozen=True)
class PreparedLaunch:
    """One launch of the kernel with everything it needs, ready to be repeated."""

    function: Any
    device: int
    grid: tuple[int]
    arguments: tuple[Any, ...]

    def start(self, stream: Any) -> None:
        """Enqueue the launch on a CuPy stream of the kernel's device."""
        import_cupy().cuda.runtime.setDevice(self.device)  # a launch goes to the thread's current device
        self.function(self.grid, (THREADS_PER_BLOCK,), self.arguments, stream=stream)


class CopyTables:
    """The copy tables of all launches of one rank, in device memory.

    Args:
        launches: The tables.
        device: The GPU whose memory they describe.
    """

    def __init__(self, launches: Launches, device: int, defines: tuple[str, ...] = ()) -> None:
        cupy = import_cupy()
        with cupy.cuda.Device(device):
            stream = cupy.cuda.Stream(non_blocking=True)
            with stream:
                rows, shapes = split_shapes(launches.copies)
                self._rows, self._shapes = cupy.asarray(rows), cupy.asarray(shapes)
                self._first_tile = cupy.asarray(launches.first_tile.astype(np.int32))
            stream.synchronize()  # the launches come on other streams, and must not find half a table
            multiprocessors = cupy.cuda.Device(device).attributes["MultiProcessorCount"]
        self._function, self._device = copy_kernel(device, defines), device
        self._most_blocks = multiprocessors * BLOCKS_PER_MULTIPROCESSOR
        self.nbytes = int(self._rows.nbytes + self._shapes.nbytes + self._first_tile.nbytes)
        self.launches = [
            self._launch(int(first), int(stop - first), int(tiles))
            for first, stop, tiles in zip(
                launches.bounds[:-1], launches.bounds[1:], launches.tiles, strict=True
            )
        ]

    def _launch(self, first: int, count: int, tiles: int) -> PreparedLaunch | None:
        """The launch of some rows; None where there is nothing to copy."""
        if count == 0:
            return None
        arguments = (
            np.int64(self._rows.data.ptr + first * self._rows.strides[0]),
            np.int64(self._shapes.data.ptr),
            np.int64(self._first_tile.data.ptr + first * self._first_tile.itemsize),
            np.int32(count),
            np.int32(tiles),
        )
        blocks = min(-(-tiles // WARPS_PER_BLOCK), self._most_blocks)
        return PreparedLaunch(self._function, self._device, (blocks,), arguments)
