# SPDX-License-Identifier: Apache-2.0
"""MPI transports whose ranks come late, go, mix their calls up, or are simply dropped."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.execution import mpi
from tests.transport import mpi_cases, mpi_gone

pytest.importorskip("mpi4py")
pytestmark = pytest.mark.timeout(100)
RANKS = mpi_cases.RANKS


@pytest.fixture(scope="module")
def outcome() -> dict[str, list[str]]:
    done = mpi.run(RANKS, "-m", "tests.transport.mpi_cases", limit=80)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    wrong = {name: wrong for name, wrong, _ in lines}
    wrong["the end"] = (
        [] if done.returncode == 0 else [f"ended with {done.returncode}: {done.stderr[-3000:]}"]
    )
    return wrong


@pytest.mark.parametrize("name", [*mpi_cases.CASES, "the end"])
def test_case(outcome: dict[str, list[str]], name: str) -> None:
    assert name in outcome, outcome["the end"]
    assert outcome[name] == [], "\n".join(outcome[name])


MISSING = f"rank {RANKS - 1} did not come"
TOLD = {
    "start": f"start: TransferTimeout: rank {{}}: not all {RANKS} ranks came to make an MpiTransport within 2 s",
    "bind": f"(exchange 0) took longer than 2 s: {MISSING}",
    "run": f"wait: TransferTimeout: rank {{}}: messages from or to rank {RANKS - 1} were still under way",
    "close": f"close: TransferTimeout: the end (exchange 1) took longer than 2 s: {MISSING}",
}


@pytest.mark.parametrize("where", TOLD)
def test_a_peer_that_is_stopped(tmp_path: Path, where: str) -> None:
    """The others raise in time and say who it is, go on without it, and leave."""
    began = time.monotonic()
    done = mpi.run(RANKS, "-m", "tests.transport.mpi_gone", where, "stop", str(tmp_path), limit=40)
    assert time.monotonic() - began < 35, done.stderr
    assert done.returncode != 0, done.stderr
    assert "Timeout (0:00:01)!" in done.stderr  # it says where it ended, for MPI's own end does not come
    told = [path.read_text(encoding="utf-8").split("\n") for path in sorted(tmp_path.glob("*.txt"))]
    assert len(told) == RANKS - 1, done.stderr
    for rank, (seconds, said, after) in enumerate(told):
        assert float(seconds) < mpi_gone.LIMIT + mpi_cases.SLACK
        assert TOLD[where].format(rank) in said
        assert after == f"went on with {RANKS - 1}"


@pytest.mark.parametrize(("where", "how"), [("bind", "kill"), ("wait", "kill"), ("run", "exit")])
def test_a_peer_that_dies(tmp_path: Path, where: str, how: str) -> None:
    """The launcher ends the others, wherever they are; nobody hangs."""
    done = mpi.run(RANKS, "-m", "tests.transport.mpi_gone", where, how, str(tmp_path), limit=40)
    assert done.returncode != 0
    assert "killed after" not in done.stderr


@pytest.mark.parametrize("made", ["m2n.MpiTransport(MPI.COMM_WORLD)", "as_transport(MPI.COMM_WORLD, ())"])
@pytest.mark.parametrize(
    ("before", "state"),
    [
        ("mpi4py.rc.initialize = False; from mpi4py import MPI", "not initialized"),
        ("from mpi4py import MPI; MPI.Finalize()", "finalized"),
    ],
)
def test_mpi_that_cannot_be_called_is_refused(made: str, before: str, state: str) -> None:
    """MPI itself would end the process."""
    script = (
        f"import mpi4py; {before}; import nccl_m2n as m2n; from nccl_m2n.interop import as_transport; {made}"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50)
    assert f"TransportError: expected MPI in order, got it {state}" in run.stderr
