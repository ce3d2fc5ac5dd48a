# SPDX-License-Identifier: Apache-2.0
"""One round's messages as one NCCL group, on prepared integers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nccl_m2n.errors import TransportError
from nccl_m2n.transport.base import PreparedRound

if TYPE_CHECKING:
    from nccl_m2n.transport.nccl import NcclTransport


class PreparedGroup(PreparedRound):
    """One NCCL group on prepared integers. Made by `NcclTransport.prepare`."""

    def __init__(
        self, transport: NcclTransport, calls: Sequence[tuple[int, Any, list[tuple[Any, ...]]]]
    ) -> None:
        self._transport, self._calls = transport, list(calls)
        self._byte = int(transport._bindings.DataType.Int8)

    def start(self, stream: Mapping[int, int] | None = None) -> None:
        """Enqueue the group.

        Args:
            stream: For each local rank the ``cudaStream_t`` that its messages go on. Several ranks of a
                process must not share one: each one's kernel waits for the others'.

        Raises:
            TransportError: If NCCL refuses; the communicators are aborted, since half a group may be on
                its way.
        """
        if not self._calls:
            return
        transport, byte = self._transport, self._byte
        transport.require_usable()
        streams = stream or {}
        by_rank = [(calls, handle, streams[rank]) for rank, handle, calls in self._calls]
        bindings = transport._bindings
        bindings.group_start()
        try:
            for calls, handle, on in by_rank:
                for call, pointer, count, peer in calls:
                    call(pointer, count, byte, peer, handle, on)
        except BaseException as error:
            _leave_group(bindings)
            transport.abort(f"broke: NCCL refused a group of messages: {error}")
            raise _failed(error) from error
        try:
            bindings.group_end()
        except BaseException as error:
            transport.abort(f"broke: NCCL refused a group of messages: {error}")
            raise _failed(error) from error

    def finish(self, deadline: float | None = None) -> None:
        """Nothing: the stream waits."""


def _leave_group(bindings: Any) -> None:
    try:
        bindings.group_end()
    except bindings.NCCLError:  # it repeats the error that is being raised
        pass


def _failed(error: BaseException) -> BaseException:
    return (
        TransportError(f"NCCL refused a group of messages: {error}")
        if isinstance(error, Exception)
        else error
    )
