# SPDX-License-Identifier: Apache-2.0
"""What is measured: a reshard, the usual ways beside it, and the least that the network allows.

Every method has `start`, which takes a stream for each local rank. On a device it enqueues all its work there and is
over when the streams are; in host memory `wait` ends it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import cast

from nccl_m2n.layout import Box, Layout, Piece
from nccl_m2n.measure.broadcast import GatherBroadcast
from nccl_m2n.measure.collectives import Collectives
from nccl_m2n.measure.setting import Method, Setting
from nccl_m2n.planning import Plan, Transfer, plan
from nccl_m2n.transport.base import DeviceTransport, Message, Transport
from nccl_m2n.typing import Array, JsonObject, Stream

BUCKET_BYTES = 256 << 20  # of the packed conventional way


class BoundPlan:
    """A plan, bound: ours, or another method's."""

    def __init__(self, setting: Setting, *, method: str = "reshard", graph: bool = False) -> None:
        self._plan = plan(setting.transfers, setting.topology, method=method)
        self._bound = self._plan.bind(setting.transport, *setting.arrays)
        if graph:
            self._bound.capture()

    def start(self, streams: Mapping[int, Stream]) -> None:
        """Start the run; on a device, enqueue it."""
        self._bound.run(streams)

    def wait(self, timeout: float) -> None:
        """End the run."""
        self._bound.wait(timeout)

    def facts(self) -> JsonObject:
        """What a report says of it beside its times."""
        return {"staging_bytes": self._bound.staging_bytes, "rounds": self._plan.rounds}

    def close(self) -> None:
        """Release the binding."""
        self._bound.close()


class Limit:
    """The network limit: bare sends of just the bytes that must cross, each pair's in one message, no packing.

    Where there is one domain only, the bytes within it: the ceiling of that.
    """

    def __init__(self, setting: Setting) -> None:
        made = plan(setting.transfers, setting.topology)
        pairs = pair_bytes(made, everything=len(made.topology.domains) == 1)
        self._buffers, messages = [], []  # the buffers are kept: messages hold nothing but their addresses
        for rank in setting.transport.local_ranks:
            mine = [(ends, size) for ends, size in sorted(pairs.items()) if rank in ends]
            with setting.memory.on(rank):
                buffer = setting.memory.library.zeros(max(1, sum(size for _, size in mine)), "uint8")
            self._buffers.append(buffer)
            at = 0
            for (source, destination), size in mine:
                send = source == rank
                peer = destination if send else source
                messages.append(Message(rank, peer, send, setting.memory.buffer(buffer, at, size)))
                at += size
        self._group = setting.transport.prepare(messages)
        setting.transport.connect((m.rank, m.peer, m.send) for m in messages)

    def start(self, streams: Mapping[int, Stream]) -> None:
        """Start the sends and receives; on a device, enqueue them."""
        self._group.start({rank: stream.ptr for rank, stream in streams.items()})

    def wait(self, timeout: float) -> None:
        """End them."""
        self._group.finish(time.monotonic() + timeout)

    def facts(self) -> JsonObject:
        """Nothing beside its times."""
        return {}

    def close(self) -> None:
        """Release the messages."""
        self._group.close()


def pair_bytes(made: Plan, *, everything: bool) -> dict[tuple[int, int], int]:
    """Bytes from rank to rank over the network, or over everything, by (sender, receiver)."""
    size = (made.flows["stop"] - made.flows["start"])[made.hops["flow"]]
    pairs: dict[tuple[int, int], int] = {}
    for hop, n in zip(made.hops, size.tolist(), strict=True):
        if hop["network"] or everything:
            ends = int(hop["source"]), int(hop["destination"])
            pairs[ends] = pairs.get(ends, 0) + n
    return pairs


