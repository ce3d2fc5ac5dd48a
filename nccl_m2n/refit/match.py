# SPDX-License-Identifier: Apache-2.0
"""Matching what both sides declared: one transfer for each name, or an error that says which name and why not."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from nccl_m2n.errors import LayoutError
from nccl_m2n.layout import Layout, Mesh, Replicate
from nccl_m2n.planning import Transfer
from nccl_m2n.refit.exchange import Declared

MISSING = ("error", "skip")


@dataclass(frozen=True)
class Matched:
    """What is to be moved, in the order of the destination side."""

    sharded: tuple[Transfer, ...]  # from the layout of one side to that of the other
    whole: tuple[Transfer, ...]  # to full tensors on the ranks that want them
    laid_out: tuple[Transfer, ...]  # those of `whole` that have a layout at the destination after all, to it

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of everything that is moved."""
        return frozenset(t.name for t in self.sharded + self.whole)


def match_sides(
    source: Mapping[str, Declared],
    destination: Mapping[str, Declared],
    *,
    cast: bool = False,
    missing: str = "error",
    whole: Sequence[str] = (),
) -> Matched:
    """One transfer for each name that both sides declare.

    Args:
        source: What the source side has.
        destination: What the destination side needs.
        cast: Whether element types may differ, to be cast in flight.
        missing: ``"error"``, or ``"skip"`` to leave out what only one side declares.
        whole: Patterns of names that go as full tensors though the destination has a layout for them.

    Raises:
        LayoutError: Naming the parameter, if it is on one side only, or its types or shapes differ.
    """
    if missing not in MISSING:
        raise LayoutError(f"expected missing to be {' or '.join(map(repr, MISSING))}, got {missing!r}")
    if missing == "error":
        _refuse_lone(source, destination, "destination")
        _refuse_lone(destination, source, "source")
    chosen = re.compile("|".join(fnmatch.translate(pattern) for pattern in whole) or r"\Z.")
    made: dict[tuple[int, int], Transfer] = {}
    replicas: dict[int, Transfer] = {}
    sharded, full, laid_out = [], [], []
    for name, wanted in destination.items():
        if name not in source:
            continue
        key = id(source[name]), id(wanted)
        one = made.get(key)
        if one is None:  # of thousands of parameters, most are declared like another one
            one = made[key] = _transfer(name, source[name], wanted, cast)
        one = one.renamed(name)
        if wanted.layout is not None and not chosen.match(name):
            sharded.append(one)
            continue
        if wanted.layout is not None:
            laid_out.append(one)
        at = id(made[key])
        if at not in replicas:
            replicas[at] = _replicated(made[key])
        full.append(replicas[at].renamed(name))
    return Matched(tuple(sharded), tuple(full), tuple(laid_out))


def _refuse_lone(have: Mapping[str, Declared], other: Collection[str], side: str) -> None:
    lone = [name for name in have if name not in other]
    if lone:
        others = f" (nor {len(lone) - 1} others)" if len(lone) > 1 else ""
        raise LayoutError(
            f"parameter {lone[0]!r}: expected it on both sides, got it not on the {side} side{others}; "
            "declare it there, or pass missing='skip'"
        )


def _transfer(name: str, source: Declared, destination: Declared, cast: bool) -> Transfer:
    if source.layout is None:
        raise LayoutError(
            f"parameter {name!r}: expected a layout on the source side, got none from rank "
            f"{min(source.ranks)}; only a destination can want a parameter whole"
        )
    dtype = source.dtype or destination.dtype
    other = destination.dtype or source.dtype
    if dtype is None or other is None:
        raise LayoutError(f"parameter {name!r}: expected an array or a dtype on some rank, got neither")
    if dtype != other and not cast:
        raise LayoutError(
            f"parameter {name!r}: expected one element type on both sides, got {dtype} at the source and {other} at "
            "the destination; pass cast=True to cast in flight"
        )
    wanted = destination.layout
    if wanted is None:
        wanted = Layout(source.layout.shape, Mesh(sorted(destination.ranks)), [Replicate()])
    return Transfer(source.layout, wanted, dtype, name, other)


def _replicated(one: Transfer) -> Transfer:
    """The same tensor, all of it on every rank of the destination that holds any."""
    ranks = [rank for rank in one.destination.ranks if one.destination.pieces(rank)]
    layout = Layout(one.shape, Mesh(ranks or one.destination.ranks), [Replicate()])
    return Transfer(one.source, layout, one.dtype, one.name, one.destination_dtype)
