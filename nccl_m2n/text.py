# SPDX-License-Identifier: Apache-2.0
"""Numbers and tables as text for people."""

from __future__ import annotations


def bytes_text(amount: float) -> str:
    """Bytes for people, in binary units."""
    size = float(amount)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return ""


def align_table(rows: list[list[str]]) -> str:
    """Rows as text, the first column to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    return "\n".join(line.rstrip() for line in lines)