class EverySourceBroadcasts:
    """Each shard is broadcast by its first holder to all destination ranks, which take what they need."""

    def __init__(self, setting: Setting) -> None:
        cupy, self._rank, self._transfers = setting.memory.library, setting.rank, setting.transfers
        self._sources, self._destinations = (side[self._rank] for side in setting.arrays)
        self._source, self._destination = self._transfers[0].source, self._transfers[0].destination
        self._net = Collectives(cast(DeviceTransport, setting.transport))
        self._casters = _first_holders(self._source)
        self._handles = [
            self._net.split([r, *[d for d in self._destination.ranks if d != r]]) for r in self._casters
        ]
        shapes = [self._source.local_shape(r) for r in self._casters]
        self._buffers = [
            None if h is None else cupy.empty((len(self._transfers), *s), cupy.uint16)
            for h, s in zip(self._handles, shapes, strict=True)
        ]

    def start(self, streams: Mapping[int, Stream]) -> None:
        """Enqueue everything."""
        stream = streams[self._rank]
        with stream:
            for i, t in enumerate(self._transfers):
                for rank, buffer in zip(self._casters, self._buffers, strict=True):
                    if rank == self._rank:
                        buffer[i] = self._sources[t.name]  # type: ignore[index]
            self._net.bindings.group_start()
            for handle, buffer in zip(self._handles, self._buffers, strict=True):
                if handle is not None:
                    self._net.broadcast(handle, buffer, stream)
            self._net.bindings.group_end()
            for i, t in enumerate(self._transfers):
                if t.name in self._destinations:
                    self._take(i, self._destinations[t.name])

    def _take(self, i: int, target: Array) -> None:
        for mine in self._destination.pieces(self._rank):
            for rank, buffer in zip(self._casters, self._buffers, strict=True):
                for piece in self._source.pieces(rank):
                    box = piece.box.intersect(mine.box)
                    if box is not None and buffer is not None:
                        to = _within(box, mine.box.start, mine.offset)
                        target[to] = buffer[i][_within(box, piece.box.start, piece.offset)]

    def facts(self) -> JsonObject:
        """Nothing beside its times."""
        return {}

    def close(self) -> None:
        """Destroy the communicators."""
        self._net.close()


def _first_holders(layout: Layout) -> list[int]:
    seen: dict[tuple[Piece, ...], int] = {}
    for rank in layout.ranks:
        seen.setdefault(layout.pieces(rank), rank)
    return list(seen.values())


def _within(box: Box, start: Sequence[int], offset: Sequence[int]) -> tuple[slice, ...]:
    return tuple(
        slice(a - s + o, b - s + o) for a, b, s, o in zip(box.start, box.stop, start, offset, strict=True)
    )


PEERS: dict[str, Callable[[Setting], Method]] = {
    "reshard": BoundPlan,
    "reshard, graph": partial(BoundPlan, graph=True),
    "limit": Limit,
    "direct": partial(BoundPlan, method="direct"),
    "gather+broadcast": partial(GatherBroadcast, bucket_bytes=0),
    "gather+broadcast, packed": partial(GatherBroadcast, bucket_bytes=BUCKET_BYTES),
    "every source broadcasts": EverySourceBroadcasts,
    "gather+broadcast, planned": partial(BoundPlan, method="gather_broadcast"),
}
UNVERIFIED = {"limit"}  # it moves bytes that nobody asked for
BY_COLLECTIVES = {"gather+broadcast", "gather+broadcast, packed", "every source broadcasts"}


def available(transport: Transport, transfers: Sequence[Transfer]) -> list[str]:
    """Names of the methods that can be measured.

    NCCL's own collectives need one rank a process, and sources that are no destinations; graphs need a GPU.
    The planned gather and broadcast stands in where there are no collectives.
    """
    both = any(set(t.source.ranks) & set(t.destination.ranks) for t in transfers)
    if transport.memory == "host":
        without = BY_COLLECTIVES | {"reshard, graph"}
    elif len(transport.local_ranks) > 1 or both:
        without = BY_COLLECTIVES
    else:
        without = {"gather+broadcast, planned"}
    return [method for method in PEERS if method not in without]
