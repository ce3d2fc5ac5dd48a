# SPDX-License-Identifier: Apache-2.0
"""Pictures of layouts: who holds what, and what goes from whom to whom."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nccl_m2n.errors import LayoutError
from nccl_m2n.layout import Box, Layout
from nccl_m2n.layout.mesh import ranks_text
from nccl_m2n.show import svg
from nccl_m2n.show.regions import Region, cuts, overlaps_of, regions

LONG_SIDE = 260.0  # pixels that the longer side of a panel takes
SHORT_SIDE = 72.0  # pixels that the shorter side takes at least
STRIP = 40.0  # height of a 1-D tensor
GAP = 18.0  # between panels
PAGE = 760.0  # panels wrap beyond this width
MOST_PANELS = 24
FINE = 16  # a tensor with at most that many rows and columns shows its elements


@dataclass(frozen=True)
class Tile:
    """A box to be painted."""

    box: Box
    fill: str
    texts: tuple[str, ...]  # the first that fits is written in the box
    title: str  # when pointed at


@dataclass(frozen=True)
class Panel:
    """A drawing of part of a tensor, without a place on the page yet."""

    width: float
    height: float
    draw: Callable[[float, float], list[str]]  # (x, y) of the top left corner -> SVG elements


def svg_layout(layout: Layout) -> str:
    """A layout as an SVG picture: boxes in the colours of the ranks that hold them.

    The last two dimensions are drawn as rows and columns, one panel for each interval of the others.

    Args:
        layout: Any layout of a non-empty tensor.

    Raises:
        LayoutError: If the tensor has no elements, or more boxes than a picture can show.

    Example:
        >>> from nccl_m2n import Layout, Mesh, Shard
        >>> from nccl_m2n.show import svg_layout
        >>> svg_layout(Layout((8, 8), Mesh([0, 1]), [Shard(0)])).startswith("<svg")
        True
    """
    held = _drawable(layout)
    fills = _fills(held)
    tiles = [_tile(region, fills[region.ranks]) for region in held]
    panels = _panels(tiles, layout.shape)
    width, height, parts = _arrange(panels, 2.0, 2.0, PAGE)
    return svg.document(width + 4, height + 4, parts, str(layout))


def svg_reshard(source: Layout, destination: Layout) -> str:
    """A reshard as an SVG picture: both layouts side by side, every overlap in its holders' colour.

    Args:
        source: Who holds the tensor before.
        destination: Who holds it after; of the same shape.

    Raises:
        LayoutError: If the shapes differ, the tensor has no elements, or there are too many boxes.
    """
    if source.shape != destination.shape:
        raise LayoutError(
            f"expected a source and a destination of one shape, got {source.shape} and {destination.shape}"
        )
    before, after = _drawable(source), _drawable(destination)
    cells = overlaps_of(before, after)
    fills = _fills(before)
    left, right = [], []
    for cell in cells:
        a, b = before[cell.source], after[cell.destination]
        holders, needers = ranks_text(a.ranks), ranks_text(b.ranks)
        move, title = f"{holders} → {needers}", f"{cell.box}: held by {holders}, needed by {needers}"
        left.append(Tile(cell.box, fills[a.ranks], (move, holders), title))
        right.append(Tile(cell.box, fills[a.ranks], (move, needers), title))
    sides = [
        _panels(left, source.shape, [r.box for r in before]),
        _panels(right, source.shape, [r.box for r in after]),
    ]
    x, parts, height = 2.0, [], 0.0
    for title, panels in zip(("source", "destination"), sides, strict=True):
        w, h, drawn = _arrange(panels, x, 24.0, PAGE / 2)
        parts += [svg.label(x + w / 2, 10, title, svg.GREY, bold=True), *drawn]
        height = max(height, h + 24)
        if title == "source":
            parts.append(_arrow(x + w + 20, 24 + h / 2 + 8))
            x += w + 62
    return svg.document(x + w + 2, height + 4, parts, f"{source} to {destination}")


def _drawable(layout: Layout) -> list[Region]:
    held = regions(layout)
    if held is None:
        raise LayoutError(f"too many boxes for a picture: {layout}; print it, or ask for pieces(rank)")
    if not held or not all(layout.shape):
        raise LayoutError(f"nothing to draw: {layout} has no elements")
    return held


def _fills(held: Sequence[Region]) -> dict[tuple[int, ...], str]:
    """A colour for each set of holders, in the order of their ranks, so that one rank keeps its own."""
    return {ranks: svg.colour(i) for i, ranks in enumerate(sorted({region.ranks for region in held}))}


def _tile(region: Region, fill: str) -> Tile:
    who = ranks_text(region.ranks)
    full = f"rank {who}" if len(region.ranks) == 1 else f"ranks {who}"
    return Tile(region.box, fill, (full, who), f"{region.box}: {full}")


def _panels(
    tiles: Sequence[Tile], shape: Sequence[int], outlines: Sequence[Box] | None = None
) -> list[Panel]:
    """One panel for each combination of intervals in all dimensions but the last two."""
    boxes = [tile.box for tile in tiles]
    outlines = boxes if outlines is None else outlines
    leading = max(0, len(shape) - 2)
    intervals = [list(itertools.pairwise(cuts(boxes, dim))) for dim in range(leading)]
    combinations = list(itertools.product(*intervals))
    if len(combinations) > MOST_PANELS:
        raise LayoutError(
            f"too many panels for a picture: {len(combinations)} in the first {leading} dimensions"
        )
    made = []
    for at in combinations:
        inside = [t for t in tiles if all(t.box.start[d] <= a < t.box.stop[d] for d, (a, _) in enumerate(at))]
        around = [b for b in outlines if all(b.start[d] <= a < b.stop[d] for d, (a, _) in enumerate(at))]
        caption = ", ".join(f"{a}:{b}" for a, b in at)
        made.append(_panel(inside, around, shape, caption, LONG_SIDE if len(combinations) < 3 else 150.0))
    return made


def _panel(
    tiles: Sequence[Tile], outlines: Sequence[Box], shape: Sequence[int], caption: str, long_side: float
) -> Panel:
    """Boxes in the plane of the last two dimensions, with the indices of their edges."""
    rows, columns = _plane(shape)
    width, height = _sides(rows, columns, long_side)
    x_of, y_of = width / columns, height / rows
    flat = [_flat(tile.box) for tile in tiles]
    row_marks = list(itertools.pairwise(sorted({i for a, b, _, _ in flat for i in (a, b)})))
    column_marks = list(itertools.pairwise(sorted({i for _, _, a, b in flat for i in (a, b)})))
    if len(shape) < 2:
        row_marks = []
    if not shape:
        column_marks = []
    left = max((len(f"{a}:{b}") for a, b in row_marks), default=0) * svg.LETTER + 8
    top = 18.0 + 16.0 * bool(caption)

    def draw(x: float, y: float) -> list[str]:
        x, y = x + left, y + top
        parts = [svg.label(x + width / 2, y - 27, f"[{caption}]", svg.GREY, bold=True)] if caption else []
        for tile, (r0, r1, c0, c1) in zip(tiles, flat, strict=True):
            at = x + c0 * x_of, y + r0 * y_of, (c1 - c0) * x_of, (r1 - r0) * y_of
            parts.append(svg.rectangle(*at, tile.fill, tile.title))
        parts.append(_element_lines(x, y, width, height, rows, columns))
        parts.append(_edges(flat, x, y, x_of, y_of, (rows, columns)))
        for r0, r1, c0, c1 in map(_flat, outlines):
            parts.append(svg.frame(x + c0 * x_of, y + r0 * y_of, (c1 - c0) * x_of, (r1 - r0) * y_of))
        for tile, (r0, r1, c0, c1) in zip(tiles, flat, strict=True):
            parts.append(_writing(tile, x + c0 * x_of, y + r0 * y_of, (c1 - c0) * x_of, (r1 - r0) * y_of))
        return parts + _marks(row_marks, column_marks, x, y, x_of, y_of)

    return Panel(left + width, top + height, draw)


def _writing(tile: Tile, x: float, y: float, width: float, height: float) -> str:
    """The first of a tile's texts that fits, in the middle of its box."""
    for text in tile.texts:
        if width >= len(text) * svg.LETTER + 4 and height >= svg.FONT:
            return svg.label(x + width / 2, y + height / 2, text, bold=True, ground=tile.fill)
    return ""


