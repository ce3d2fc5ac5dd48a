# SPDX-License-Identifier: Apache-2.0
"""The conventional refit: every tensor gathered whole on one source rank, then broadcast to all destinations."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import cast

from nccl_m2n.layout import Box, Layout, Piece
from nccl_m2n.measure.collectives import Collectives
from nccl_m2n.measure.setting import Setting
from nccl_m2n.planning import Transfer
from nccl_m2n.transport.base import DeviceBuffer, DeviceTransport, Message, PreparedRound
from nccl_m2n.typing import Array, JsonObject, Stream

ITEM = 2  # bytes of the uint16 elements that are measured with


class GatherBroadcast:
    """Whole tensors by way of the lowest source rank, in buckets; the broadcast is NCCL's own.

    Each distinct shard is sent to the root by its lowest holder, in one group a bucket; the root puts the tensors
    together and broadcasts the bucket; every destination takes its part out of it.

    Args:
        setting: The problem, on a `DeviceTransport` with one rank a process.
        bucket_bytes: Tensors are packed up to this; 0: one tensor a bucket.
    """

    def __init__(self, setting: Setting, *, bucket_bytes: int) -> None:
        self._transport = cast(DeviceTransport, setting.transport)
        transfers, self._rank = setting.transfers, setting.rank
        self._sources, self._destinations = (side[self._rank] for side in setting.arrays)
        self._root = min(t.source.ranks[0] for t in transfers)
        targets = sorted({r for t in transfers for r in t.destination.ranks} - {self._root})
        self._net = Collectives(self._transport)
        self._casting = self._net.split([self._root, *targets])
        self._buckets = [list(b) for b in _buckets(transfers, bucket_bytes)]
        largest = max(sum(_elements(t) for t in bucket) for bucket in self._buckets)
        cupy = setting.memory.library
        self._whole = cupy.empty(largest, cupy.uint16) if self._casting is not None else None
        self._shards = cupy.empty(largest, cupy.uint16)
        self._groups = [self._gather_group(bucket) for bucket in self._buckets]
        owners = {r for bucket in self._buckets for r in _owners(bucket)} - {self._root}
        if self._rank == self._root:
            self._transport.connect((self._rank, r, False) for r in owners)
        else:
            self._transport.connect((self._rank, self._root, True) for _ in [0] if self._rank in owners)

    def _gather_group(self, bucket: Sequence[Transfer]) -> PreparedRound:
        """Messages of one bucket's shards: each owner's lie end to end, in rank order at the root."""
        at, messages = 0, []
        for rank, owned in sorted(_owners(bucket).items()):
            size = sum(piece.box.size for _, piece in owned)
            here = self._shards.data.ptr + (at if self._rank == self._root else 0) * ITEM
            if rank != self._root and self._rank in (rank, self._root):
                peer = self._root if self._rank == rank else rank
                messages.append(
                    Message(self._rank, peer, self._rank == rank, DeviceBuffer(here, size * ITEM))
                )
            at += size
        return self._transport.prepare(messages)

    def start(self, streams: Mapping[int, Stream]) -> None:
        """Enqueue everything."""
        stream = streams[self._rank]
        with stream:
            for bucket, group in zip(self._buckets, self._groups, strict=True):
                self._pack(bucket)
                group.start({self._rank: stream.ptr})
                if self._rank == self._root:
                    self._assemble(bucket)
                if self._casting is not None:
                    size = sum(map(_elements, bucket))
                    self._net.broadcast(self._casting, self._whole[:size], stream)  # type: ignore[index]
                    self._deliver(bucket)

    def _pack(self, bucket: Sequence[Transfer]) -> None:
        at = 0
        for rank, owned in sorted(_owners(bucket).items()):
            for transfer, piece in owned:
                if rank == self._rank:
                    part = self._sources[transfer.name][piece.local_slices]
                    self._shards[at : at + part.size].reshape(part.shape)[...] = part
                if rank == self._rank or self._rank == self._root:
                    at += piece.box.size

    def _assemble(self, bucket: Sequence[Transfer]) -> None:
        whole, at = self._views(bucket), 0
        for _, owned in sorted(_owners(bucket).items()):
            for transfer, piece in owned:
                part = self._shards[at : at + piece.box.size].reshape(piece.box.shape)
                whole[transfer.name][piece.box.slices] = part
                at += piece.box.size

    def _deliver(self, bucket: Sequence[Transfer]) -> None:
        whole = self._views(bucket)
        for transfer in bucket:
            if transfer.name in self._destinations:
                for piece in transfer.destination.pieces(self._rank):
                    target = self._destinations[transfer.name]
                    target[piece.local_slices] = whole[transfer.name][piece.box.slices]

    def _views(self, bucket: Sequence[Transfer]) -> dict[str, Array]:
        views, at = {}, 0
        for transfer in bucket:
            size = _elements(transfer)
            views[transfer.name] = self._whole[at : at + size].reshape(transfer.shape)  # type: ignore[index]
            at += size
        return views

    def facts(self) -> JsonObject:
        """Nothing beside its times."""
        return {}

    def close(self) -> None:
        """Destroy the communicator."""
        self._net.close()


def _elements(transfer: Transfer) -> int:
    return math.prod(transfer.shape)


def _buckets(transfers: Sequence[Transfer], limit: int) -> Iterator[list[Transfer]]:
    bucket: list[Transfer] = []
    held = 0
    for transfer in transfers:
        size = _elements(transfer) * ITEM
        if bucket and held + size > limit:
            yield bucket
            bucket, held = [], 0
        bucket.append(transfer)
        held += size
    yield bucket


def _owners(bucket: Sequence[Transfer]) -> dict[int, list[tuple[Transfer, Piece]]]:
    """The pieces that each rank contributes: of equal ones, those of the lowest rank."""
    owners: dict[int, list[tuple[Transfer, Piece]]] = {}
    for transfer in bucket:
        for rank, piece in _distinct(transfer.source):
            owners.setdefault(rank, []).append((transfer, piece))
    return owners


@lru_cache(maxsize=1024)
def _distinct(layout: Layout) -> tuple[tuple[int, Piece], ...]:
    seen: dict[Box, tuple[int, Piece]] = {}
    for rank in layout.ranks:
        for piece in layout.pieces(rank):
            seen.setdefault(piece.box, (rank, piece))
    return tuple(seen.values())
