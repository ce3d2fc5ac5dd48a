# SPDX-License-Identifier: Apache-2.0
"""The arrays of a scenario in device memory, strides and all."""

from __future__ import annotations

from typing import Any

from nccl_m2n.dtypes import dtype_name
from nccl_m2n.execution.views import ArrayView
from tests.scenarios import Scenario, SideOfRank


class DeviceSide(SideOfRank):
    """A `SideOfRank` whose memory has a twin on a GPU: filled from the host's, and read back into it.

    Everything is done on CuPy's current stream, as a run is when it is given no other.
    """

    def __init__(self, scenario: Scenario, rank: int, side: str, *, device: int = 0) -> None:
        import cupy

        super().__init__(scenario, rank, side)
        self._cupy, self._device = cupy, device
        with cupy.cuda.Device(device):
            self._memory = {
                name: cupy.empty(max(1, storage.base.nbytes), cupy.uint8)
                for name, storage in self.storage.items()
            }

    @property
    def arrays(self) -> dict[str, Any]:
        """Views of the device memory, each where its host twin is."""
        views = {}
        for name, storage in self.storage.items():
            array, memory = storage.array, self._memory[name]
            pointer = memory.data.ptr + array.ctypes.data - storage.base.ctypes.data
            views[name] = ArrayView(
                pointer, array.shape, array.strides, dtype_name(array.dtype), True, True, memory
            )
        return views

    def upload(self) -> None:
        """To the device what the host's memory holds."""
        for name, storage in self.storage.items():
            if storage.base.nbytes:
                with self._cupy.cuda.Device(self._device):
                    self._memory[name].set(storage.base.reshape(-1).view("u1"))

    def download(self) -> None:
        """From the device what its memory holds."""
        for name, storage in self.storage.items():
            if storage.base.nbytes:
                with self._cupy.cuda.Device(self._device):
                    storage.base.reshape(-1).view("u1")[...] = self._memory[name].get()

    def fill(self, turn: int) -> None:
        """As on the host, and then to the device."""
        super().fill(turn)
        self.upload()

    def wrong(self, turn: int) -> list[str]:
        """As on the host, of what the device's memory holds."""
        self.download()
        return super().wrong(turn)
