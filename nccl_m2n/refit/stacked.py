# SPDX-License-Identifier: Apache-2.0
"""Experts stacked in one sharded tensor, seen one by one."""

from __future__ import annotations

from functools import cached_property

from nccl_m2n.layout import Box, Layout, Piece

GATE_UP = ("gate_proj", "up_proj")


class Stack:
    """A layer's stacked experts, of which the published tensors are slices.

    Args:
        layout: Of the stacked tensor: (experts, 2 × width, hidden) for gate and up, (experts, hidden, width) for down.
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
        """Where the rank's local array has the expert's projection, as an index; None where it has nothing of it."""
        held = self._held(expert, part, rank)
        if held is None:
            return None
        piece, a, b = held
        row = piece.offset[1] - piece.box.start[1]
        return expert - piece.box.start[0] + piece.offset[0], slice(a + row, b + row)

    def layout_of(self, expert: int, part: str) -> Layout:
        """The layout of one expert's projection, of shape (rows, columns)."""
        first, last = self._rows(part)
        columns = self.layout.shape[2]
        pieces = {}
        for rank in self.layout.ranks:
            held = self._held(expert, part, rank)
            if held is not None:
                pieces[rank] = [Box((held[1] - first, 0), (held[2] - first, columns))]
        return Layout.from_pieces((last - first, columns), pieces)
