# SPDX-License-Identifier: Apache-2.0
"""Finding out together what both sides have: descriptions exchanged, matched by name and checked.

What crosses is JSON, nothing that could run code. Ranks that declare the same (all data- and tensor-parallel
ranks of a stage do) are found by digest first, and one of them speaks for all.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from nccl_m2n.dtypes import dtype_name
from nccl_m2n.errors import DisagreementError, LayoutError
from nccl_m2n.execution.agree import attempt, raise_together
from nccl_m2n.layout import Layout
from nccl_m2n.layout.mesh import short_ranks
from nccl_m2n.planning import Transfer
from nccl_m2n.planning.describe import layout_data, read_layout
from nccl_m2n.refit.parameter import Parameter
from nccl_m2n.transport.base import Transport

SIDES = ("source", "destination")


@dataclass(frozen=True)
class Declared:
    """One parameter as a whole side declared it."""

    layout: Layout
    dtype: str | None  # None: no rank of the side has an array of it
    ranks: frozenset[int]  # that declared it


def exchange_parameters(
    transport: Transport, declare: Callable[[int], Sequence[Sequence[Parameter]]]
) -> list[dict[str, Declared]]:
    """What each side has, by name. Collective.

    Args:
        transport: Joins the ranks.
        declare: For a local rank the parameters of its source and of its destination side; may raise.

    Raises:
        LayoutError: On every rank, if a rank declares a name twice or something that cannot be described.
        DisagreementError: If ranks of a side describe one parameter differently, or one of a layout's ranks
            does not declare it.
    """
    failures: dict[int, Exception] = {}
    texts = {
        rank: attempt(partial(_describe_sides, declare, rank), failures, rank) or ["", ""]
        for rank in transport.local_ranks
    }
    raise_together(transport, failures, {})
    sides = []
    for number, side in enumerate(SIDES):
        mine = {rank: text[number].encode() for rank, text in texts.items()}
        alike: dict[bytes, list[int]] = {}
        for rank, digest in enumerate(
            transport.exchange({r: hashlib.sha256(t).digest() for r, t in mine.items()})
        ):
            alike.setdefault(digest, []).append(rank)
        speakers = {ranks[0] for ranks in alike.values()}
        said = transport.exchange({rank: text if rank in speakers else b"" for rank, text in mine.items()})
        sides.append(_merge(side, {tuple(ranks): json.loads(said[ranks[0]]) for ranks in alike.values()}))
    return sides


def _describe_sides(declare: Callable[[int], Sequence[Sequence[Parameter]]], rank: int) -> list[str]:
    return [_describe(side) for side in declare(rank)]


def _describe(parameters: Iterable[Parameter]) -> str:
    """Parameters as JSON: distinct layouts once, then a row each."""
    layouts: dict[Layout, int] = {}
    rows, seen = [], set()
    for p in parameters:
        if p.name in seen:
            raise LayoutError(
                f"expected one parameter of each name, got {p.name!r} twice; give each its own name"
            )
        seen.add(p.name)
        view = p.view()
        dtype = view.dtype if view is not None else None if p.dtype is None else dtype_name(p.dtype)
        rows.append([p.name, layouts.setdefault(p.layout, len(layouts)), dtype])
    return json.dumps([[layout_data(a) for a in layouts], rows])


def _merge(side: str, said: Mapping[tuple[int, ...], Any]) -> dict[str, Declared]:
    """One description of each parameter out of those of all groups of ranks."""
    merged: dict[str, Declared] = {}
    known: dict[str, Layout] = {}
    for ranks, (layouts, rows) in said.items():
        made = []
        for data in layouts:
            key = json.dumps({k: v for k, v in data.items() if k != "names"})
            if key not in known:
                known[key] = read_layout(data)
            made.append(known[key])
        for name, number, dtype in rows:
            new = Declared(made[number], dtype, frozenset(ranks))
            merged[name] = _joined(side, name, merged[name], new) if name in merged else new
    for name, one in merged.items():
        missing = sorted(set(one.layout.ranks) - one.ranks)
        silent = [r for r in missing if one.layout.pieces(r)]
        if silent:
            raise DisagreementError(
                f"parameter {name!r}, {side} side: expected every rank of {one.layout} to declare it, got nothing "
                f"from rank {short_ranks(silent)}; declare it there, or leave the rank out of the layout"
            )
    return merged


def _joined(side: str, name: str, a: Declared, b: Declared) -> Declared:
    dtypes = {a.dtype, b.dtype} - {None}
    if a.layout != b.layout or len(dtypes) > 1:
        raise DisagreementError(
            f"parameter {name!r}, {side} side: expected one description, got {a.dtype or ''} {a.layout} from rank "
            f"{short_ranks(sorted(a.ranks))} and {b.dtype or ''} {b.layout} from rank {short_ranks(sorted(b.ranks))}"
        )
    return Declared(a.layout, next(iter(dtypes), None), a.ranks | b.ranks)


def match_sides(
    source: Mapping[str, Declared], destination: Mapping[str, Declared], *, cast: bool, missing: str
) -> list[Transfer]:
    """One transfer for each name that both sides declare, in the order of the destination side.

    Args:
        source: What the source side has.
        destination: What the destination side needs.
        cast: Whether element types may differ, to be cast in flight.
        missing: ``"error"``, or ``"skip"`` to leave out what only one side declares.

    Raises:
        LayoutError: Naming the parameter, if it is on one side only, or its types or shapes differ.
    """
    if missing not in ("error", "skip"):
        raise LayoutError(f"expected missing to be 'error' or 'skip', got {missing!r}")
    for have, other, side in ((source, destination, "destination"), (destination, source, "source")):
        lone = [name for name in have if name not in other]
        if lone and missing == "error":
            raise LayoutError(
                f"parameter {lone[0]!r}: expected it on both sides, got it not on the {side} side"
                + (f" (nor {len(lone) - 1} others)" if len(lone) > 1 else "")
                + "; declare it there, or pass missing='skip'"
            )
    return [_transfer(name, source[name], destination[name], cast) for name in destination if name in source]


def _transfer(name: str, source: Declared, destination: Declared, cast: bool) -> Transfer:
    dtype = source.dtype or destination.dtype
    other = destination.dtype or source.dtype
    if dtype is None or other is None:
        raise LayoutError(f"parameter {name!r}: expected an array or a dtype on some rank, got neither")
    if dtype != other and not cast:
        raise LayoutError(
            f"parameter {name!r}: expected one element type on both sides, got {dtype} at the source and {other} at "
            "the destination; pass cast=True to cast in flight"
        )
    return Transfer(source.layout, destination.layout, dtype, name, other)
