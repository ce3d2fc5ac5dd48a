# SPDX-License-Identifier: Apache-2.0
"""Memory for bytes on their way: blocks packed or received that do not lie ready in the user's arrays."""

from __future__ import annotations

import numpy as np

from nccl_m2n.transport.base import Transport
from nccl_m2n.transport.gpu import import_cupy

ALIGNMENT = 256  # bytes


class Staging:
    """One block of memory for each local rank, as large as the largest that was asked for.

    Programs that share a `Staging` use the same memory, so they may not run at the same time.

    Args:
        transport: Says in which memory, and on which GPU, a rank's arrays are.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._blocks: dict[int, list[tuple[int, int, object]]] = {}  # address, bytes, what owns them

    @property
    def device(self) -> bool:
        """Whether it is GPU memory."""
        return self._transport.memory == "device"

    def take(self, rank: int, nbytes: int) -> int:
        """The address of `nbytes` bytes for a rank's programs, at a multiple of `ALIGNMENT`.

        What was taken before stays valid. Ask for the most first: less lies in the same memory.
        """
        blocks = self._blocks.setdefault(rank, [])
        if not blocks and not nbytes:
            return 0
        if not blocks or blocks[-1][1] < nbytes:
            blocks.append(self._allocate(rank, nbytes))
        return blocks[-1][0]

    def _allocate(self, rank: int, nbytes: int) -> tuple[int, int, object]:
        size = max(nbytes, 1)
        if not self.device:
            array = np.empty(size + ALIGNMENT, np.uint8)
            return -(-array.ctypes.data // ALIGNMENT) * ALIGNMENT, nbytes, array
        cupy = import_cupy()
        with cupy.cuda.Device(self._transport.devices[rank]):
            block = cupy.cuda.alloc(size)
        return block.ptr, nbytes, block
