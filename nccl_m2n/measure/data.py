# SPDX-License-Identifier: Apache-2.0
"""Test data on the device: every element tells its tensor and its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nccl_m2n.layout import Layout
from nccl_m2n.planning import Transfer
from nccl_m2n.transport.gpu import import_cupy

Arrays = dict[str, Any]
MASK = 0xFFFFFFFF
CHUNK = 1 << 26  # elements made at once


def fill(array: Any, layout: Layout, rank: int, seed: int) -> None:
    """Write what `rank` should hold of the tensor number `seed` into its local array of uint16."""
    for piece in layout.pieces(rank):
        _by_rows(array[piece.local_slices], piece.box.start, layout.shape, seed, _assign)


def wrong_elements(array: Any, layout: Layout, rank: int, seed: int) -> int:
    """How many elements of a local array are not what `fill` would write."""
    wrong = 0
    for piece in layout.pieces(rank):
        wrong += _by_rows(array[piece.local_slices], piece.box.start, layout.shape, seed, _count_wrong)
    return wrong


def _assign(part: Any, values: Any) -> int:
    part[...] = values
    return 0


def _count_wrong(part: Any, values: Any) -> int:
    return int((part != values).sum())


def _by_rows(part: Any, start: Sequence[int], shape: Sequence[int], seed: int, work: Any) -> int:
    rows = max(1, CHUNK // max(1, part[0].size if part.ndim and len(part) else 1))
    if not part.ndim:
        return int(work(part, _values(part.shape, start, shape, seed)))
    total = 0
    for first in range(0, len(part), rows):
        some = part[first : first + rows]
        total += work(some, _values(some.shape, (start[0] + first, *start[1:]), shape, seed))
    return total


def _values(extent: Sequence[int], start: Sequence[int], shape: Sequence[int], seed: int) -> Any:
    """A box's elements: a hash of the global index and the seed."""
    cupy = import_cupy()
    index = cupy.asarray(seed * 0x9E3779B1 & MASK, dtype=cupy.uint32)
    step = 1
    for d in reversed(range(len(extent))):
        along = cupy.arange(start[d], start[d] + extent[d], dtype=cupy.uint32) * cupy.uint32(step & MASK)
        index = index + along.reshape(-1, *[1] * (len(extent) - 1 - d))
        step *= shape[d]
    mixed = index * cupy.uint32(0x85EBCA6B)
    return ((mixed ^ (mixed >> cupy.uint32(15))) & cupy.uint32(0xFFFF)).astype(cupy.uint16)


def make_arrays(transfers: Sequence[Transfer], rank: int) -> tuple[Arrays, Arrays]:
    """A rank's filled source arrays and its destination arrays, on the current device."""
    cupy = import_cupy()
    sources, destinations = {}, {}
    for seed, t in enumerate(transfers):
        if rank in t.source.ranks:
            sources[t.name] = cupy.empty(t.source.local_shape(rank), cupy.uint16)
            fill(sources[t.name], t.source, rank, seed)
        if rank in t.destination.ranks:
            destinations[t.name] = cupy.zeros(t.destination.local_shape(rank), cupy.uint16)
    return sources, destinations


def spoil(destinations: Mapping[str, Any]) -> None:
    """Overwrite the destination arrays, so that what a method leaves out is seen."""
    for array in destinations.values():
        array.fill(0xDEAD)


def count_wrong(transfers: Sequence[Transfer], destinations: Mapping[str, Any], rank: int) -> int:
    """Wrong elements in a rank's destination arrays."""
    return sum(
        wrong_elements(destinations[t.name], t.destination, rank, seed)
        for seed, t in enumerate(transfers)
        if t.name in destinations
    )
