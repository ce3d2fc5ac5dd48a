# SPDX-License-Identifier: Apache-2.0
"""One rank of a job in which one rank, the victim, goes wrong at some stage; started by `tests.fuzz.kills`.

Every survivor writes to ``<folder>/<rank>.json`` what it was told and when, whether the transport then refused
further use at once, and whether the survivors formed a new one and moved a tensor over it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from nccl_m2n import Layout, M2nError, Mesh, MpiTransport, Parameter, Refit, Replicate, Shard, Transfer, plan
from nccl_m2n.execution.bound import Bound
from nccl_m2n.transport.base import Transport
from tests.fuzz.world import make_transport

LIMIT = 4.0  # seconds that everything may take, once there is a transport
START = {"nccl": 25.0}  # seconds that making one may take, where it is not `LIMIT`
MpiTransport.leave_limit = LIMIT
ROWS = 1 << 16  # of the tensor that is moved: long enough to be under way for a while


class Broken(Exception):
    """What a victim's own code raises."""


@dataclass
class Report:
    """What one survivor saw."""

    told: list[str] = field(default_factory=list)  # kind of error and text
    seconds: float | None = None  # from the fault to the error, or to the end of the stage
    refused: bool | None = None  # whether the next call raised at once
    again: str = "not tried"


class Job:
    """This process's part."""

    def __init__(self, kind: str, stage: str, fault: str, victim: int, folder: Path) -> None:
        self.kind, self.stage, self.fault, self.folder = kind, stage, fault, folder
        self.rank, self.size = _place(kind)
        self.victim = victim
        self.report = Report()

    def come_to(self, stage: str) -> None:
        """The victim goes wrong here, if this is its stage."""
        if stage != self.stage or self.rank != self.victim:
            return
        (self.folder / "fault").write_text(repr(time.time()))
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.fault == "exit":
            os._exit(3)
        raise Broken(stage)

    def run(self) -> None:
        """All stages, one after the other."""
        self.come_to("start-up")
        with make_transport(self.kind, self.size, START.get(self.kind, LIMIT)) as transport:
            self.transport, transport.timeout = transport, LIMIT
            mover = Mover(transport, list(range(self.size)), self.rank)
            mover.move(1, lambda: None, lambda: None)
            self.come_to("exchange")
            transport.exchange({self.rank: b"x"})
            self.come_to("bind")
            mover.bind()
            mover.move(2, lambda: self.come_to("run"), lambda: self.come_to("wait"))
            self.refit(transport)
            self.come_to("close")
            mover.close()

    def refit(self, transport: Transport) -> None:
        """One step with a version; a victim goes wrong while it loads what it was sent."""
        layout = Layout((8,), Mesh([0]), [Replicate()])
        source = [Parameter("w", layout, as_given(transport, np.arange(8.0)))] if self.rank == 0 else []

        def load(name: str, tensor: Any) -> None:
            self.come_to("version")

        with Refit(transport, source, [Parameter("w", None, None)], load=load) as refit:
            refit.run(version=1)
            refit.wait(LIMIT)

    def tell(self) -> None:
        """What this survivor has to say."""
        text = json.dumps(asdict(self.report))
        (self.folder / f"{self.rank}.part").write_text(text)
        (self.folder / f"{self.rank}.part").rename(self.folder / f"{self.rank}.json")

    def since_the_fault(self) -> float:
        """Seconds."""
        try:
            return time.time() - float((self.folder / "fault").read_text())
        except (OSError, ValueError):
            return 0.0

    def form_anew(self) -> None:
        """The survivors alone: another transport, and a tensor over it."""
        survivors = [rank for rank in range(self.size) if rank != self.victim]
        place = survivors.index(self.rank)
        with self._new_transport(survivors, place) as transport:
            Mover(transport, list(range(len(survivors))), place).move(3, lambda: None, lambda: None)

    def _new_transport(self, survivors: list[int], place: int) -> Transport:
        port = int(os.environ["M2N_KILLS_PORT"]) + 40
        os.environ.update(
            RANK=str(place), WORLD_SIZE=str(len(survivors)), MASTER_PORT=str(port), M2N_SECRET="anew",
            MASTER_ADDR="127.0.0.1",
        )  # fmt: skip
        return make_transport(
            "socket" if self.kind == "mpi" else self.kind, len(survivors), START.get(self.kind, 5 * LIMIT)
        )


