# SPDX-License-Identifier: Apache-2.0
"""Experts: which ranks own which, in which slots, and experts stacked in one tensor seen one by one."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from nccl_m2n.errors import CommandError
from nccl_m2n.layout import Box, Layout, Piece

GATE_UP = ("gate_proj", "up_proj")
_EXPERT = re.compile(r"\.experts\.(\d+)\.(.+)")
# The ranks along ep that hold an expert, and its slots there.
Owners = tuple[tuple[int, tuple[int, ...]], ...]


def part_of(name: str) -> str:
    """Which projection of its expert a parameter is, such as ``"gate_proj"``."""
    match = _EXPERT.search(name)
    return match[2].removesuffix(".weight") if match else name


@dataclass(frozen=True, slots=True)
class Home:
    """Where experts live: for each expert the expert-parallel ranks that hold it, and the slots there."""

    slots: tuple[tuple[int, ...], ...]  # for each expert-parallel rank, the expert in each of its slots
    owners: tuple[Owners, ...]  # for each expert

    @classmethod
    def of(cls, experts: int, ranks: int, given: Sequence[int] | None = None) -> Home:
        """Consecutive experts on one rank, the first ranks with one more where they must, or as given."""
        if given is None:
            bounds = [r * (experts // ranks) + min(r, experts % ranks) for r in range(ranks + 1)]
            slots = tuple(tuple(range(a, b)) for a, b in itertools.pairwise(bounds))
        else:
            each, over = divmod(len(given), ranks)
            if over or set(given) != set(range(experts)):
                raise CommandError(
                    f"expert_slots has {len(given)} slots of {len(set(given))} experts for {ranks} "
                    f"expert-parallel ranks; expected as many on each rank, and each of the {experts} experts"
                )
            slots = tuple(tuple(given[r * each : (r + 1) * each]) for r in range(ranks))
        held: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in range(experts)]
        for rank, on_rank in enumerate(slots):
            for expert in sorted(set(on_rank)):
                held[expert].append((rank, tuple(i for i, e in enumerate(on_rank) if e == expert)))
        return cls(slots, tuple(tuple(h) for h in held))


def in_slots(layout: Layout, grid: npt.NDArray[np.int64], owners: Owners) -> Layout:
    """The layout of an expert that ranks hold in several slots: the local array spans first to last slot."""
    pieces: dict[int, list[Piece]] = {}
    for owner, slots in owners:
        for rank in map(int, grid[:, :, :, owner].flat):
            rows = layout.local_shape(rank)[0]
            pieces[rank] = [
                Piece(piece.box, (piece.offset[0] + (slot - slots[0]) * rows, *piece.offset[1:]))
                for slot in slots
                for piece in layout.pieces(rank)
            ]
    return Layout.from_pieces(layout.shape, pieces)


class StackedExperts:
    """A layer's stacked experts, of which the published tensors are slices.

    Args:
        layout: Of the stacked tensor: (experts, 2 × width, hidden) for gate and up, (experts, hidden, width)
            for down.
        parts: The published projections that lie end to end along dimension 1.
    """

    def __init__(self, layout: Layout, parts: tuple[str, ...]) -> None:
        self.layout = layout
        self.parts = parts

    @cached_property
    def _pieces(self) -> dict[int, tuple[Piece, ...]]:
        return {rank: self.layout.pieces(rank) for rank in self.layout.ranks}

    def _rows(self, part: str) -> tuple[int, int]:
        rows = self.layout.shape[1] // len(self.parts)
        at = self.parts.index(part) * rows
        return at, at + rows

    def _held(self, expert: int, part: str, rank: int) -> tuple[Piece, int, int] | None:
        """The piece with the rank's rows of the expert's projection, and which rows of the stack they are."""
        first, last = self._rows(part)
        for piece in self._pieces.get(rank, ()):
            start, stop = piece.box.start, piece.box.stop
            a, b = max(first, start[1]), min(last, stop[1])
            if start[0] <= expert < stop[0] and a < b:
                return piece, a, b
        return None

    def local(self, expert: int, part: str, rank: int) -> tuple[int, slice] | None:
        """Where the rank's local array has the expert's projection; None where it has nothing of it."""
        held = self._held(expert, part, rank)
        if held is None:
            return None
        piece, a, b = held
        row = piece.offset[1] - piece.box.start[1]
        return expert - piece.box.start[0] + piece.offset[0], slice(a + row, b + row)

    def layout_of(self, expert: int, part: str) -> Layout:
        """The layout of one expert's projection, of shape (rows, …)."""
        first, last = self._rows(part)
        rest = self.layout.shape[2:]
        pieces = {}
        for rank in self.layout.ranks:
            held = self._held(expert, part, rank)
            if held is not None:
                pieces[rank] = [Box((held[1] - first, *(0 for _ in rest)), (held[2] - first, *rest))]
        return Layout.from_pieces((last - first, *rest), pieces)
