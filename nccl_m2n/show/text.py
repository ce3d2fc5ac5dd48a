# SPDX-License-Identifier: Apache-2.0
"""Layouts as plain text."""

from __future__ import annotations

from nccl_m2n.layout import Layout
from nccl_m2n.layout.layout import as_layout

MOST_ROWS = 32


def text_layout(layout: Layout) -> str:
    """A layout as an aligned table: each rank's local shape and its pieces.

    Example:
        >>> from nccl_m2n import Layout, Mesh, Shard
        >>> from nccl_m2n.show import text_layout
        >>> print(text_layout(Layout((5, 2), Mesh.arange((4,)), [Shard(0)])))
        5 × 2 on 4 over ranks 0-3 (4: S(0))
        rank  local shape  pieces
           0  (2, 2)       [0:2, 0:2] at (0, 0)
           1  (2, 2)       [2:4, 0:2] at (0, 0)
           2  (1, 2)       [4:5, 0:2] at (0, 0)
           3  (0, 2)       –
    """
    as_layout(layout, "the layout")
    rows = [("rank", "local shape", "pieces")]
    for rank in layout.ranks[:MOST_ROWS]:
        pieces = "; ".join(map(str, layout.pieces(rank)))
        rows.append((str(rank), str(layout.local_shape(rank)), pieces or "–"))
    wide = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [f"{rank:>{wide[0]}}  {shape:<{wide[1]}}  {pieces}" for rank, shape, pieces in rows]
    if len(layout.ranks) > MOST_ROWS:
        lines.append(f"… and {len(layout.ranks) - MOST_ROWS} more ranks")
    return "\n".join([str(layout), *lines])
