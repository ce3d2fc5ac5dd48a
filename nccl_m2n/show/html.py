# SPDX-License-Identifier: Apache-2.0
"""What a notebook shows for a layout."""

from __future__ import annotations

from html import escape

from nccl_m2n.errors import LayoutError
from nccl_m2n.layout import Layout
from nccl_m2n.show.pictures import svg_layout
from nccl_m2n.show.text import text_layout


def html_layout(layout: Layout) -> str:
    """A layout as a picture with its description under it, or as text where no picture can be drawn."""
    try:
        picture = svg_layout(layout)
    except LayoutError:
        return f"<pre>{escape(text_layout(layout))}</pre>"
    return f"<figure>{picture}<figcaption>{escape(str(layout))}</figcaption></figure>"
