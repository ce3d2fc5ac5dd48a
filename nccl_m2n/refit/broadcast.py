# SPDX-License-Identifier: Apache-2.0
"""The conventional path: full tensors, packed in buckets, to every rank that wants them whole.

For parameters whose place at the destination no layout can say, such as weights that a kernel has reordered:
they arrive as the framework's own loader wants them, one full tensor after the other, in one reused buffer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from nccl_m2n.dtypes import item_size
from nccl_m2n.execution.bound import Bound
from nccl_m2n.execution.memory import as_array
from nccl_m2n.execution.staging import ALIGNMENT, Staging
from nccl_m2n.execution.views import ArrayView, contiguous_strides
from nccl_m2n.planning import Plan, Transfer
from nccl_m2n.transport.base import Transport
from nccl_m2n.typing import Array, Ints, Stream

DEFAULT_BUCKET_BYTES = 1 << 30
Deliver: TypeAlias = Callable[[int, str, Array], None]  # rank, name, the full tensor
Views: TypeAlias = Mapping[int, Mapping[str, ArrayView]]  # by rank and name


class Broadcast:
    """Full tensors, bucket after bucket; every destination layout is one of replicas. Collective.

    All buckets share one buffer a rank, as large as the fullest bucket, and one piece of staging.

    Args:
        transport: Joins the ranks.
        plans: What to move, bucket after bucket.
        sources: Source arrays.
        deliver: Called with each full tensor that a local rank wanted, once it is there. The tensor is a view
            of the buffer: what is to be kept of it must be copied before the call returns.
        staging: Where to take staging from.
    """

    def __init__(
        self, transport: Transport, plans: Sequence[Plan], sources: Views, deliver: Deliver, staging: Staging
    ) -> None:
        self._transport, self._deliver, self.plans = transport, deliver, plans
        self._tensors: list[dict[int, dict[str, ArrayView]]] = []  # of each bucket, by rank and name
        self.bounds: list[Bound] = []
        buffers = Staging(transport)
        size = max((_extent(p.transfers) for p in plans), default=0)
        for rank in transport.local_ranks:  # the most first, for all buckets then share it
            if any(rank in t.destination.ranks for p in plans for t in p.transfers):
                buffers.take(rank, size)
            staging.take(rank, max((_at(p.staging, rank) for p in plans), default=0))
        try:
            for made in plans:
                tensors = {rank: _views(made.transfers, rank, buffers) for rank in transport.local_ranks}
                self._tensors.append(tensors)
                self.bounds.append(made.bind(transport, moved_by(made, sources), tensors, staging))
        except BaseException:
            self.close()
            raise

    def run(self, stream: Stream = None, deadline: float | None = None) -> dict[int, Exception]:
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

    def close(self) -> None:
        """Release what was bound."""
        for bound in self.bounds:
            bound.close()

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
            with cupy.cuda.Device(self._transport.devices[rank]):
                cupy.cuda.runtime.deviceSynchronize()


def fill_buckets(transfers: Sequence[Transfer], bucket_bytes: int) -> list[list[Transfer]]:
    """Transfers in their order, as many in a bucket as it holds, at least one."""
    buckets: list[list[Transfer]] = []
    room = 0
    for transfer in transfers:
        size = _padded(transfer)
        if not buckets or size > room:  # the first may have no bytes
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


def _at(table: Ints, rank: int) -> int:
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


def moved_by(plan: Plan, arrays: Views) -> Views:
    """Those of the arrays that a plan moves."""
    names = {t.name for t in plan.transfers}
    return {rank: {n: view for n, view in own.items() if n in names} for rank, own in arrays.items()}
