# SPDX-License-Identifier: Apache-2.0
"""Ranks that are killed, stopped, that raise or leave, at every stage: what becomes of the others?

    python -m tests.fuzz.kills --transport mpi --count 100

Every survivor must raise an error of this package within its time limit (at the last stage it may also end in good
order), refuse further use of the transport at once, form a new one with the other survivors, move a tensor over it,
and leave. No process may be left over. Over NCCL all ranks are on one GPU: start CUDA's MPS daemon before.

Under MPI the survivors form a `SocketTransport`: an MPI library does not promise that anything works among the
survivors of a dead rank. MPICH's `mpiexec` ends everybody when one process dies, or ends itself where it is told not
to; so each rank runs in the shelter of a shell that stays.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.execution.mpi import ROOT, mpiexec
from tests.fuzz.kill_worker import LIMIT, START
from tests.fuzz.launch import free_port, rank_environment

STAGES = ("start-up", "bind", "run", "wait", "exchange", "version", "close")
FAULTS = ("kill", "stop", "exception", "exit")
SLACK = 8.0  # seconds: many processes on few cores
LEAVE = 15.0  # seconds that survivors are given to end
LONGEST = 60.0  # seconds of a case
SHELTER = '"$@"; for i in $(seq 900); do [ -e "$0/over" ] && break; sleep 0.1; done; exit 0'


def cases(transport: str, count: int) -> list[tuple[str, str, int]]:
    """Stage, fault and victim. On one GPU a kill in the middle of a kernel takes the other ranks along."""
    made = []
    for victim in itertools.count():
        for stage, fault in itertools.product(STAGES, FAULTS):
            if transport == "nccl" and fault == "kill" and stage in ("run", "wait"):
                continue
            made.append((stage, fault, victim))
            if len(made) == count:
                return made
    return made


class Case:
    """One job with one victim.

    Args:
        transport: ``"mpi"``, ``"socket"`` or ``"nccl"``.
        ranks: How many.
        stage: Where the victim goes wrong.
        fault: How.
        victim: Which rank.
    """

    def __init__(self, transport: str, ranks: int, stage: str, fault: str, victim: int) -> None:
        self.transport, self.ranks, self.stage, self.fault = transport, ranks, stage, fault
        self.victim = victim % ranks
        self.mark = uuid.uuid4().hex
        self.name = f"{stage}, {fault}, rank {self.victim}"

    def run(self) -> list[str]:
        """What went wrong."""
        with tempfile.TemporaryDirectory() as folder:
            jobs = self._start(folder)
            wanted = [Path(folder, f"{r}.json") for r in range(self.ranks) if r != self.victim]
            deadline = time.monotonic() + LONGEST + 2 * START.get(self.transport, 0)
            while time.monotonic() < deadline and not all(path.exists() for path in wanted):
                time.sleep(0.05)
            reports = {int(p.stem): json.loads(p.read_text()) for p in wanted if p.exists()}
            left = self._left_over(time.monotonic() + LEAVE)
            Path(folder, "over").touch()
            out = [self._end(job) for job in jobs]
        wrong = self._judge(reports)
        if left:
            wrong.append(f"{len(left)} processes of survivors were left over")
        return [*wrong, *(text[-1500:] for text in out if wrong and text)]

    def _start(self, folder: str) -> list[subprocess.Popen[str]]:
        port = free_port()
        own = {"M2N_KILLS_MARK": self.mark, "M2N_KILLS_PORT": str(port), "OMP_NUM_THREADS": "1"}
        worker = [sys.executable, "-m", "tests.fuzz.kill_worker", self.transport, self.stage, self.fault,
                  str(self.victim), folder]  # fmt: skip
        if self.transport == "mpi":
            return [_spawn([mpiexec(), "-n", str(self.ranks), "sh", "-c", SHELTER, folder, *worker], own)]
        rank_own = [own | rank_environment(self.transport, r, self.ranks, port) for r in range(self.ranks)]
        return [_spawn(worker, environment) for environment in rank_own]

    def _left_over(self, deadline: float) -> list[int]:
        """Processes of survivors that do not end; the victim, who may be stopped, is ended here."""
        while True:
            alive = [pid for pid in _marked(self.mark) if not _stopped(pid)]
            workers = [pid for pid in alive if b"python" in _read(pid, "cmdline").split(b"\0")[0]]
            if not workers or time.monotonic() > deadline:
                return workers
            time.sleep(0.05)

    def _end(self, job: subprocess.Popen[str]) -> str:
        for pid in _marked(self.mark):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        return job.communicate()[0]

    def _judge(self, reports: dict[int, dict[str, Any]]) -> list[str]:
        wrong = []
        for rank in range(self.ranks):
            if rank == self.victim:
                continue
            said = reports.get(rank)
            if said is None:
                wrong.append(f"rank {rank} never came to its end")
                continue
            if not said["told"] and self.stage != "close":
                wrong.append(f"rank {rank} was told nothing")
            limit = START.get(self.transport, LIMIT) if self.stage == "start-up" else LIMIT
            if said["seconds"] > limit + SLACK:
                wrong.append(f"rank {rank} was told after {said['seconds']:.1f} s: {said['told']}")
            if said["refused"] is False and not (self.fault == "exception" and self.stage == "version"):
                wrong.append(f"rank {rank}: the next call was not refused at once, after {said['told']}")
            if said["again"] != "done":
                wrong.append(f"rank {rank} did not form anew: {said['again']}")
        return wrong


def _spawn(command: Sequence[str], own: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, cwd=ROOT, env=os.environ | own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip


def _marked(mark: str) -> list[int]:
    """Processes that were started for a case."""
    wanted = f"M2N_KILLS_MARK={mark}".encode()
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in pids if wanted in _read(pid, "environ").split(b"\0")]


def _read(pid: int, what: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{what}").read_bytes()
    except OSError:  # gone, or another's
        return b""


def _stopped(pid: int) -> bool:
    state = _read(pid, "stat").rpartition(b")")[2].split()
    return not state or state[0] in (b"T", b"Z")


def main(given: Sequence[str]) -> int:
    """Case after case; the exit status is 1 if anything went wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.kills", description=__doc__.split("\n")[0])
    parser.add_argument("--transport", choices=("mpi", "socket", "nccl"), default="mpi")
    parser.add_argument("--count", type=int, default=28)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--stage", choices=STAGES, action="append")
    parser.add_argument("--fault", choices=FAULTS, action="append")
    options = parser.parse_args(given)
    failures, began, done = 0, time.monotonic(), 0
    for stage, fault, victim in cases(options.transport, options.count):
        if stage not in (options.stage or STAGES) or fault not in (options.fault or FAULTS):
            continue
        case, started = Case(options.transport, options.ranks, stage, fault, victim), time.monotonic()
        wrong = case.run()
        done, failures = done + 1, failures + bool(wrong)
        print(
            f"{'WRONG' if wrong else 'right'}: {case.name} ({time.monotonic() - started:.1f} s)", flush=True
        )
        for what in wrong:
            print("  " + what.replace("\n", "\n  "), flush=True)
    print(f"{done} cases over {options.transport}, {failures} wrong, {time.monotonic() - began:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
