# SPDX-License-Identifier: Apache-2.0
"""Import paths of before still lead somewhere, with a warning, and take nothing away."""

from __future__ import annotations

import importlib
import sys

import pytest

import nccl_m2n
from nccl_m2n._moved import MOVED, MOVED_NAMES


@pytest.fixture(params=sorted(MOVED))
def old(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delitem(sys.modules, request.param, raising=False)
    return request.param


def test_an_old_module_has_the_names_of_the_new_one(old: str) -> None:
    new = importlib.import_module(MOVED[old])
    with pytest.warns(DeprecationWarning, match=f"{old} is now {MOVED[old]}"):
        found = importlib.import_module(old)
    public = [name for name in vars(new) if not name.startswith("_")]
    assert public
    assert all(getattr(found, name) is getattr(new, name) for name in public)


@pytest.mark.parametrize("name", ["simulate", "reshard"])
def test_a_function_is_still_called_by_the_name_that_a_module_had(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = getattr(nccl_m2n, name)
    monkeypatch.setattr(nccl_m2n, name, function)  # importing the module binds it here
    monkeypatch.delitem(sys.modules, f"nccl_m2n.{name}", raising=False)
    with pytest.warns(DeprecationWarning, match="is now"):
        importlib.import_module(f"nccl_m2n.{name}")
    with pytest.raises(TypeError, match=rf"{name}\(\) missing"):
        getattr(nccl_m2n, name)()


@pytest.mark.parametrize("name", sorted(MOVED_NAMES))
def test_an_old_name_is_the_new_one(name: str) -> None:
    from nccl_m2n import refit

    with pytest.warns(DeprecationWarning, match=f"nccl_m2n.refit.{name} is now"):
        assert getattr(refit, name) is getattr(importlib.import_module(MOVED_NAMES[name]), name)


def test_what_never_was_is_not_there() -> None:
    from nccl_m2n import refit

    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        refit.Nonsense  # noqa: B018
    with pytest.raises(ModuleNotFoundError, match=r"nccl_m2n\.nonsense"):
        importlib.import_module("nccl_m2n.nonsense")
