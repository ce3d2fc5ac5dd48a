# SPDX-License-Identifier: Apache-2.0
"""Numbers and tables as text for people."""

from __future__ import annotations

from collections.abc import Sequence


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


def short_ranks(ranks: Sequence[int]) -> str:
    """Ranks for people: runs as ``first-last``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    return ", ".join(text if len(text) <= 8 else [*text[:7], "…", text[-1]])


def pip_install(extra: str) -> str:
    """The command that brings what one of this package's extras names, run in a checkout: no index has it yet."""
    return f"pip install '.[{extra}]'"
