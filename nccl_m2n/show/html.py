# SPDX-License-Identifier: Apache-2.0
"""What a notebook shows for a layout and for a plan."""

from __future__ import annotations

from html import escape

from nccl_m2n.checks import made_by
from nccl_m2n.errors import LayoutError, PlanError
from nccl_m2n.layout import Layout
from nccl_m2n.layout.layout import as_layout
from nccl_m2n.planning import Plan
from nccl_m2n.show.pictures import svg_layout
from nccl_m2n.show.text import text_layout


def html_layout(layout: Layout) -> str:
    """A layout as a picture with its description under it, or as text where no picture can be drawn."""
    as_layout(layout, "the layout")
    try:
        picture = svg_layout(layout)
    except LayoutError:
        return f"<pre>{escape(text_layout(layout))}</pre>"
    return f"<figure>{picture}<figcaption>{escape(str(layout))}</figcaption></figure>"


def html_plan(plan: Plan) -> str:
    """A plan as the table that it prints, one column a method."""
    made_by(plan, Plan, "the plan", error=PlanError)
    header, *rows = plan.rows()
    head = "".join(f'<th style="text-align:right;padding-left:1.2em">{escape(cell)}</th>' for cell in header)
    body = "\n".join(f"<tr>{_label(row[0])}{''.join(map(_number, row[1:]))}</tr>" for row in rows)
    return (
        f"<table>\n<caption>{escape(plan.title)}</caption>\n"
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"
    )


def _label(text: str) -> str:
    """The head of a row; the blanks that set one in when printed set it in here too."""
    indent = len(text) - len(text.lstrip())
    return f'<th style="text-align:left;padding-left:{0.6 * (1 + indent):.1f}em">{escape(text.strip())}</th>'


def _number(text: str) -> str:
    return f'<td style="text-align:right;padding-left:1.2em">{escape(text)}</td>'
