# SPDX-License-Identifier: Apache-2.0
"""Host bytes exchanged over a communicator, for callers who hand over nothing but that, or by the caller's means."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from nccl_m2n.transport.deadline import run_within
from nccl_m2n.transport.gpu import import_cupy
from nccl_m2n.transport.ranks import Ranks
from nccl_m2n.typing import Bytes

if TYPE_CHECKING:
    from nccl_m2n.transport.base import DeviceTransport


class DeviceExchange(Ranks):
    """All-gather of byte strings by way of device memory. Collective, one at a time.

    Args:
        transport: Whose ranks these are, one a process.
    """

    def __init__(self, transport: DeviceTransport) -> None:
        self._transport = transport
        self.size, self.local_ranks, self.timeout = transport.size, transport.local_ranks, transport.timeout

    def _gather(self, messages: Mapping[int, bytes], deadline: float) -> list[bytes]:
        payload = messages[self.local_ranks[0]]
        lengths = self._rows(np.array([len(payload)], np.int64).view(np.uint8), deadline).view(np.int64)[:, 0]
        padded = np.zeros(max(1, int(lengths.max())), np.uint8)
        padded[: len(payload)] = np.frombuffer(payload, np.uint8)
        rows = self._rows(padded, deadline)
        return [row[:length].tobytes() for row, length in zip(rows, lengths.tolist(), strict=True)]

    def who_is_missing(self) -> str:
        """Nobody can be asked: what is stuck is the communicator itself."""
        return "a peer is gone or late"

    def _rows(self, mine: Bytes, deadline: float) -> Bytes:
        cupy, (rank,) = import_cupy(), self.local_ranks
        device = self._transport.devices[rank]
        with cupy.cuda.Device(device):
            stream = cupy.cuda.Stream(non_blocking=True)
            with stream:
                sent, received = cupy.asarray(mine), cupy.empty((self.size, len(mine)), np.uint8)

            def start() -> None:
                cupy.cuda.runtime.setDevice(device)
                ends = {rank: (sent.data.ptr, received.data.ptr)}
                self._transport.gather(ends, len(mine), {rank: stream.ptr})

            try:
                run_within(max(0.0, deadline - time.monotonic()), "NCCL's connecting for it", start)
                self._transport.wait(lambda: bool(stream.done), deadline, "NCCL's part of it")
            except BaseException:
                self._transport.keep((sent, received, stream))  # the device is still at work on them
                raise
            rows: Bytes = received.get(stream=stream)
            return rows


class GivenExchange(Ranks):
    """What a caller exchanges host bytes by.

    Args:
        exchange: All ranks' bytes in rank order; has a time limit of its own, if any.
        transport: Whose ranks these are, one a process.
    """

    def __init__(self, exchange: Callable[[bytes], list[bytes]], transport: Ranks) -> None:
        self._exchange = exchange
        self.size, self.local_ranks, self.timeout = transport.size, transport.local_ranks, transport.timeout

    def _gather(self, messages: Mapping[int, bytes], deadline: float) -> list[bytes]:
        return self._exchange(messages[self.local_ranks[0]])

    def who_is_missing(self) -> str:
        """Nobody is asked: the caller's exchange might wait for ever."""
        return "a peer is gone or late"
