# SPDX-License-Identifier: Apache-2.0
"""Malformed calls: each ends in an error of this package that says what was expected and what came."""

from __future__ import annotations

import re
from typing import Any

import pytest

from nccl_m2n import CommandError, M2nError
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
    if one.name not in malformed.NEEDS_DEVICE:
        one.call(**one.good())


@pytest.mark.parametrize(("one", "argument"), CASES)
def test_malformed_calls_are_refused(one: Public, argument: str) -> None:
    told = {repr(value): complaint(one, argument, value) for value in one.wrong[argument].wrong}
    assert {value: what for value, what in told.items() if what} == {}


def test_the_table_is_long() -> None:
    assert sum(len(kind.wrong) for one in TABLE for kind in one.wrong.values()) > 950
