# SPDX-License-Identifier: Apache-2.0
"""Matching what both sides declared: one transfer for each name, or an error that says which name and why not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from nccl_m2n.errors import LayoutError
from nccl_m2n.execution.given import SIDES
from nccl_m2n.layout import Layout, Mesh, Replicate
from nccl_m2n.planning import Transfer
from nccl_m2n.refit.exchange import Declared
from nccl_m2n.refit.names import any_of, quoted
from nccl_m2n.refit.options import RefitOptions


@dataclass(frozen=True)
class Matched:
    """What is to be moved, in the order of the destination side."""

    sharded: tuple[Transfer, ...]  # from the layout of one side to that of the other
    whole: tuple[Transfer, ...]  # to full tensors on the ranks that want them
    laid_out: tuple[Transfer, ...]  # those of `whole` that have a layout at the destination after all, to it
    skipped: Mapping[str, tuple[str, ...]]  # by side, the names that it alone declares

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of everything that is moved."""
        return frozenset(t.name for t in self.sharded + self.whole)

    @property
    def left_out(self) -> int:
        """How many parameters one side alone declares."""
        return sum(map(len, self.skipped.values()))


def match_sides(
    source: Mapping[str, Declared], destination: Mapping[str, Declared], options: RefitOptions
) -> Matched:
    """One transfer for each name that both sides declare.

    Args:
        source: What the source side has.
        destination: What the destination side needs.
        options: Say which casts are allowed, what becomes of names of one side only, and what goes as full tensors
            though the destination has a layout for it.

    Raises:
        LayoutError: Naming the parameter, if it is on one side only, or its types or shapes differ; if there is
            nothing to move.
    """
    skipped = _lone(source, destination, options.missing)
    chosen = any_of(options.whole)
    made: dict[tuple[int, int], Transfer] = {}
    replicas: dict[int, Transfer] = {}
    sharded, full, laid_out = [], [], []
    for name, wanted in destination.items():
        if name not in source:
            continue
        key = id(source[name]), id(wanted)
        one = made.get(key)
        if one is None:  # of thousands of parameters, most are declared like another one
            one = made[key] = _transfer(name, source[name], wanted)
        options.casts.check(name, one.dtype, one.destination_dtype)
        one = one.renamed(name)
        if wanted.layout is not None and not chosen(name):
            sharded.append(one)
            continue
        if wanted.layout is not None:
            laid_out.append(one)
        at = id(made[key])
        if at not in replicas:
            replicas[at] = _replicated(made[key])
        full.append(replicas[at].renamed(name))
    return Matched(tuple(sharded), tuple(full), tuple(laid_out), skipped)


def _lone(
    source: Mapping[str, Declared], destination: Mapping[str, Declared], missing: str
) -> dict[str, tuple[str, ...]]:
    """By side, the names that it alone declares; refused where that is not asked for, or nothing else is there."""
    both = source.keys() & destination.keys()
    lone = {
        side: tuple(name for name in names if name not in both)
        for side, names in zip(SIDES, (source, destination), strict=True)
    }
    told = " and ".join(
        f"{quoted(names)} not on the {other} side"
        for names, other in zip(lone.values(), reversed(SIDES), strict=True)
        if names
    )
    if told and (missing == "error" or not both):
        remedy = ", or pass missing='skip'" if both else ""
        raise LayoutError(
            f"expected every parameter on both sides, got {told}; declare it there, map names with names={remedy}"
        )
    if not both:
        raise LayoutError("expected parameters on both sides, got none at all; declare what each rank holds")
    return lone


def _transfer(name: str, source: Declared, destination: Declared) -> Transfer:
    if source.layout is None:
        raise LayoutError(
            f"parameter {name!r}: expected a layout on the source side, got none from rank "
            f"{min(source.ranks)}; only a destination can want a parameter whole"
        )
    dtype = source.dtype or destination.dtype
    other = destination.dtype or source.dtype
    if dtype is None or other is None:
        raise LayoutError(f"parameter {name!r}: expected an array or a dtype on some rank, got neither")
    wanted = destination.layout
    if wanted is None:
        wanted = Layout(source.layout.shape, Mesh(sorted(destination.ranks)), [Replicate()])
    return Transfer(source.layout, wanted, dtype, name, other)


def _replicated(one: Transfer) -> Transfer:
    """The same tensor, all of it on every rank of the destination that holds any."""
    ranks = [rank for rank in one.destination.ranks if one.destination.pieces(rank)]
    layout = Layout(one.shape, Mesh(ranks or one.destination.ranks), [Replicate()])
    return Transfer(one.source, layout, one.dtype, one.name, one.destination_dtype)
