# SPDX-License-Identifier: Apache-2.0
"""What a reshard is compared with: the usual ways, and the least that the network allows.

Every peer has `start`, which enqueues all its work on a stream, and is over when the stream is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nccl_m2n.layout import Layout
from nccl_m2n.measure.broadcast import GatherBroadcast
from nccl_m2n.measure.collectives import Collectives
from nccl_m2n.planning import Plan, Topology, Transfer, plan
from nccl_m2n.transport.base import DeviceBuffer, Message
from nccl_m2n.transport.gpu import import_cupy
from nccl_m2n.transport.nccl import NcclTransport

Arrays = Mapping[str, Any]
BUCKET_BYTES = 256 << 20  # of the packed conventional way


class Limit:
    """The network limit: bare sends of just the bytes that must cross, each pair's in one message, no packing.

    With `everything`, the bytes within domains too: the ceiling where there is one domain only.
    """

    def __init__(self, transport: NcclTransport, made: Plan, *, everything: bool = False) -> None:
        cupy, rank = import_cupy(), transport.local_ranks[0]
        size = (made.flows["stop"] - made.flows["start"])[made.hops["flow"]]
        pairs: dict[tuple[int, int], int] = {}
        for hop, n in zip(made.hops, size.tolist(), strict=True):
            if hop["network"] or everything:
                ends = int(hop["source"]), int(hop["destination"])
                pairs[ends] = pairs.get(ends, 0) + n
        mine = [(ends, n) for ends, n in sorted(pairs.items()) if rank in ends]
        self._buffer = cupy.empty(max(1, sum(n for _, n in mine)), cupy.uint8)
        messages, at = [], self._buffer.data.ptr
        for (source, destination), n in mine:
            send = source == rank
            messages.append(Message(rank, destination if send else source, send, DeviceBuffer(at, n)))
            at += n
        self._rank, self._group = rank, transport.prepare(messages)
        transport.connect((rank, m.peer, m.send) for m in messages)

    def start(self, stream: Any) -> None:
        """Enqueue the sends and receives."""
        self._group.start({self._rank: stream.ptr})

    def close(self) -> None:
        """Nothing but memory is held."""


class EverySourceBroadcasts:
    """Each shard is broadcast by its first holder to all destination ranks, which take what they need."""

    def __init__(
        self, transport: NcclTransport, transfers: Sequence[Transfer], arrays: tuple[Arrays, Arrays]
    ) -> None:
        cupy, self._rank = import_cupy(), transport.local_ranks[0]
        self._transfers, (self._sources, self._destinations) = transfers, arrays
        self._source, self._destination = transfers[0].source, transfers[0].destination
        self._net = Collectives(transport)
        self._casters = _first_holders(self._source)
        self._handles = [
            self._net.split([r, *[d for d in self._destination.ranks if d != r]]) for r in self._casters
        ]
        shapes = [self._source.local_shape(r) for r in self._casters]
        self._buffers = [
            None if h is None else cupy.empty((len(transfers), *s), cupy.uint16)
            for h, s in zip(self._handles, shapes, strict=True)
        ]

    def start(self, stream: Any) -> None:
        """Enqueue everything."""
        with stream:
            for i, t in enumerate(self._transfers):
                for rank, buffer in zip(self._casters, self._buffers, strict=True):
                    if rank == self._rank:
                        buffer[i] = self._sources[t.name]
            self._net.bindings.group_start()
            for handle, buffer in zip(self._handles, self._buffers, strict=True):
                if handle is not None:
                    self._net.broadcast(handle, buffer, stream)
            self._net.bindings.group_end()
            for i, t in enumerate(self._transfers):
                if t.name in self._destinations:
                    self._take(i, self._destinations[t.name])

    def _take(self, i: int, target: Any) -> None:
        for mine in self._destination.pieces(self._rank):
            for rank, buffer in zip(self._casters, self._buffers, strict=True):
                for piece in self._source.pieces(rank):
                    box = piece.box.intersect(mine.box)
                    if box is not None and buffer is not None:
                        to = _within(box, mine.box.start, mine.offset)
                        target[to] = buffer[i][_within(box, piece.box.start, piece.offset)]

    def close(self) -> None:
        """Destroy the communicators."""
        self._net.close()


def _first_holders(layout: Layout) -> list[int]:
    seen: dict[Any, int] = {}
    for rank in layout.ranks:
        seen.setdefault(layout.pieces(rank), rank)
    return list(seen.values())


def _within(box: Any, start: Sequence[int], offset: Sequence[int]) -> tuple[slice, ...]:
    return tuple(
        slice(a - s + o, b - s + o) for a, b, s, o in zip(box.start, box.stop, start, offset, strict=True)
    )


class Bound:
    """A plan, bound: ours, or the direct method."""

    def __init__(
        self,
        transport: NcclTransport,
        transfers: Sequence[Transfer],
        arrays: tuple[Arrays, Arrays],
        topology: Topology,
        *,
        method: str = "reshard",
        graph: bool = False,
    ) -> None:
        self.plan = plan(transfers, topology, method=method)
        self.bound = self.plan.bind(transport, *arrays)
        if graph:
            self.bound.capture()

    def start(self, stream: Any) -> None:
        """Enqueue the run."""
        self.bound.run(stream)

    def close(self) -> None:
        """Release the binding."""
        self.bound.close()


PEERS: dict[str, Callable[..., Any]] = {
    "reshard": lambda tr, t, a, top: Bound(tr, t, a, top),
    "reshard, graph": lambda tr, t, a, top: Bound(tr, t, a, top, graph=True),
    "limit": lambda tr, t, a, top: Limit(tr, plan(t, top), everything=len(top.domains) == 1),
    "direct": lambda tr, t, a, top: Bound(tr, t, a, top, method="direct"),
    "gather+broadcast": lambda tr, t, a, top: GatherBroadcast(tr, t, a, bucket_bytes=0),
    "gather+broadcast, packed": lambda tr, t, a, top: GatherBroadcast(tr, t, a, bucket_bytes=BUCKET_BYTES),
    "every source broadcasts": lambda tr, t, a, top: EverySourceBroadcasts(tr, t, a),
}
