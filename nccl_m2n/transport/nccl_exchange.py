# SPDX-License-Identifier: Apache-2.0
"""Host bytes exchanged over a communicator, for callers who hand over nothing but that."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from nccl_m2n.transport.deadline import run_within
from nccl_m2n.transport.gpu import import_cupy


class DeviceExchange:
    """All-gather of byte strings by way of device memory. Collective, one at a time.

    Args:
        gather: Enqueues NCCL's all-gather: addresses sent and received, bytes a rank, stream.
        wait: Waits until a condition holds, or a deadline passes.
        size: Number of ranks.
        device: This rank's GPU.
        timeout: Seconds for NCCL to connect the ranks, which its first collective does.
    """

    def __init__(
        self,
        gather: Callable[[int, int, int, int], None],
        wait: Callable[[Callable[[], bool], float | None, str], None],
        size: int,
        device: int,
        timeout: float,
    ) -> None:
        self._gather, self._wait = gather, wait
        self._size, self._device, self._timeout = size, device, timeout

    def __call__(self, payload: bytes) -> list[bytes]:
        """All ranks' payloads, in rank order."""
        lengths = self._rows(np.array([len(payload)], np.int64).view(np.uint8)).view(np.int64)[:, 0]
        padded = np.zeros(max(1, int(lengths.max())), np.uint8)
        padded[: len(payload)] = np.frombuffer(payload, np.uint8)
        rows = self._rows(padded)
        return [row[:length].tobytes() for row, length in zip(rows, lengths.tolist(), strict=True)]

    def _rows(self, mine: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        cupy = import_cupy()
        with cupy.cuda.Device(self._device):
            stream = cupy.cuda.Stream(non_blocking=True)
            with stream:
                sent, received = cupy.asarray(mine), cupy.empty((self._size, len(mine)), np.uint8)

            def start() -> None:
                cupy.cuda.runtime.setDevice(self._device)
                self._gather(sent.data.ptr, received.data.ptr, len(mine), stream.ptr)

            run_within(self._timeout, "an exchange over NCCL", start)
            deadline = time.monotonic() + self._timeout
            self._wait(lambda: bool(stream.done), deadline, "an exchange over NCCL")
            return received.get(stream=stream)
