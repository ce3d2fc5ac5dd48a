# SPDX-License-Identifier: Apache-2.0
"""Names of parameters: how one side's become the other's, and patterns that choose some of them."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeAlias

from nccl_m2n.errors import LayoutError

Names: TypeAlias = Mapping[str, str] | Callable[[str], str] | Sequence[tuple[str, str]]

MAX_NAMES = 4  # that one message quotes


def new_names(names: object) -> Callable[[str], str]:
    """What a source's name becomes.

    Args:
        names: Whole names in a mapping, pairs of an old and a new beginning of which the first that fits counts, or
            a function; names that neither has stay as they are. None: all stay.

    Raises:
        LayoutError: If it is none of these.
    """
    if names is None:
        return str
    if isinstance(names, Mapping):
        table = dict(names)
        _require_texts([*table, *table.values()])
        return lambda name: table.get(name, name)
    if callable(names):
        return names
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise LayoutError(f"expected names to be a mapping, a function or pairs of beginnings, got {names!r}")
    pairs = [tuple(pair) if isinstance(pair, Iterable) else (pair,) for pair in names]
    _require_texts([text for pair in pairs for text in pair])
    if any(len(pair) != 2 for pair in pairs):
        raise LayoutError(
            f"expected names to be pairs of an old and a new beginning, got {list(names)!r}; "
            "such as [('model.', 'language_model.model.')]"
        )
    return lambda name: next((b + name[len(a) :] for a, b in pairs if name.startswith(a)), name)


def _require_texts(texts: Iterable[object]) -> None:
    wrong = [text for text in texts if not isinstance(text, str)]
    if wrong:
        raise LayoutError(f"expected names to be made of strings, got {wrong[0]!r}")


def any_of(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Whether a name matches one of some patterns, as `fnmatch` has them."""
    matches = re.compile("|".join(fnmatch.translate(pattern) for pattern in patterns) or r"\Z.").match
    return lambda name: matches(name) is not None


def chosen(only: object, known: Collection[str]) -> frozenset[str]:
    """The names that `only` means.

    Args:
        only: Names and patterns of names, or a single one; None: all.
        known: All names.

    Raises:
        LayoutError: If one of them means none, or there are none.
    """
    if only is None:
        return frozenset(known)
    wanted = [only] if isinstance(only, str) else list(only) if isinstance(only, Iterable) else None
    if wanted is None or not all(isinstance(one, str) for one in wanted):
        raise LayoutError(f"expected only to be names of parameters or patterns of names, got {only!r}")
    found = {one: [one] if one in known else list(filter(any_of([one]), known)) for one in wanted}
    unknown = [one for one, names in found.items() if not names]
    if unknown or not found:
        raise LayoutError(
            f"expected names of parameters of this refit, or patterns of them, got {quoted(unknown)}; None means all"
        )
    return frozenset(name for names in found.values() for name in names)


def quoted(names: Collection[str]) -> str:
    """Some names for a message, the first few of many."""
    first = ", ".join(repr(name) for name in list(names)[:MAX_NAMES])
    return f"{first} and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else first or "none"
