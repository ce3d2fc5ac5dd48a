# SPDX-License-Identifier: Apache-2.0
"""A short run of the fuzzer, in one process and under MPI."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.execution.mpi import ROOT
from tests.fuzz.script import KINDS, main


@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_in_one_process(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--kind", kind, "--seconds", "1.5", "--seed", "20", "--ranks", "6"]) == 0, (
        capsys.readouterr().out
    )
    assert re.match(r"[1-9]\d* problems in [1-9]\d* plans", capsys.readouterr().out)


@pytest.mark.parametrize("transport", ["mpi", "socket"])
def test_a_process_a_rank(transport: str) -> None:
    command = [sys.executable, "-m", "tests.fuzz", "--processes", "3", "--transport", transport]
    command += ["--seconds", "4", "--seed", "30", "--timeout", "20"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.match(r"[1-9]\d* problems", done.stdout), done.stdout + done.stderr


def test_jobs_share_the_work_and_their_counts_add_up() -> None:
    command = [sys.executable, "-m", "tests.fuzz", "--jobs", "2", "--count", "40", "--ranks", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[0]) >= 40
