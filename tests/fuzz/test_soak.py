# SPDX-License-Identifier: Apache-2.0
"""A short soak, and that a leak would be seen."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.execution.mpi import ROOT
from tests.fuzz.soak import soak


def test_nothing_grows() -> None:
    """In a process of its own: this one holds so much that every collection takes long."""
    command = [sys.executable, "-m", "tests.fuzz.soak", "--scale", "0.002", "--ranks", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("flat") == 6, done.stdout


def test_memory_that_is_kept_is_seen() -> None:
    kept: list[bytearray] = []
    assert any("traced" in what for what in soak(lambda number: kept.append(bytearray(8192)), 20, 20))


def test_a_descriptor_that_is_kept_is_seen() -> None:
    kept: list[int] = []
    grown = soak(lambda number: kept.append(os.dup(0)), 20, 20)
    for one in kept:
        os.close(one)
    assert any("descriptors" in what for what in grown)
