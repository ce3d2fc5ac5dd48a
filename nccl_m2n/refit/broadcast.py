# SPDX-License-Identifier: Apache-2.0
"""The conventional path: full tensors, packed in buckets, to every rank that wants them whole.

For parameters whose place at the destination no layout can say, such as weights that a kernel has reordered:
they arrive as the framework's own loader wants them, one full tensor after the other, in one reused buffer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nccl_m2n.dtypes import item_size
from nccl_m2n.execution.bound import Bound
from nccl_m2n.execution.memory import as_array
from nccl_m2n.execution.staging import ALIGNMENT, Staging
from nccl_m2n.execution.views import ArrayView, contiguous_strides
from nccl_m2n.planning import Plan, Topology, Transfer, plan
from nccl_m2n.transport.base import Transport

DEFAULT_BUCKET_BYTES = 1 << 30
Deliver = Callable[[int, str, Any], None]  # rank, name, the full tensor


class Broadcast:
    """Transfers of full tensors, bucket after bucket; every destination layout is one of replicas. Collective.

    All buckets share one buffer a rank, as large as the fullest bucket, and one piece of staging.

    Args:
        transport: Joins the ranks.
        transfers: What to move.
        sources: Source arrays by name, as for `Plan.bind`.
        deliver: Called with each full tensor that a local rank wanted, once it is there. The tensor is a view
            of the buffer: what is to be kept of it must be copied before the call returns.
        topology: NVLink domains.
        bucket_bytes: Bytes of full tensors that arrive at once; one tensor may have more.
        options: As for `plan`.
    """

    def __init__(
        self,
        transport: Transport,
        transfers: Sequence[Transfer],
        sources: Mapping[str, Any],
        deliver: Deliver,
        topology: Topology,
        bucket_bytes: int,
        options: Mapping[str, Any],
    ) -> None:
        self._transport, self._deliver = transport, deliver
        self._tensors: list[dict[int, dict[str, ArrayView]]] = []  # of each bucket, by rank and name
        self.bounds: list[Bound] = []
        buckets = fill_buckets(transfers, bucket_bytes)
        self.plans: tuple[Plan, ...] = tuple(plan(bucket, topology, **options) for bucket in buckets)
        buffers, staging = Staging(transport), Staging(transport)
        size = max(map(_extent, buckets), default=0)
        for rank in transport.local_ranks:  # the most first, for all buckets then share it
            if any(rank in t.destination.ranks for t in transfers):
                buffers.take(rank, size)
            staging.take(rank, max((_at(p.staging, rank) for p in self.plans), default=0))
        for bucket, made in zip(buckets, self.plans, strict=True):
            tensors = {rank: _views(bucket, rank, buffers) for rank in transport.local_ranks}
            names = {t.name for t in bucket}
            own = {name: array for name, array in sources.items() if name in names}
            self._tensors.append(tensors)
            self.bounds.append(made.bind(transport, own, _by_name(tensors), staging))

    def run(self, stream: Any = None, deadline: float | None = None) -> dict[int, Exception]:
        """Move and deliver everything. Collective.

        Args:
            stream: As for `Bound.run`; deliveries come after it, and the next bucket after the deliveries.
            deadline: On the clock of `time.monotonic`; None waits for ever.

        Returns:
            The first error of `deliver` at each local rank. Its peers go on, so nothing is raised here.

        Raises:
            TransferTimeout: If the deadline passes.
        """
        failures: dict[int, Exception] = {}
        for bound, tensors in zip(self.bounds, self._tensors, strict=True):
            bound.run(stream)
            bound.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
            for rank, views in tensors.items():
                if rank not in failures:
                    self._hand_over(rank, views, failures)
        return failures

    def _hand_over(self, rank: int, views: Mapping[str, ArrayView], failures: dict[int, Exception]) -> None:
        try:
            for name, view in views.items():
                self._deliver(rank, name, as_array(view))
            self._synchronize(rank)
        except Exception as error:  # the peers are told of it when all buckets are through
            failures[rank] = error

    def _synchronize(self, rank: int) -> None:
        """Wait for what was enqueued to read the buffer, on whichever stream that was."""
        if self._transport.memory == "device":
            from nccl_m2n.transport.gpu import import_cupy

            cupy = import_cupy()
            with cupy.cuda.Device(self._transport.devices[rank]):  # type: ignore[attr-defined]
                cupy.cuda.runtime.deviceSynchronize()


def fill_buckets(transfers: Sequence[Transfer], bucket_bytes: int) -> list[list[Transfer]]:
    """Transfers in their order, as many in a bucket as it holds, at least one."""
    buckets: list[list[Transfer]] = []
    room = 0
    for transfer in transfers:
        size = _padded(transfer)
        if size > room:
            buckets.append([])
            room = max(bucket_bytes, size)
        buckets[-1].append(transfer)
        room -= size
    return buckets


def _padded(transfer: Transfer) -> int:
    size = math.prod(transfer.shape) * item_size(transfer.destination_dtype)
    return -(-size // ALIGNMENT) * ALIGNMENT


def _extent(bucket: Sequence[Transfer]) -> int:
    return sum(map(_padded, bucket))


def _at(table: Any, rank: int) -> int:
    return int(table[rank]) if rank < len(table) else 0


def _views(bucket: Sequence[Transfer], rank: int, buffers: Staging) -> dict[str, ArrayView]:
    """The full tensors of a bucket in a rank's buffer, those that it wants."""
    views, at = {}, 0
    for transfer in bucket:
        if rank in transfer.destination.ranks:
            dtype = transfer.destination_dtype
            strides = contiguous_strides(transfer.shape, item_size(dtype))
            address = buffers.take(rank, 0) + at
            views[transfer.name] = ArrayView(
                address, transfer.shape, strides, dtype, buffers.device, True, buffers
            )
        at += _padded(transfer)
    return views


def _by_name(tensors: Mapping[int, Mapping[str, ArrayView]]) -> dict[str, Any]:
    """As `Plan.bind` takes arrays: by name, and then by rank where there are several."""
    if len(tensors) == 1:
        return dict(next(iter(tensors.values())))
    found: dict[str, Any] = {}
    for rank, views in tensors.items():
        for name, view in views.items():
            found.setdefault(name, {})[rank] = view
    return found
