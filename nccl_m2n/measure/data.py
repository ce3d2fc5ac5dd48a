# SPDX-License-Identifier: Apache-2.0
"""Test data on the device: every element tells its tensor and its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nccl_m2n.layout import Layout
from nccl_m2n.planning import Transfer
from nccl_m2n.transport.gpu import import_cupy

Arrays = dict[str, Any]
MASK = 0xFFFFFFFF
CHUNK = 1 << 26  # elements made at once


@dataclass(frozen=True)
class Stack:
    """One rank's local arrays of all tensors with one layout, end to end, so that few launches serve all."""

    layout: Layout
    names: tuple[str, ...]
    seeds: Any  # (tensors,) numbers of the tensors
    arrays: Any  # (tensors, *local shape) of uint16


def stacks(transfers: Sequence[Transfer], side: str, rank: int) -> list[Stack]:
    """Fresh arrays on the current device for one side of a rank."""
    cupy = import_cupy()
    groups: dict[Layout, list[int]] = {}
    for number, t in enumerate(transfers):
        layout = t.source if side == "source" else t.destination
        if rank in layout.ranks:
            groups.setdefault(layout, []).append(number)
    return [
        Stack(
            layout,
            tuple(transfers[i].name for i in numbers),
            cupy.asarray([i * 0x9E3779B1 & MASK for i in numbers], dtype=cupy.uint32),
            cupy.zeros((len(numbers), *layout.local_shape(rank)), cupy.uint16),
        )
        for layout, numbers in groups.items()
    ]


def by_name(made: Sequence[Stack]) -> Arrays:
    """The single arrays."""
    return {name: array for stack in made for name, array in zip(stack.names, stack.arrays, strict=True)}


def fill(made: Sequence[Stack], rank: int) -> None:
    """Write what `rank` should hold."""
    _visit(made, rank, _assign)


def count_wrong(made: Sequence[Stack], rank: int) -> int:
    """How many elements are not what `fill` would write."""
    return _visit(made, rank, _count_wrong)


def _visit(made: Sequence[Stack], rank: int, work: Any) -> int:
    """Do some work on boxes of at most `CHUNK` elements and their right values."""
    total = 0
    for stack in made:
        for piece in stack.layout.pieces(rank):
            part = stack.arrays[(slice(None), *piece.local_slices)]
            total += _by_chunks(part, piece.box.start, stack.layout.shape, stack.seeds, work)
    return total


def _by_chunks(part: Any, start: Sequence[int], shape: Sequence[int], seeds: Any, work: Any) -> int:
    if part.size > CHUNK and len(part) > 1:
        step = max(1, CHUNK * len(part) // part.size)
        cuts = range(0, len(part), step)
        return sum(_by_chunks(part[a : a + step], start, shape, seeds[a : a + step], work) for a in cuts)
    if part.size > CHUNK and part.ndim > 1 and part.shape[1] > 1:
        step = max(1, CHUNK * part.shape[1] // part.size)
        cuts = range(0, part.shape[1], step)
        return sum(
            _by_chunks(part[:, a : a + step], (start[0] + a, *start[1:]), shape, seeds, work) for a in cuts
        )
    return int(work(part, _values(part.shape[1:], start, shape, seeds)))


def _assign(part: Any, values: Any) -> int:
    part[...] = values
    return 0


def _count_wrong(part: Any, values: Any) -> int:
    return int((part != values).sum())


def _values(extent: Sequence[int], start: Sequence[int], shape: Sequence[int], seeds: Any) -> Any:
    """A box's elements for each seed: a hash of the global index and the seed."""
    cupy = import_cupy()
    index = seeds.reshape(-1, *[1] * len(extent))
    step = 1
    for d in reversed(range(len(extent))):
        along = cupy.arange(start[d], start[d] + extent[d], dtype=cupy.uint32) * cupy.uint32(step & MASK)
        index = index + along.reshape(-1, *[1] * (len(extent) - 1 - d))
        step *= shape[d]
    mixed = index * cupy.uint32(0x85EBCA6B)
    return ((mixed ^ (mixed >> cupy.uint32(15))) & cupy.uint32(0xFFFF)).astype(cupy.uint16)


def spoil(made: Sequence[Stack]) -> None:
    """Overwrite arrays, so that what a method leaves out is seen."""
    for stack in made:
        stack.arrays.fill(0xDEAD)
