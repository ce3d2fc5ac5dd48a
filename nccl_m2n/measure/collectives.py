# SPDX-License-Identifier: Apache-2.0
"""NCCL's own collectives over some of the ranks."""

from __future__ import annotations

from collections.abc import Sequence

from nccl_m2n.transport.base import DeviceTransport
from nccl_m2n.transport.nccl_library import checked, nccl_bindings
from nccl_m2n.typing import Array, Communicator, Stream

NO_COLOR = -1  # NCCL_SPLIT_NOCOLOR


class Collectives:
    """Communicators of some of the ranks, split off the transport's; collective over all of it.

    Args:
        transport: One for device memory, with one rank a process.
    """

    def __init__(self, transport: DeviceTransport) -> None:
        self.bindings, self.rank = nccl_bindings(), transport.local_ranks[0]
        self._whole = transport.communicator(self.rank)
        self._made: list[Communicator] = []

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        """A communicator of `ranks`, in that order; None elsewhere. Collective over all ranks."""
        member = self.rank in ranks
        key = list(ranks).index(self.rank) if member else 0
        config = self.bindings.Config()
        handle = checked(self.bindings.comm_split, self._whole, 0 if member else NO_COLOR, key, config.ptr)
        if not member:
            return None
        self._made.append(handle)
        return handle

    def broadcast(self, handle: Communicator, array: Array, stream: Stream) -> None:
        """Enqueue a broadcast of the first rank's `array` to the others', in place, on a CuPy stream."""
        byte, at = int(self.bindings.DataType.Int8), array.data.ptr
        checked(self.bindings.broadcast, at, at, array.nbytes, byte, 0, handle, stream.ptr)

    def close(self) -> None:
        """Destroy the communicators."""
        for handle in self._made:
            self.bindings.comm_destroy(handle)
        self._made = []
