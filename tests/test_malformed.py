# SPDX-License-Identifier: Apache-2.0
"""Malformed calls: each ends in an error of this package that says what was expected and what came."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import nccl_m2n
from nccl_m2n import (
    CommandError,
    M2nError,
    interop,
    layout,
    models,
    planning,
    refit,
    sharding,
    show,
    simulation,
    storage,
)
from tests import malformed
from tests.malformed import TABLE, Public

CASES = [pytest.param(one, name, id=f"{one.name}({name})") for one in TABLE for name in one.wrong]
RAW = re.compile(r"Traceback|TypeError|ValueError|AttributeError|KeyError|IndexError|object at 0x")


def complaint(one: Public, argument: str, value: Any) -> str:
    """What is wrong with how a wrong value is refused; nothing if all is right."""
    try:
        one.call(**(one.good() | {argument: value}))
    except M2nError as error:
        said = str(error)
        if not isinstance(error, one.error) and not isinstance(error, one.also.get(argument, one.error)):
            return f"{type(error).__name__}: {said}"
        told = ("expected" in said and "got" in said) or (
            isinstance(error, CommandError) and str(value) in said
        )
        if not told or RAW.search(said) or len(said) > 1000:
            return f"does not say what was expected and what came: {said}"
        return ""
    except Exception as error:
        return f"a raw {type(error).__name__}: {error}"
    return "accepted"


@pytest.mark.parametrize("one", TABLE, ids=lambda one: one.name)
def test_the_call_that_is_spoilt_is_in_order(one: Public) -> None:
    if one.name not in malformed.NO_CALL_IN_ORDER:
        one.call(**one.good())


@pytest.mark.parametrize(("one", "argument"), CASES)
def test_malformed_calls_are_refused(one: Public, argument: str) -> None:
    told = {repr(value): complaint(one, argument, value) for value in one.wrong[argument].wrong}
    assert {value: what for value, what in told.items() if what} == {}


def test_the_table_is_long() -> None:
    assert sum(len(kind.wrong) for one in TABLE for kind in one.wrong.values()) > 950


def test_every_public_callable_is_tried() -> None:
    """But for those without arguments, those that ranks of GPUs or of another process need, and transports' insides."""
    tried = {one.name.split(",")[0] for one in TABLE} | malformed.ELSEWHERE
    assert {name for name in public_callables() if name not in tried} == set()


def public_callables() -> Iterator[str]:
    """Names of what the package and its parts offer, with the methods of its classes."""
    for package in (nccl_m2n, layout, planning, simulation, refit, models, sharding, storage, interop, show):
        for name in package.__all__:
            thing = getattr(package, name)
            if not callable(thing) or (isinstance(thing, type) and issubclass(thing, Exception)):
                continue
            if takes_arguments(thing):
                yield name
            for key, method in vars(thing).items() if isinstance(thing, type) else ():
                plain = getattr(method, "__func__", method)
                if not key.startswith("_") and inspect.isfunction(plain) and takes_arguments(plain):
                    yield f"{name}.{key}"


def takes_arguments(thing: Callable[..., Any]) -> bool:
    """Whether there is anything that could be wrong."""
    return any(name not in ("self", "cls") for name in inspect.signature(thing).parameters)
