# SPDX-License-Identifier: Apache-2.0
"""What commands print and write: aligned rows, JSON with a schema, a progress bar on terminals."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import nccl_m2n
from nccl_m2n.errors import CommandError, M2nError
from nccl_m2n.planning import Plan
from nccl_m2n.text import short_ranks
from nccl_m2n.typing import JsonObject, ReadJson

SCHEMA_VERSION = 1
BAR_WIDTH = 30

Item = TypeVar("Item")


def one_line(error: BaseException) -> str:
    """An error's text without line breaks, and without the ranks that raised it where those are all."""
    text = "; ".join(str(error).splitlines())
    return text.removeprefix(f"rank {short_ranks(range(getattr(error, 'raised_by', 0)))}: ")


def plain_errors(work: Callable[[int], Item]) -> Callable[[int], Item]:
    """The same work for a rank; errors of the system, such as a missing file, become a command's own."""

    def done(rank: int) -> Item:
        try:
            return work(rank)
        except M2nError:
            raise
        except MemoryError as error:
            raise CommandError(f"not enough memory: {error}") from error
        except OSError as error:
            named = error.filename is not None
            said = f"cannot use {error.filename}: {error.strerror}" if named else str(error)
            raise CommandError(said) from error

    return done


def check_writable(path: str | None) -> None:
    """Refuse a JSON file that cannot be written, before anything long begins.

    Raises:
        CommandError: If it is a folder, or its folder does not exist.
    """
    if path in (None, "-"):
        return
    file = Path(str(path))
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise CommandError(f"--json {path}: expected a file in a folder that exists")


def publish(text: str, schema: str, data: ReadJson, path: str | None) -> None:
    """Print a table, and write its numbers as JSON where that was asked for.

    Args:
        text: The table.
        schema: What the JSON describes, such as ``"plan"``.
        data: The numbers.
        path: Where the JSON goes: a file, ``"-"`` for standard output in the table's place, or None.
    """
    head = {
        "schema": f"nccl_m2n.{schema}",
        "schema_version": SCHEMA_VERSION,
        "nccl_m2n": nccl_m2n.__version__,
    }
    if path != "-":
        print(text, flush=True)
    if path is None:
        return
    written = json.dumps({**head, **data}, indent=1)
    if path == "-":
        print(written, flush=True)
    else:
        Path(path).write_text(written + "\n", encoding="utf-8")


def pairs_text(pairs: Sequence[tuple[str, str]]) -> str:
    """Labels and values, one pair a line, aligned."""
    width = max(len(label) for label, _ in pairs)
    return "\n".join(f"{label:<{width}}  {value}".rstrip() for label, value in pairs)


def methods_data(plan: Plan) -> dict[str, JsonObject]:
    """The plan's figures, and those of the methods that its table compares it with."""
    return {made.options.method: _figures(made) for made in [plan, *plan.compared()]}


def _figures(plan: Plan) -> JsonObject:
    figures, traffic = plan.figures(), plan.traffic()
    return {
        "flows": figures.flows,
        "network_bytes": traffic.network_bytes,
        "network_bytes_bound": traffic.network_bytes_bound,
        "nvlink_bytes": traffic.nvlink_bytes,
        "local_bytes": traffic.local_bytes,
        "busiest_nic_bytes": traffic.busiest,
        "busiest_nic_bytes_bound": figures.nic_bound,
        "rounds": plan.rounds,
        "messages": figures.messages,
        "staging_bytes": figures.staging_bytes,
    }


def progress(items: Iterable[Item], total: int, label: str, shown: bool) -> Iterator[Item]:
    """The items, with a bar on standard error while they are taken; none where that is no terminal.

    Args:
        items: What is iterated.
        total: How many there are.
        label: What is going on.
        shown: Whether this process shows bars at all.
    """
    if not (shown and total and sys.stderr.isatty()):
        yield from items
        return
    drawn = -1
    try:
        for done, item in enumerate(items):
            filled = BAR_WIDTH * done // total
            if filled != drawn:
                drawn = filled
                bar = "█" * filled + "·" * (BAR_WIDTH - filled)
                print(f"\r{label:<10} {bar} {done}/{total}", end="", file=sys.stderr, flush=True)
            yield item
    finally:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