class Mover:
    """A tensor that every rank has rows of and wants columns of."""

    def __init__(self, transport: Transport, ranks: list[int], rank: int) -> None:
        shape = (ROWS, len(ranks) * 2)
        sides = [Layout(shape, Mesh(ranks), [Shard(dim)]) for dim in (0, 1)]
        self.transport, self.rank, self.sides = transport, rank, sides
        self.plan = plan(Transfer(sides[0], sides[1], "int32", "w"), chunk_bytes=1 << 14)
        self.source = np.zeros(sides[0].local_shape(rank), "int32")
        self.destination = np.zeros(sides[1].local_shape(rank), "int32")
        self.bound: Bound | None = None

    def bind(self) -> Bound:
        """Once more where it is bound already."""
        self.close()
        self.given = [as_given(self.transport, a) for a in (self.source, self.destination)]
        self.bound = self.plan.bind(self.transport, {"w": self.given[0]}, {"w": self.given[1]})
        return self.bound

    def move(self, turn: int, before_run: Callable[[], None], before_wait: Callable[[], None]) -> None:
        """One run, compared."""
        bound = self.bound or self.bind()
        whole = np.arange(ROWS * self.sides[0].shape[1], dtype="int32").reshape(self.sides[0].shape) * turn
        self.source[...] = self.sides[0].slice_global(whole, self.rank)
        if self.given[0] is not self.source:
            self.given[0].set(self.source)
        before_run()
        bound.run()
        before_wait()
        bound.wait(LIMIT)
        got = self.destination if self.given[1] is self.destination else self.given[1].get()
        if not np.array_equal(got, self.sides[1].slice_global(whole, self.rank)):
            raise AssertionError(f"rank {self.rank}, turn {turn}: wrong bytes")

    def close(self) -> None:
        """Let go of the binding."""
        if self.bound is not None:
            self.bound.close()
            self.bound = None


def as_given(transport: Transport, array: Any) -> Any:
    """An array in the memory that a transport moves."""
    if transport.memory == "host":
        return array
    import cupy

    return cupy.asarray(array)


def _place(kind: str) -> tuple[int, int]:
    if kind == "mpi":
        from mpi4py import MPI

        return MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def main(kind: str, stage: str, fault: str, victim: str, folder: str) -> None:
    """The stages; then, for survivors, what comes after."""
    job = Job(kind, stage, fault, int(victim), Path(folder))
    try:
        job.run()
    except M2nError as error:
        job.report.told = [type(error).__name__, str(error)]
    except Broken:
        sys.exit(4)
    job.report.seconds = job.since_the_fault()
    if job.report.told and hasattr(job, "transport"):
        job.report.refused = _refuses(job)
    try:
        job.form_anew()
        job.report.again = "done"
    except Exception as error:
        job.report.again = f"{type(error).__name__}: {error}"
    job.tell()
    others = [rank for rank in range(job.size) if rank not in (job.rank, job.victim)]
    deadline = time.monotonic() + 40
    while time.monotonic() < deadline and not all((job.folder / f"{r}.json").exists() for r in others):
        time.sleep(0.05)  # a launcher may end everybody as soon as one process is gone
    if kind == "mpi" and not job.report.told:
        os._exit(
            0
        )  # nothing broke, so nothing but MPI's own end is left, and that waits for the dead for ever


def _refuses(job: Job) -> bool:
    began = time.monotonic()
    try:
        job.transport.exchange({job.rank: b"x"})
    except M2nError:
        return time.monotonic() - began < 1.0
    return False


if __name__ == "__main__":
    main(*sys.argv[1:])
