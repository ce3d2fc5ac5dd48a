# SPDX-License-Identifier: Apache-2.0
"""One rank's arrays of one side: one allocation for all tensors, in host or device memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np

from nccl_m2n.cli.weights import Bytes, Weights
from nccl_m2n.dtypes import item_size
from nccl_m2n.execution.views import ArrayView, contiguous_strides
from nccl_m2n.layout import Layout
from nccl_m2n.transport.gpu import import_cupy
from nccl_m2n.typing import Array

ALIGNMENT = 256  # bytes between the starts of tensors
POISON = 0xA5  # what destination arrays hold before: bytes that never came show

Part = tuple[str, Layout, str]  # name, layout, dtype


class Shards:
    """The local arrays of one rank.

    Args:
        parts: The side's tensors; those that this rank holds nothing of are left out.
        rank: The rank.
        device: Its GPU; None for host memory.
    """

    def __init__(self, parts: Iterable[Part], rank: int, device: int | None = None) -> None:
        self.rank, self.device = rank, device
        self.layouts: dict[str, Layout] = {}
        self._place: dict[str, tuple[int, tuple[int, ...], str]] = {}
        end = 0
        for name, layout, dtype in parts:
            shape = layout.local_shape(rank) if rank in layout.ranks else (0,)
            nbytes = math.prod(shape) * item_size(dtype)
            if nbytes:
                self.layouts[name] = layout
                self._place[name] = end, shape, dtype
                end += -(-nbytes // ALIGNMENT) * ALIGNMENT
        self.allocated = end
        self.nbytes = sum(math.prod(shape) * item_size(dtype) for _, shape, dtype in self._place.values())
        self._memory: Array = None

    def allocate(self) -> None:
        """Take the memory.

        Raises:
            MemoryError: If there is not as much.
        """
        if self.device is None:
            self._memory = np.empty(self.allocated, np.uint8)
            return
        cupy = import_cupy()
        try:
            with cupy.cuda.Device(self.device):
                self._memory = cupy.empty(self.allocated, np.uint8)
        except cupy.cuda.memory.OutOfMemoryError as error:
            raise MemoryError(f"{error}; take fewer layers (--layers) or more GPUs") from None

    def views(self) -> dict[str, ArrayView]:
        """The arrays as `Plan.bind` takes them; typed by name, so that no library need know the type."""
        host = self.device is None
        base = self._memory.ctypes.data if host else self._memory.data.ptr
        return {
            name: ArrayView(
                base + start,
                shape,
                contiguous_strides(shape, item_size(dtype)),
                dtype,
                device=not host,
                owner=self._memory,
            )
            for name, (start, shape, dtype) in self._place.items()
        }

    def fill(self, name: str, weights: Weights) -> None:
        """Put this rank's part of a tensor in place."""
        layout, local = self.layouts[name], self._local(name)
        made = local if self.device is None else np.empty(local.shape, np.uint8)
        for piece in layout.pieces(self.rank):
            made[piece.local_slices] = weights.read(name, piece.box.slices)
        if self.device is not None:
            with import_cupy().cuda.Device(self.device):
                local.set(made)

    def poison(self) -> None:
        """Overwrite everything, so that what does not arrive shows."""
        if self.device is None:
            self._memory.fill(POISON)
            return
        cupy = import_cupy()
        with cupy.cuda.Device(self.device):
            self._memory.fill(POISON)
            cupy.cuda.Device(self.device).synchronize()

    def read(self, name: str) -> Bytes:
        """A tensor's local array as bytes in host memory, of shape ``(*local shape, bytes of an item)``."""
        local = self._local(name)
        if self.device is None:
            return np.asarray(local)
        with import_cupy().cuda.Device(self.device):
            return np.asarray(local.get())

    def _local(self, name: str) -> Array:
        start, shape, dtype = self._place[name]
        item = item_size(dtype)
        return self._memory[start : start + math.prod(shape) * item].reshape(*shape, item)

    def __iter__(self) -> Iterator[str]:
        return iter(self._place)

    def __len__(self) -> int:
        return len(self._place)