def _plane(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns that a shape is drawn with."""
    padded = (1, 1, *shape)
    return padded[-2], padded[-1]


def _flat(box: Box) -> tuple[int, int, int, int]:
    """First and last row and column of a box in the plane of the last two dimensions."""
    start, stop = (0, 0, *box.start), (1, 1, *box.stop)
    return start[-2], stop[-2], start[-1], stop[-1]


def _sides(rows: int, columns: int, long_side: float) -> tuple[float, float]:
    """Width and height in pixels: in proportion, as far as both stay legible."""
    if rows == 1:
        return long_side, STRIP
    scale = long_side / max(rows, columns)
    return max(SHORT_SIDE, columns * scale), max(SHORT_SIDE, rows * scale)


def _element_lines(x: float, y: float, width: float, height: float, rows: int, columns: int) -> str:
    if rows > FINE or columns > FINE:
        return ""
    ends = [(x, y + height * i / rows, x + width, y + height * i / rows) for i in range(1, rows)]
    ends += [(x + width * i / columns, y, x + width * i / columns, y + height) for i in range(1, columns)]
    return svg.lines(ends, "#ffffff", 0.6)


def _edges(
    flat: Sequence[tuple[int, int, int, int]],
    x: float,
    y: float,
    x_of: float,
    y_of: float,
    ends: tuple[int, int],
) -> str:
    """Dashed lines between tiles; those on the outline of a holder's box are drawn over."""
    dashes = []
    for r0, r1, c0, c1 in flat:
        if r1 < ends[0]:
            dashes.append((x + c0 * x_of, y + r1 * y_of, x + c1 * x_of, y + r1 * y_of))
        if c1 < ends[1]:
            dashes.append((x + c1 * x_of, y + r0 * y_of, x + c1 * x_of, y + r1 * y_of))
    return svg.lines(dashes, svg.INK, 0.7, "3 2")


def _marks(
    rows: Sequence[tuple[int, int]],
    columns: Sequence[tuple[int, int]],
    x: float,
    y: float,
    x_of: float,
    y_of: float,
) -> list[str]:
    """Index ranges along both edges; one that would touch the last one is left out."""
    parts = []
    free = -1.0
    for a, b in rows:
        middle = (a + b) / 2 * y_of
        if middle - svg.FONT / 2 >= free:
            parts.append(svg.label(x - 6, y + middle, f"{a}:{b}", svg.GREY, anchor="end"))
            free = middle + svg.FONT / 2
    free = -LONG_SIDE
    for a, b in columns:
        middle, half = (a + b) / 2 * x_of, len(f"{a}:{b}") * svg.LETTER / 2
        if middle - half >= free:
            parts.append(svg.label(x + middle, y - 9, f"{a}:{b}", svg.GREY))
            free = middle + half + svg.LETTER
    return parts


def _arrange(panels: Sequence[Panel], x: float, y: float, page: float) -> tuple[float, float, list[str]]:
    """Panels side by side, wrapped at the width `page`: width, height and elements."""
    parts: list[str] = []
    left, top, line, width = x, y, 0.0, 0.0
    for panel in panels:
        if left > x and left + panel.width - x > page:
            left, top, line = x, top + line + GAP, 0.0
        parts += panel.draw(left, top)
        left, line = left + panel.width + GAP, max(line, panel.height)
        width = max(width, left - GAP - x)
    return width, top + line - y, parts


def _arrow(x: float, y: float) -> str:
    return svg.lines(
        [(x, y, x + 24, y), (x + 18, y - 5, x + 24, y), (x + 18, y + 5, x + 24, y)], svg.GREY, 1.6
    )
