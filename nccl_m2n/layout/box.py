# SPDX-License-Identifier: Apache-2.0
"""Boxes of a tensor: half-open, in elements, and nothing else."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nccl_m2n.checks import made_by, whole_numbers
from nccl_m2n.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Box:
    """A half-open box ``[start, stop)`` of a tensor's index space.

    Args:
        start: First index in each dimension, in elements.
        stop: One past the last index in each dimension, in elements.

    Raises:
        LayoutError: If there are not as many starts as stops, or one of them is no integer.

    Example:
        >>> from nccl_m2n import Box
        >>> Box((0, 2), (4, 6)).intersect(Box((3, 0), (8, 3)))
        Box(start=(3, 2), stop=(4, 3))
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "start", whole_numbers(self.start, "starts of a box"))
        object.__setattr__(self, "stop", whole_numbers(self.stop, "stops of a box"))
        if len(self.start) != len(self.stop):
            raise LayoutError(f"expected as many starts as stops in a box, got {self.start} and {self.stop}")

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent in each dimension; never negative."""
        return tuple(max(0, b - a) for a, b in zip(self.start, self.stop, strict=True))

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index into the whole array."""
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """The common part of two boxes, or None where they do not meet."""
        if len(made_by(other, Box, "the other box").start) != len(self.start):
            raise LayoutError(f"expected a box of as many dimensions as {self}, got {other}")
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True)) + "]"


@dataclass(frozen=True, slots=True)
class Piece:
    """One box of the global tensor that a rank holds, and where it lies in the rank's local array."""

    box: Box  # in the global tensor
    offset: tuple[int, ...]  # where the box starts in the rank's local array, in elements

    def __post_init__(self) -> None:
        object.__setattr__(self, "offset", whole_numbers(self.offset, "offsets of a piece"))
        if len(self.offset) != len(
            made_by(self.box, Box, "the box of a piece", hint="write Box(start, stop)").start
        ):
            raise LayoutError(f"expected one offset for each dimension of {self.box}, got {self.offset}")

    @property
    def local_slices(self) -> tuple[slice, ...]:
        """The piece as an index into the rank's local array."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.box.shape, strict=True))

    def __str__(self) -> str:
        return f"{self.box} at {self.offset}"
