# SPDX-License-Identifier: Apache-2.0
"""The few SVG elements that the pictures need, and their colours; knows nothing of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

FONT = 11.0  # pixels
LETTER = 7.0  # width of a letter at that size, on the wide side
INK = "#1f2933"  # on a coloured ground
GREY = "#7d8590"  # on the page's ground, be it white or black

# Light enough for dark letters, apart from one another for most eyes in this order.
PALETTE = (
    "#8ec5e8",
    "#f7b977",
    "#95d2a4",
    "#e3a6cf",
    "#f3da7c",
    "#a9aee8",
    "#f09f95",
    "#86d3d0",
    "#c3c87a",
    "#d3b8a8",
)


def colour(number: int) -> str:
    """The fill for the `number`-th group of ranks."""
    if number < len(PALETTE):
        return PALETTE[number]
    return f"hsl({number * 137.508 % 360:.0f},50%,{70 + 8 * (number % 3)}%)"


def _number(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")


def rectangle(x: float, y: float, width: float, height: float, fill: str, title: str) -> str:
    """A filled rectangle that says `title` when pointed at."""
    at = f'x="{_number(x)}" y="{_number(y)}" width="{_number(width)}" height="{_number(height)}"'
    return f'<rect {at} fill="{fill}"><title>{escape(title)}</title></rect>'


def frame(x: float, y: float, width: float, height: float, stroke: str = INK, line: float = 1.2) -> str:
    """An empty rectangle with a border."""
    at = f'x="{_number(x)}" y="{_number(y)}" width="{_number(width)}" height="{_number(height)}"'
    return f'<rect {at} fill="none" stroke="{stroke}" stroke-width="{line}"/>'


def lines(ends: Sequence[tuple[float, float, float, float]], stroke: str, line: float, dash: str = "") -> str:
    """Straight lines (x1, y1, x2, y2), all drawn alike; nothing for none."""
    if not ends:
        return ""
    path = " ".join(f"M{_number(a)} {_number(b)}L{_number(c)} {_number(d)}" for a, b, c, d in ends)
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<path d="{path}" fill="none" stroke="{stroke}" stroke-width="{line}"{dashes}/>'


def label(
    x: float,
    y: float,
    text: str,
    fill: str = INK,
    anchor: str = "middle",
    bold: bool = False,
    ground: str = "",
) -> str:
    """Text with its middle line at `y`; a `ground` colour keeps lines from crossing the letters."""
    weight = ' font-weight="600"' if bold else ""
    halo = f' stroke="{ground}" stroke-width="4" paint-order="stroke"' if ground else ""
    at = f'x="{_number(x)}" y="{_number(y + FONT * 0.35)}" text-anchor="{anchor}"'
    return f'<text {at} fill="{fill}"{weight}{halo}>{escape(text)}</text>'


def document(width: float, height: float, parts: Sequence[str], title: str) -> str:
    """A whole SVG picture; never wider than the page it is put on."""
    size = f'viewBox="0 0 {_number(width)} {_number(height)}" width="{_number(width)}"'
    font = f'font-family="system-ui,DejaVu Sans,sans-serif" font-size="{FONT:.0f}"'
    style = 'style="max-width:100%;height:auto"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size} {style} {font}>'
    return "\n".join([head, f"<title>{escape(title)}</title>", *filter(None, parts), "</svg>"]) + "\n"
