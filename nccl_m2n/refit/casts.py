# SPDX-License-Identifier: Apache-2.0
"""Which casts a refit may do on the way: none, those that keep the range of values, or those asked for by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from nccl_m2n.dtypes import dtype_name, is_float
from nccl_m2n.errors import LayoutError
from nccl_m2n.refit.names import any_of

_LARGEST = {  # finite values of the types that can be cast
    "float64": 1.8e308,
    "float32": 3.4e38,
    "bfloat16": 3.4e38,
    "float16": 65504.0,
    "float8_e5m2": 57344.0,
    "float8_e4m3fn": 448.0,
}
Allowed: TypeAlias = (
    bool | tuple[str, ...]
)  # none, or those that keep the range, or also those to named types
Cast: TypeAlias = bool | str | Sequence[str] | Mapping[str, bool | str | Sequence[str]]


@dataclass(frozen=True)
class Casts:
    """What is allowed of parameters whose names match a pattern; the first that matches counts."""

    rules: tuple[tuple[str, Allowed], ...]

    @classmethod
    def of(cls, cast: object) -> Casts:
        """What a user gave for `cast`.

        Raises:
            LayoutError: If it is neither a bool, nor names of element types, nor a mapping to these.
        """
        given = cast if isinstance(cast, Mapping) else {"*": cast}
        for pattern in given:
            if not isinstance(pattern, str):
                raise LayoutError(f"expected cast to map patterns of names, got {pattern!r}")
        return cls(tuple((pattern, _allowed(value)) for pattern, value in given.items()))

    def require(self, name: str, source: str, destination: str) -> None:
        """Refuse a cast that is not allowed.

        Raises:
            LayoutError: Naming the parameter, both types, and what would allow it.
        """
        if source == destination:
            return
        allowed = next((allowed for matches, allowed in self._matchers if matches(name)), False)
        keeps = _LARGEST.get(source, 2e308) <= _LARGEST.get(destination, 0.0)
        if (keeps and allowed) or (isinstance(allowed, tuple) and destination in allowed):
            return
        remedy = (
            "pass cast=True to cast in flight"
            if keeps
            else f"whose range is narrower, so that values may become infinite or NaN: allow it by its name, "
            f"cast={destination!r} or cast={{pattern of names: {destination!r}}}"
        )
        raise LayoutError(
            f"parameter {name!r}: expected one element type on both sides, got {source} at the source and "
            f"{destination} at the destination{';' if keeps else ','} {remedy}"
        )

    @cached_property
    def _matchers(self) -> list[tuple[Callable[[str], bool], Allowed]]:
        return [(any_of([pattern]), allowed) for pattern, allowed in self.rules]


def _allowed(value: object) -> Allowed:
    if isinstance(value, bool):
        return value
    types = [value] if isinstance(value, str) or not isinstance(value, Iterable) else list(value)
    if not types or any(isinstance(each, int | float | None) for each in types):
        raise LayoutError(
            f"expected cast to be False, True for casts that keep the range of values, or names of the "
            f"destination's element types for narrower ones, got {value!r}"
        )
    names = tuple(dtype_name(each) for each in types)
    for name in names:
        if not is_float(name):
            raise LayoutError(f"expected cast to name float types, got {name}; other types are not cast")
    return names
