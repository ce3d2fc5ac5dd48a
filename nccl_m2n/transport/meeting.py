# SPDX-License-Identifier: Apache-2.0
"""The processes of one job: how they were started, and how they agree before anything moves."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar

from nccl_m2n.errors import CommandError, M2nError, TransportError, VerificationError
from nccl_m2n.text import pip_install, short_ranks
from nccl_m2n.transport.agree import raise_together
from nccl_m2n.transport.ranks import Ranks

Result = TypeVar("Result")

# How launchers of MPI processes tell a process its rank and the number of ranks.
_MPI_VARIABLES = (
    ("PMI_RANK", "PMI_SIZE"),  # MPICH, Intel MPI, Cray
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),  # after the others: srun sets it beside PMI's own
)
_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class RefusedError(Exception):
    """What was asked cannot be done; every rank raises it, with the same text.

    Args:
        text: One line.
        status: What the process ends with.
    """

    def __init__(self, text: str, status: int = 2) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Place:
    """What the launcher says of this process, before anything is imported or connected."""

    launcher: str  # "mpi", "torchrun" or "none"
    rank: int = 0
    size: int = 1

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Place:
        """Read the launcher's variables."""
        torchrun = all(name in environment for name in _TORCHRUN_VARIABLES)
        # torchrun under srun: its own variables are the ones that name this process; srun may set PMI's too.
        inner = torchrun and "TORCHELASTIC_RUN_ID" in environment
        for rank, size in _MPI_VARIABLES:
            outer = inner or (torchrun and rank == "SLURM_PROCID")
            if rank in environment and size in environment and not outer:
                return cls("mpi", _number(environment[rank]), _number(environment[size], 1))
        if torchrun:
            return cls("torchrun", _number(environment["RANK"]), _number(environment["WORLD_SIZE"], 1))
        return cls("none")


class Meeting(Ranks):
    """All processes of the job, able to exchange bytes from the start; alone, one process.

    Args:
        place: What the launcher says; None for this process alone.
        lacking: Why this process is alone although a launcher started several.

    Raises:
        TransportError: If the processes cannot meet.
    """

    def __init__(self, place: Place | None = None, lacking: str = "") -> None:
        self.place, self.lacking = place or Place("none"), lacking
        self.rank, self.size = 0, 1
        self._mpi: Any = None
        self._exchange: Callable[[bytes, float], list[bytes]] = lambda payload, _: [payload]
        if self.place.launcher == "mpi":
            self._meet_by_mpi()
        elif self.place.launcher == "torchrun":
            from nccl_m2n.transport.rendezvous import Rendezvous

            self._link = link = Rendezvous.from_environment()
            self.rank, self.size = link.rank, link.size
            self._exchange = lambda payload, deadline: link._gather({link.rank: payload}, deadline)
        self.local_ranks = (self.rank,)

    def _meet_by_mpi(self) -> None:
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise TransportError(
                f"{self.place.size} processes were started by an MPI launcher, but mpi4py does not work here "
                f"({error}); {pip_install('mpich')} brings it with an MPI library"
            ) from None
        from nccl_m2n.transport.mpi import MpiTransport

        self._mpi = MPI
        self.transport = MpiTransport(MPI.COMM_WORLD)
        self.rank, self.size = self.transport.rank, self.transport.size
        if self.size != self.place.size:
            library = MPI.Get_library_version().splitlines()[0].strip("\0 ")
            raise TransportError(
                f"the launcher started {self.place.size} processes, mpi4py's MPI library ({library}) sees "
                f"{self.size}: it is another MPI's launcher; use the library's own mpiexec, most often in "
                f"{os.path.dirname(sys.executable)}"
            )
        self._exchange = lambda payload, deadline: self.transport._gather({self.rank: payload}, deadline)

    def _gather(self, messages: Mapping[int, bytes], deadline: float) -> list[bytes]:
        return self._exchange(messages[self.rank], deadline)

    def _give_up(self) -> None:
        if self.place.launcher == "torchrun":
            self._link.abort(self.broken or "")

    def share(self, payload: bytes) -> list[bytes]:
        """The same, for this process's own bytes. Collective."""
        return self.exchange({self.rank: payload})

    @property
    def world(self) -> Any:
        """mpi4py's communicator of all processes."""
        return None if self._mpi is None else self._mpi.COMM_WORLD

    def leave(self) -> None:
        """Part in good order. Collective where the processes met by MPI."""
        if self._mpi is not None:
            self.transport.close()
        elif self.place.launcher == "torchrun":
            self._link.close()

    def end_all(self, status: int) -> NoReturn:
        """End this process, and with it all others: they may be waiting for it."""
        sys.stdout.flush()
        sys.stderr.flush()
        if self._mpi is not None:
            self._mpi.COMM_WORLD.Abort(status)
        os._exit(status)  # torchrun ends the others; threads that wait for a peer must not hold this one up


