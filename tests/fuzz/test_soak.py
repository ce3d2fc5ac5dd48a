# SPDX-License-Identifier: Apache-2.0
"""A short soak, and that a leak would be seen."""

from __future__ import annotations

import os

import pytest

from tests.fuzz.soak import main, soak


def test_nothing_grows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--scale", "0.002", "--ranks", "2"]) == 0, capsys.readouterr().out


def test_memory_that_is_kept_is_seen() -> None:
    kept: list[bytearray] = []
    assert any("traced" in what for what in soak(lambda number: kept.append(bytearray(8192)), 20, 20))


def test_a_descriptor_that_is_kept_is_seen() -> None:
    kept: list[int] = []
    grown = soak(lambda number: kept.append(os.dup(0)), 20, 20)
    for one in kept:
        os.close(one)
    assert any("descriptors" in what for what in grown)
