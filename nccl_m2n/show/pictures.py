# SPDX-License-Identifier: Apache-2.0
"""Pictures of layouts: who holds what, and what goes from whom to whom."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from nccl_m2n.errors import LayoutError
from nccl_m2n.layout import Box, Layout
from nccl_m2n.layout.layout import as_layout
from nccl_m2n.show import svg
from nccl_m2n.show.panel import Panel, Tile
from nccl_m2n.show.regions import Region, cuts, overlaps_of, regions
from nccl_m2n.text import short_ranks

PAGE = 760.0  # pixels; panels wrap beyond this width
LARGE, SMALL = 260.0, 150.0  # longer side of the panels where they are one or two, or more
GAP = 18.0  # between panels
MOST_PANELS = 24


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
    held = _drawable(as_layout(layout, "the layout"))
    fills = _fills(held)
    panels = _panels([_tile(region, fills[region.ranks]) for region in held], held, layout.shape)
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
    as_layout(source, "source"), as_layout(destination, "destination")
    if source.shape != destination.shape:
        raise LayoutError(
            f"expected a source and a destination of one shape, got {source.shape} and {destination.shape}"
        )
    before, after = _drawable(source), _drawable(destination)
    fills = _fills(before)
    tiles = [_move(box, a, b, fills[a.ranks]) for box, a, b in overlaps_of(before, after)]
    x, height, parts = 2.0, 0.0, []
    for title, held in (("source", before), ("destination", after)):
        panel_width, panel_height, drawn = _arrange(_panels(tiles, held, source.shape), x, 24.0, PAGE / 2)
        parts += [svg.label(x + panel_width / 2, 10, title, svg.GREY, bold=True), *drawn]
        x, height = x + panel_width, max(height, panel_height + 24)
        if title == "source":
            parts.append(_arrow(x + 20, height / 2 + 20))
            x += 62
    return svg.document(x + 2, height + 4, parts, f"{source} to {destination}")


def _drawable(layout: Layout) -> list[Region]:
    held = regions(layout)
    if held is None:
        raise LayoutError(f"too many boxes for a picture: {layout}; print it, or ask for pieces(rank)")
    if not held or not all(layout.shape):
        raise LayoutError(f"nothing to draw: {layout} has no elements")
    return held


def _fills(held: Sequence[Region]) -> dict[tuple[int, ...], str]:
    """A colour for each set of holders, in the order of their ranks."""
    return {ranks: svg.colour(i) for i, ranks in enumerate(sorted({region.ranks for region in held}))}


def _tile(region: Region, fill: str) -> Tile:
    who = short_ranks(region.ranks)
    full = f"rank {who}" if len(region.ranks) == 1 else f"ranks {who}"
    return Tile(region.box, fill, (full, who), f"{region.box}: {full}")


def _move(box: Box, source: Region, destination: Region, fill: str) -> Tile:
    holders, needers = short_ranks(source.ranks), short_ranks(destination.ranks)
    return Tile(box, fill, (f"{holders} → {needers}",), f"{box}: held by {holders}, needed by {needers}")


def _panels(tiles: Sequence[Tile], held: Sequence[Region], shape: Sequence[int]) -> list[Panel]:
    """One panel for each combination of intervals in all dimensions but the last two."""
    boxes, outlines = [tile.box for tile in tiles], [region.box for region in held]
    leading = range(len(shape) - 2)
    combinations = list(itertools.product(*(itertools.pairwise(cuts(boxes, dim)) for dim in leading)))
    if len(combinations) > MOST_PANELS:
        raise LayoutError(
            f"too many panels for a picture: {len(combinations)} in the first {len(leading)} dimensions"
        )
    long_side = LARGE if len(combinations) < 3 else SMALL
    made = []
    for intervals in combinations:
        corner = [a for a, _ in intervals]
        inside = [tile for tile in tiles if _reaches(tile.box, corner)]
        around = [box for box in outlines if _reaches(box, corner)]
        caption = ", ".join(f"{a}:{b}" for a, b in intervals)
        made.append(Panel(inside, around, shape, caption, long_side))
    return made


def _reaches(box: Box, corner: Sequence[int]) -> bool:
    """Whether a box holds the index `corner` in the leading dimensions."""
    return all(box.start[dim] <= index < box.stop[dim] for dim, index in enumerate(corner))


def _arrange(panels: Sequence[Panel], x: float, y: float, page: float) -> tuple[float, float, list[str]]:
    """Panels side by side, wrapped at the width `page`: width, height and elements."""
    parts: list[str] = []
    left, top, line, width = x, y, 0.0, 0.0
    for panel in panels:
        panel_width, panel_height = panel.size
        if left > x and left + panel_width - x > page:
            left, top, line = x, top + line + GAP, 0.0
        parts += panel.draw(left, top)
        left, line = left + panel_width + GAP, max(line, panel_height)
        width = max(width, left - GAP - x)
    return width, top + line - y, parts


def _arrow(x: float, y: float) -> str:
    shaft, up, down = (x, y, x + 24, y), (x + 18, y - 5, x + 24, y), (x + 18, y + 5, x + 24, y)
    return svg.lines([shaft, up, down], svg.GREY, 1.6)
