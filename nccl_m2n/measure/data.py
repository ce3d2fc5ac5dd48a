# SPDX-License-Identifier: Apache-2.0
"""Test data in host or device memory: every element tells its tensor and its place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from nccl_m2n.layout import Layout
from nccl_m2n.measure import check
from nccl_m2n.measure.values import Run, Seeds, made_up
from nccl_m2n.planning import Transfer
from nccl_m2n.typing import Array, Library

ITEM = 2  # bytes of the uint16 elements that are measured with


@dataclass(frozen=True)
class TensorStack:
    """One rank's local arrays of all tensors with one layout, end to end, so that few launches serve all."""

    layout: Layout
    names: tuple[str, ...]
    library: Library
    seeds: Seeds  # (tensors,) numbers of the tensors
    arrays: Array  # (tensors, *local shape) of uint16

    def values(self, index: Sequence[Run]) -> Array:
        """The right values of a part, by what is wanted of the tensors and of each dimension."""
        return made_up(self.seeds[index[0]], index[1:], ITEM, self.library)


def stacks(transfers: Sequence[Transfer], side: str, rank: int, library: Library) -> list[TensorStack]:
    """Fresh arrays for one side of a rank; `library` makes them: numpy, or cupy on its current device."""
    groups: dict[Layout, list[int]] = {}
    for number, t in enumerate(transfers):
        layout = t.source if side == "source" else t.destination
        if rank in layout.ranks:
            groups.setdefault(layout, []).append(number)
    return [
        TensorStack(
            layout,
            tuple(transfers[i].name for i in numbers),
            library,
            np.array(numbers, np.uint64) << np.uint64(32),
            library.zeros((len(numbers), *layout.local_shape(rank)), "uint16"),
        )
        for layout, numbers in groups.items()
    ]


def by_name(made: Iterable[TensorStack]) -> dict[str, Array]:
    """The single arrays."""
    return {name: array for stack in made for name, array in zip(stack.names, stack.arrays, strict=True)}


def fill(made: Iterable[TensorStack], rank: int) -> None:
    """Write what `rank` should hold."""
    for stack in made:
        for piece in stack.layout.pieces(rank):
            step = max(1, check.BLOCK_BYTES // max(1, piece.box.size * ITEM))
            for first in range(0, len(stack.names), step):
                some = slice(first, min(first + step, len(stack.names)))
                stack.arrays[(some, *piece.local_slices)] = stack.values([some, *piece.box.slices])


def count_wrong(made: Iterable[TensorStack], rank: int) -> int:
    """How many elements are not what `fill` would write."""
    return sum(
        check.count_wrong(stack.arrays, stack.layout, rank, stack.values, [slice(0, len(stack.names))])
        for stack in made
    )


def spoil(made: Iterable[TensorStack]) -> None:
    """Overwrite arrays, so that what a method leaves out is seen."""
    for stack in made:
        stack.arrays.fill(0xDEAD)
