# SPDX-License-Identifier: Apache-2.0
"""Finding out together what both sides have: every rank describes its own parameters, all ranks know them all.

What crosses is JSON, nothing that could run code. A rank's parameters are described in groups of one layout
and one element type. Most groups are common to many ranks (all data-parallel ranks of a stage, for one): they
are found by digest, and one rank says each of them for all.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from nccl_m2n.dtypes import dtype_name
from nccl_m2n.errors import DisagreementError, LayoutError
from nccl_m2n.execution.given import SIDES
from nccl_m2n.execution.views import ArrayView
from nccl_m2n.layout import Layout
from nccl_m2n.refit.parameter import Parameter
from nccl_m2n.text import short_ranks
from nccl_m2n.transport.base import Transport

DIGEST_BYTES = 32


@dataclass(frozen=True, eq=False)
class Declared:
    """What a whole side declared of one parameter, or of many alike."""

    layout: Layout | None  # None: wanted whole
    dtype: str | None  # None: no rank of the side has an array of it
    ranks: frozenset[int]  # that declared it

    def __str__(self) -> str:
        return f"{self.dtype or ''} {self.layout or 'whole, without a layout'}".strip()


@dataclass(frozen=True, eq=False)
class OwnSide:
    """What one rank has on one side."""

    arrays: dict[str, ArrayView]  # by name, of the parameters of which it holds a part
    texts: dict[bytes, bytes]  # groups of parameters as JSON, by digest

    def only(self, names: Collection[str]) -> OwnSide:
        """The same without the arrays of other parameters."""
        return replace(self, arrays={name: view for name, view in self.arrays.items() if name in names})

    def require_like(self, other: OwnSide, side: str) -> None:
        """Refuse parameters that are not those which the rank declared before, arrays apart.

        Raises:
            LayoutError: Naming the first that differs.
        """
        if self.texts.keys() == other.texts.keys():
            return
        now, before = self._by_name(), other._by_name()
        for name in before | now:
            if now.get(name) != before.get(name):
                raise LayoutError(
                    f"parameter {name!r}, {side} side: expected it as it was declared at construction, "
                    f"{before.get(name, 'not at all')}, got {now.get(name, 'nothing')}"
                )

    def _by_name(self) -> dict[str, str]:
        """What each parameter is, but for its array."""
        found: dict[str, str] = {}
        for text in self.texts.values():
            _, layout, dtype, names = json.loads(text)
            found |= dict.fromkeys(names, f"{dtype} {json.dumps(layout)}")
        return found


def describe_side(
    number: int, parameters: Iterable[Parameter], rename: Callable[[str], str] = str
) -> OwnSide:
    """One rank's parameters on one side, checked one by one.

    Args:
        number: Of the side, in `SIDES`.
        parameters: What the rank declares.
        rename: Gives the name by which both sides know a parameter.

    Raises:
        LayoutError: For a name that comes twice, or something that cannot be described.
    """
    groups: dict[tuple[Layout | None, str | None], list[str]] = {}  # alike: one layout and element type
    near: dict[tuple[int, str | None], list[str]] = {}  # the same, found by the layout's identity
    arrays: dict[str, ArrayView] = {}
    seen: dict[str, str] = {}
    for p in parameters:
        name = _new_name(p.name, rename, seen)
        view = p.view()
        if view is not None:
            arrays[name] = view
            if p.layout is None:
                raise LayoutError(
                    f"parameter {p.name!r}: expected a layout for its array, got none; what has no layout is "
                    "delivered to load"
                )
        dtype = view.dtype if view is not None else None if p.dtype is None else dtype_name(p.dtype)
        names = near.get((id(p.layout), dtype))
        if names is None:
            names = near[id(p.layout), dtype] = groups.setdefault((p.layout, dtype), [])
        names.append(name)
    texts = [
        json.dumps([number, None if layout is None else layout.data(), dtype, names]).encode()
        for (layout, dtype), names in groups.items()
    ]
    return OwnSide(arrays, {hashlib.sha256(text).digest(): text for text in texts})


def _new_name(name: str, rename: Callable[[str], str], seen: dict[str, str]) -> str:
    new = rename(name)
    if not isinstance(new, str):
        raise LayoutError(f"parameter {name!r}: expected names to give its new name, got {new!r}")
    if new in seen:
        both = f"{new!r} twice" if seen[new] == name else f"{new!r} from both {seen[new]!r} and {name!r}"
        raise LayoutError(f"expected one parameter of each name, got {both}; give each its own name")
    seen[new] = name
    return new


def exchange_descriptions(
    transport: Transport, own: Mapping[int, Sequence[OwnSide]]
) -> tuple[dict[str, Declared], dict[str, Declared]]:
    """What each side has, by name. Collective.

    Args:
        transport: Joins the ranks.
        own: For each local rank what it has on the source side and on the destination side.

    Returns:
        Source and destination, equal on every rank. Parameters alike share one `Declared` object.

    Raises:
        DisagreementError: On every rank, if ranks of a side describe one parameter differently, or one of a
            layout's ranks does not declare it.
    """
    texts = {rank: {k: v for side in sides for k, v in side.texts.items()} for rank, sides in own.items()}
    ranks_of: dict[bytes, list[int]] = {}
    digests = transport.exchange(
        {rank: b"".join(own) for rank, own in texts.items()}, "refit: which descriptions"
    )
    for rank, one in enumerate(digests):
        for at in range(0, len(one), DIGEST_BYTES):
            ranks_of.setdefault(one[at : at + DIGEST_BYTES], []).append(rank)
    said = transport.exchange(
        {
            rank: b"\n".join(text for digest, text in own.items() if ranks_of[digest][0] == rank)
            for rank, own in texts.items()
        },
        "refit: the descriptions",
    )
    # The texts come in the order in which their digests came first: by rank, and then as the rank has them.
    every = [text for each in said for text in each.split(b"\n") if text]
    found: tuple[dict[str, Declared], dict[str, Declared]] = ({}, {})
    known: dict[str, Layout] = {}
    for text, ranks in zip(every, ranks_of.values(), strict=True):
        number, layout, dtype, names = json.loads(text)
        new = Declared(_interned(layout, known), dtype, frozenset(ranks))
        _add(SIDES[number], found[number], names, new)
    for side, declared in zip(SIDES, found, strict=True):
        _refuse_silence(side, declared)
    return found


def _interned(data: Mapping[str, object] | None, known: dict[str, Layout]) -> Layout | None:
    """The layout that was described; one object for equal ones, whatever their mesh axes are called."""
    if data is None:
        return None
    key = json.dumps({k: v for k, v in data.items() if k != "names"})
    if key not in known:
        known[key] = Layout.read(data)
    return known[key]


def _add(side: str, declared: dict[str, Declared], names: Iterable[str], new: Declared) -> None:
    """Add a group of parameters to what is known of a side."""
    joined: dict[int, Declared] = {}  # what was known -> that and the new one
    for name in names:
        old = declared.setdefault(name, new)
        if old is not new:
            if id(old) not in joined:
                joined[id(old)] = _join(side, name, old, new)
            declared[name] = joined[id(old)]


def _join(side: str, name: str, a: Declared, b: Declared) -> Declared:
    dtypes = {a.dtype, b.dtype} - {None}
    if a.layout != b.layout or len(dtypes) > 1:
        raise DisagreementError(
            f"parameter {name!r}, {side} side: expected one description, got {a} from rank "
            f"{short_ranks(sorted(a.ranks))} and {b} from rank {short_ranks(sorted(b.ranks))}"
        )
    return Declared(a.layout, next(iter(dtypes), None), a.ranks | b.ranks)


def _refuse_silence(side: str, declared: Mapping[str, Declared]) -> None:
    """Refuse a parameter that a rank holds a part of, as its layout says, but did not declare."""
    seen: set[int] = set()
    for name, one in declared.items():
        if id(one) in seen or one.layout is None:
            continue
        seen.add(id(one))
        if one.ranks.issuperset(one.layout.ranks):
            continue
        silent = [r for r in one.layout.ranks if r not in one.ranks and one.layout.pieces(r)]
        if silent:
            raise DisagreementError(
                f"parameter {name!r}, {side} side: expected every rank of {one.layout} to declare it, got nothing "
                f"from rank {short_ranks(silent)}; declare it there, or leave the rank out of the layout"
            )
