# SPDX-License-Identifier: Apache-2.0
"""One panel of a picture: boxes in the plane of a tensor's last two dimensions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nccl_m2n.layout import Box
from nccl_m2n.show import svg

SHORT_SIDE = 72.0  # pixels that the shorter side takes at least
STRIP = 40.0  # height of a 1-D tensor
FINE = 16  # a tensor with at most that many rows and columns shows its elements


@dataclass(frozen=True)
class Tile:
    """A box to be painted."""

    box: Box
    fill: str
    texts: tuple[str, ...]  # the first that fits is written in the box
    title: str  # when pointed at


class Patch(NamedTuple):
    """A box in the plane: rows and columns, half-open."""

    top: int
    bottom: int
    left: int
    right: int


def flat(box: Box) -> Patch:
    """A box in the plane of its last two dimensions; what a scalar or a vector lacks is one row or column."""
    start, stop = (0, 0, *box.start), (1, 1, *box.stop)
    return Patch(start[-2], stop[-2], start[-1], stop[-1])


@dataclass(frozen=True)
class Grid:
    """Where rows and columns lie on the page."""

    rows: int
    columns: int
    width: float
    height: float
    x: float = 0.0
    y: float = 0.0

    def column(self, index: float) -> float:
        """Horizontal position of a column's left edge."""
        return self.x + index * self.width / self.columns

    def row(self, index: float) -> float:
        """Vertical position of a row's upper edge."""
        return self.y + index * self.height / self.rows

    def place(self, patch: Patch) -> tuple[float, float, float, float]:
        """A patch as x, y, width, height in pixels."""
        x, y = self.column(patch.left), self.row(patch.top)
        return x, y, self.column(patch.right) - x, self.row(patch.bottom) - y


@dataclass(frozen=True)
class Panel:
    """Tiles to paint, outlines of what one rank holds in one piece, and a caption.

    Args:
        tiles: They cover the part of the tensor that is shown.
        outlines: Boxes with a solid border; tiles have a dashed one.
        shape: The tensor's shape.
        caption: What part of the tensor is shown; empty for all of it.
        long_side: Length of the longer side of the drawn tensor, in pixels.
    """

    tiles: Sequence[Tile]
    outlines: Sequence[Box]
    shape: Sequence[int]
    caption: str
    long_side: float

    def _marks(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Intervals to be written along the left and the upper edge."""
        patches = [flat(tile.box) for tile in self.tiles]
        rows = sorted({i for p in patches for i in (p.top, p.bottom)})
        columns = sorted({i for p in patches for i in (p.left, p.right)})
        ndim = len(self.shape)
        rows, columns = rows if ndim > 1 else [], columns if ndim else []
        return list(itertools.pairwise(rows)), list(itertools.pairwise(columns))

    @property
    def margin(self) -> tuple[float, float]:
        """Room at the left and above for the index ranges and the caption, in pixels."""
        rows, _ = self._marks()
        letters = max((len(f"{a}:{b}") for a, b in rows), default=0)
        return letters * svg.LETTER + 8, 34.0 if self.caption else 18.0

    def grid(self, x: float = 0.0, y: float = 0.0) -> Grid:
        """The tensor's place for a panel at (x, y): in proportion, as far as that stays legible."""
        rows, columns = (1, 1, *self.shape)[-2:]
        left, top = self.margin
        if rows == 1:
            return Grid(rows, columns, self.long_side, STRIP, x + left, y + top)
        scale = self.long_side / max(rows, columns)
        width, height = max(SHORT_SIDE, columns * scale), max(SHORT_SIDE, rows * scale)
        return Grid(rows, columns, width, height, x + left, y + top)

    @property
    def size(self) -> tuple[float, float]:
        """Width and height with the margins, in pixels."""
        grid = self.grid()
        return grid.x + grid.width, grid.y + grid.height

    def draw(self, x: float, y: float) -> list[str]:
        """The panel's SVG elements, with its upper left corner at (x, y)."""
        grid = self.grid(x, y)
        parts = [svg.rectangle(*grid.place(flat(tile.box)), tile.fill, tile.title) for tile in self.tiles]
        parts += [_element_lines(grid), _dashes(grid, [flat(tile.box) for tile in self.tiles])]
        parts += [svg.frame(*grid.place(flat(box))) for box in self.outlines]
        parts += [_writing(tile, grid) for tile in self.tiles]
        if self.caption:
            middle = grid.x + grid.width / 2
            parts.append(svg.label(middle, grid.y - 27, f"[{self.caption}]", svg.GREY, bold=True))
        rows, columns = self._marks()
        return parts + _row_marks(grid, rows) + _column_marks(grid, columns)


def _element_lines(grid: Grid) -> str:
    """Thin lines between elements, where these are few."""
    if grid.rows > FINE or grid.columns > FINE:
        return ""
    right, bottom = grid.x + grid.width, grid.y + grid.height
    ends = [(grid.x, grid.row(i), right, grid.row(i)) for i in range(1, grid.rows)]
    ends += [(grid.column(i), grid.y, grid.column(i), bottom) for i in range(1, grid.columns)]
    return svg.lines(ends, "#ffffff", 0.6)


def _dashes(grid: Grid, patches: Sequence[Patch]) -> str:
    """Dashed lines between patches; those on an outline are drawn over afterwards."""
    ends = []
    for patch in patches:
        x, y, width, height = grid.place(patch)
        if patch.bottom < grid.rows:
            ends.append((x, y + height, x + width, y + height))
        if patch.right < grid.columns:
            ends.append((x + width, y, x + width, y + height))
    return svg.lines(ends, svg.INK, 0.7, "3 2")


def _writing(tile: Tile, grid: Grid) -> str:
    """The first of a tile's texts that fits, in the middle of its box."""
    x, y, width, height = grid.place(flat(tile.box))
    for text in tile.texts:
        if width >= len(text) * svg.LETTER + 4 and height >= svg.FONT:
            return svg.label(x + width / 2, y + height / 2, text, bold=True, ground=tile.fill)
    return ""


def _row_marks(grid: Grid, intervals: Sequence[tuple[int, int]]) -> list[str]:
    """Index ranges at the left; one that would touch the last one is left out."""
    parts, free = [], grid.y - svg.FONT
    for a, b in intervals:
        middle = grid.row((a + b) / 2)
        if middle - svg.FONT / 2 >= free:
            parts.append(svg.label(grid.x - 6, middle, f"{a}:{b}", svg.GREY, anchor="end"))
            free = middle + svg.FONT / 2
    return parts


def _column_marks(grid: Grid, intervals: Sequence[tuple[int, int]]) -> list[str]:
    """Index ranges above; one that would touch the last one is left out."""
    parts, free = [], grid.x - grid.width
    for a, b in intervals:
        middle, half = grid.column((a + b) / 2), len(f"{a}:{b}") * svg.LETTER / 2
        if middle - half >= free:
            parts.append(svg.label(middle, grid.y - 9, f"{a}:{b}", svg.GREY))
            free = middle + half + svg.LETTER
    return parts
