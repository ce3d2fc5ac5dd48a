# SPDX-License-Identifier: Apache-2.0
"""One set of checks of what callers pass: each gives the plain value, or an error that says what was expected.

Truth values are no numbers here: ``Shard(True)`` is a slip. Numbers of any library that are whole are taken as
whole (`operator.index`), and nothing is rounded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from operator import index
from typing import Any, Literal, TypeVar, overload

import numpy as np

from nccl_m2n.errors import LayoutError, M2nError, PlanError, TransportError

Kind = TypeVar("Kind")

MAX_RANKS = 1 << 20  # tables are kept by rank, so a single high one costs as much as all below it
MAX_ADDRESS = (1 << 64) - 1
MIN_WHOLE, MAX_WHOLE = -(1 << 62), 1 << 62  # so that sums of two fit 64 bits
UNORDERED = (str, bytes, set, frozenset, Mapping)
SHOWN = 120  # characters of a wrong value that an error repeats


def shown(value: object) -> str:
    """A value as an error repeats it: all of what is short, the beginning of what is long."""
    try:
        text = repr(value)
    except Exception:  # a wrong value must not hide what is wrong with it
        text = f"<{type(value).__name__}>"
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


def whole_number(
    value: object,
    what: str,
    *,
    least: int | None = None,
    most: int | None = None,
    error: type[M2nError] = LayoutError,
    hint: str = "",
) -> int:
    """A plain int from any whole number.

    Args:
        value: What the caller gave.
        what: The argument's name, for the error.
        least: The lowest that is allowed.
        most: The highest that is allowed.
        error: What to raise.
        hint: What to do instead, for the error.
    """
    low, high = MIN_WHOLE if least is None else least, MAX_WHOLE if most is None else most
    if type(value) is int and low <= value <= high:  # nearly always: thousands of layouts are made in a row
        return value
    try:
        made = None if isinstance(value, bool | np.bool_) else int(index(value))  # type: ignore[arg-type]  # that is what is tried
    except TypeError:
        made = None
    if made is None or not low <= made <= high:
        raise error(
            f"expected a whole number{_span(least, most)} as {what}, got {shown(value)}" + _tail(hint)
        )
    return made


def whole_numbers(
    values: object,
    what: str,
    *,
    least: int | None = None,
    most: int | None = None,
    error: type[M2nError] = LayoutError,
    hint: str = "",
) -> tuple[int, ...]:
    """Plain ints from a sequence of whole numbers, or an array of them."""
    try:
        given = several(values, what)
        return tuple(whole_number(v, what, least=least, most=most, error=error) for v in given)
    except M2nError:
        raise error(
            f"expected integers{_span(least, most)} as {what}, got {shown(values)}" + _tail(hint)
        ) from None


def rank_number(value: object, what: str = "rank", *, error: type[M2nError] = LayoutError) -> int:
    """A rank as a plain int."""
    if type(value) is int and 0 <= value < MAX_RANKS:
        return value
    return whole_number(value, what, least=0, most=MAX_RANKS - 1, error=error)


def byte_count(value: object, what: str, *, least: int = 1, error: type[M2nError] = PlanError) -> int:
    """A number of bytes as a plain int."""
    return whole_number(value, what, least=least, most=MAX_WHOLE, error=error)


def real_number(
    value: object, what: str, *, zero: bool = False, error: type[M2nError] = PlanError, hint: str = ""
) -> float:
    """A finite number above 0 (or of 0, too) as a float."""
    number = isinstance(value, Real) and not isinstance(value, bool | np.bool_)
    try:
        made = float(value) if number else math.nan  # type: ignore[arg-type]
    except OverflowError:
        made = math.inf
    if not math.isfinite(made) or made < 0 or (made == 0 and not zero):
        span = "0 or more" if zero else "more than 0"
        raise error(f"expected a {what} of {span}, got {shown(value)}" + _tail(hint))
    return made


@overload
def limit_seconds(value: object, what: str = ..., *, endless: Literal[False]) -> float: ...


@overload
def limit_seconds(value: object, what: str = ..., *, endless: bool = ...) -> float | None: ...


def limit_seconds(value: object, what: str = "timeout", *, endless: bool = True) -> float | None:
    """A time limit in seconds; None, where it may be `endless`, for none."""
    if value is None and endless:
        return None
    hint = "None waits for ever" if endless else ""
    return real_number(value, f"{what} in seconds", zero=True, error=TransportError, hint=hint)


def choice(value: object, what: str, allowed: Sequence[str], *, error: type[M2nError] = PlanError) -> str:
    """One of some texts."""
    if not isinstance(value, str) or value not in allowed:
        raise error(f"expected one of {', '.join(allowed)} as {what}, got {shown(value)}")
    return value


def plain_text(value: object, what: str, *, error: type[M2nError] = LayoutError) -> str:
    """A text that is not empty."""
    if not isinstance(value, str) or not value:
        raise error(f"expected a text as {what}, got {shown(value)}")
    return value


def truth(value: object, what: str, *, error: type[M2nError] = LayoutError) -> bool:
    """True or False, not what merely counts as one."""
    if not isinstance(value, bool | np.bool_):
        raise error(f"expected True or False as {what}, got {shown(value)}")
    return bool(value)


def made_by(
    value: object, kind: type[Kind], what: str, *, error: type[M2nError] = LayoutError, hint: str = ""
) -> Kind:
    """An object of one of this package's classes."""
    if not isinstance(value, kind):
        raise error(
            f"expected a {kind.__name__} as {what}, got {shown(value)} of type {type(value).__name__}"
            + _tail(hint)
        )
    return value


def several(
    values: object, what: str, *, error: type[M2nError] = LayoutError, hint: str = ""
) -> tuple[Any, ...]:
    """The entries of a sequence; a text is none, nor is a set or a mapping, whose order says nothing."""
    if type(values) is tuple or type(values) is list:
        return tuple(values)
    if isinstance(values, UNORDERED) or not isinstance(values, Iterable):
        raise error(f"expected a sequence of {what}, got {shown(values)}" + _tail(hint))
    return tuple(values)


def _span(least: int | None, most: int | None) -> str:
    if least is None:
        return ""
    return f" of {least} or more" if most in (None, MAX_WHOLE) else f" from {least} to {most}"


def _tail(hint: str) -> str:
    return f"; {hint}" if hint else ""


def table_of(
    values: object, what: str, *, error: type[M2nError] = LayoutError, hint: str = ""
) -> Mapping[Any, Any]:
    """A mapping."""
    if not isinstance(values, Mapping):
        raise error(
            f"expected a mapping {what}, got {shown(values)} of type {type(values).__name__}" + _tail(hint)
        )
    return values
