# SPDX-License-Identifier: Apache-2.0
"""Test data in host or device memory: every element tells its tensor and its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nccl_m2n.layout import Layout
from nccl_m2n.planning import Transfer

Arrays = dict[str, Any]
MASK = 0xFFFFFFFF
CHUNK = 1 << 26  # elements made at once


@dataclass(frozen=True)
class Stack:
    """One rank's local arrays of all tensors with one layout, end to end, so that few launches serve all."""

    layout: Layout
    names: tuple[str, ...]
    library: Any  # numpy, or cupy
    seeds: Any  # (tensors,) numbers of the tensors
    arrays: Any  # (tensors, *local shape) of uint16


def stacks(transfers: Sequence[Transfer], side: str, rank: int, library: Any) -> list[Stack]:
    """Fresh arrays for one side of a rank; `library` makes them: numpy, or cupy on its current device."""
    groups: dict[Layout, list[int]] = {}
    for number, t in enumerate(transfers):
        layout = t.source if side == "source" else t.destination
        if rank in layout.ranks:
            groups.setdefault(layout, []).append(number)
    return [
        Stack(
            layout,
            tuple(transfers[i].name for i in numbers),
            library,
            library.asarray([i * 0x9E3779B1 & MASK for i in numbers], dtype="uint32"),
            library.zeros((len(numbers), *layout.local_shape(rank)), "uint16"),
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
            total += _by_chunks(part, piece.box.start, stack, stack.seeds, work)
    return total


def _by_chunks(part: Any, start: Sequence[int], stack: Stack, seeds: Any, work: Any) -> int:
    if part.size > CHUNK and len(part) > 1:
        step = max(1, CHUNK * len(part) // part.size)
        cuts = range(0, len(part), step)
        return sum(_by_chunks(part[a : a + step], start, stack, seeds[a : a + step], work) for a in cuts)
    if part.size > CHUNK and part.ndim > 1 and part.shape[1] > 1:
        step = max(1, CHUNK * part.shape[1] // part.size)
        cuts = range(0, part.shape[1], step)
        return sum(
            _by_chunks(part[:, a : a + step], (start[0] + a, *start[1:]), stack, seeds, work) for a in cuts
        )
    return int(work(part, _values(stack, part.shape[1:], start, seeds)))


def _assign(part: Any, values: Any) -> int:
    part[...] = values
    return 0


def _count_wrong(part: Any, values: Any) -> int:
    return int((part != values).sum())


def _values(stack: Stack, extent: Sequence[int], start: Sequence[int], seeds: Any) -> Any:
    """A box's elements for each seed: a hash of the global index and the seed."""
    library, index, step = stack.library, seeds.reshape(-1, *[1] * len(extent)), 1
    for d in reversed(range(len(extent))):
        along = library.arange(start[d], start[d] + extent[d], dtype="uint32") * library.uint32(step & MASK)
        index = index + along.reshape(-1, *[1] * (len(extent) - 1 - d))
        step *= stack.layout.shape[d]
    mixed = index * library.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> library.uint32(15))) & library.uint32(0xFFFF)
    return mixed.astype("uint16")


def spoil(made: Sequence[Stack]) -> None:
    """Overwrite arrays, so that what a method leaves out is seen."""
    for stack in made:
        stack.arrays.fill(0xDEAD)
