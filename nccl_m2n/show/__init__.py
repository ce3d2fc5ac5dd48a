# SPDX-License-Identifier: Apache-2.0
"""Layouts and plans for people: text, SVG and HTML. Imported only where something is shown."""

from nccl_m2n.show.html import html_layout, html_plan
from nccl_m2n.show.pictures import svg_layout, svg_reshard
from nccl_m2n.show.text import text_layout

__all__ = ["html_layout", "html_plan", "svg_layout", "svg_reshard", "text_layout"]