def together(
    ranks: Any, work: Callable[[], Result], facts: Callable[[Result], Mapping[str, Any]] | None = None
) -> Result:
    """Do a piece of work on every process; if it fails on one, all stop with the same words. Collective.

    Args:
        ranks: Joins the processes: a `Meeting` or a transport.
        work: What to do; it may not wait for other processes.
        facts: What of the result must be equal everywhere.

    Raises:
        RefusedError: If it failed somewhere, or the facts differ.
    """
    failures: dict[int, Exception] = {}
    result: Any = _attempt(work, failures, ranks.local_ranks[0])
    _agree(ranks, failures, facts(result) if facts and not failures else {})
    return result


def for_each(ranks: Any, work: Callable[[int], Result]) -> dict[int, Result]:
    """`together` for each local rank, one after the other."""
    failures: dict[int, Exception] = {}
    made: dict[int, Any] = {rank: _attempt(partial(work, rank), failures, rank) for rank in ranks.local_ranks}
    _agree(ranks, failures, {})
    return made


def _attempt(work: Callable[[], Any], failures: dict[int, Exception], rank: int) -> Any:
    try:
        return work()
    except (M2nError, OSError, MemoryError) as error:  # any other is a fault of this program: it ends all
        # A transport's error, raised by `_agree`, then always means that the ranks cannot talk.
        plain = isinstance(error, M2nError) and not isinstance(error, TransportError)
        failures[rank] = error if plain else CommandError(_said(error))
        return None


def _agree(ranks: Any, failures: Mapping[int, Exception], facts: Mapping[str, Any]) -> None:
    try:
        raise_together(ranks, failures, facts)
    except TransportError:
        raise
    except M2nError as error:
        raise _refusal(error, ranks.size) from error


def refused_together(ranks: Any, work: Callable[[], Result]) -> Result:
    """Call what is collective itself and raises the same error on all ranks.

    Raises:
        RefusedError: In place of that error.
    """
    try:
        return work()
    except TransportError:
        raise
    except M2nError as error:
        raise _refusal(error, ranks.size) from error


def report_fault(error: BaseException, command: str) -> None:
    """Print an error that only this rank may know of."""
    if isinstance(error, M2nError):
        print(f"{command}: error: {one_line(error)}", file=sys.stderr)
    else:
        traceback.print_exception(error)


def _refusal(error: M2nError, ranks: int) -> RefusedError:
    """The refusal that an error stands for; which ranks it is of matters only where it is not of all."""
    text = one_line(error).removeprefix(f"rank {short_ranks(range(ranks))}: ")
    return RefusedError(text, 1 if isinstance(error, VerificationError) else 2)


def one_line(error: Exception) -> str:
    """An error's text without line breaks."""
    return "; ".join(str(error).splitlines())


def _said(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"cannot use {error.filename}: {error.strerror}"
    return f"not enough memory: {error}" if isinstance(error, MemoryError) else str(error)


def _number(text: str, otherwise: int = 0) -> int:
    return int(text) if text.isdecimal() else otherwise
