# SPDX-License-Identifier: Apache-2.0
"""The processes of one job: how they were started, and how they agree before anything moves."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import NoReturn

from nccl_m2n.errors import TransportError
from nccl_m2n.text import pip_install
from nccl_m2n.transport.ranks import Ranks
from nccl_m2n.typing import Communicator

# How launchers of MPI processes tell a process its rank and the number of ranks.
_MPI_VARIABLES = (
    ("PMI_RANK", "PMI_SIZE"),  # MPICH, Intel MPI, Cray
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),  # after the others: srun sets it beside PMI's own
)
_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


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
        self._mpi: ModuleType | None = None
        self._link: Ranks | None = None
        if self.place.launcher == "mpi":
            self._link = self._meet_by_mpi()
        elif self.place.launcher == "torchrun":
            from nccl_m2n.transport.rendezvous import Rendezvous

            self._link = Rendezvous.from_environment()
        self.size = 1 if self._link is None else self._link.size
        self.local_ranks = (0,) if self._link is None else self._link.local_ranks

    def _meet_by_mpi(self) -> Ranks:
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise TransportError(
                f"{self.place.size} processes were started by an MPI launcher, but mpi4py does not work here "
                f"({error}); {pip_install('mpich')} brings it with an MPI library"
            ) from None
        from nccl_m2n.transport.mpi import MpiTransport

        self._mpi = MPI
        link = MpiTransport(MPI.COMM_WORLD)
        if link.size != self.place.size:
            library = MPI.Get_library_version().splitlines()[0].strip("\0 ")
            raise TransportError(
                f"the launcher started {self.place.size} processes, mpi4py's MPI library ({library}) sees "
                f"{link.size}: it is another MPI's launcher; use the library's own mpiexec, most often in "
                f"{os.path.dirname(sys.executable)}"
            )
        return link

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.local_ranks[0]

    def _gather(self, messages: Mapping[int, bytes], deadline: float) -> list[bytes]:
        return list(messages.values()) if self._link is None else self._link._gather(messages, deadline)

    def _give_up(self) -> None:
        if self._link is not None:
            self._link.abort(self.broken or "was aborted")

    def _part(self) -> None:
        if self._link is not None:
            self._link.close()

    def share(self, payload: bytes, purpose: str) -> list[bytes]:
        """All processes' bytes, in rank order. Collective."""
        return self.exchange({self.rank: payload}, purpose)

    @property
    def world(self) -> Communicator:
        """mpi4py's communicator of all processes."""
        return None if self._mpi is None else self._mpi.COMM_WORLD

    def end_all(self, status: int) -> NoReturn:
        """End this process, and with it all others: they may be waiting for it."""
        sys.stdout.flush()
        sys.stderr.flush()
        if self._mpi is not None:
            self._mpi.COMM_WORLD.Abort(status)
        os._exit(status)  # torchrun ends the others; threads that wait for a peer must not hold this one up


def _number(text: str, otherwise: int = 0) -> int:
    return int(text) if text.isdecimal() else otherwise
