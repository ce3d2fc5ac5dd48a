# SPDX-License-Identifier: Apache-2.0
"""MPI: one rank a process, host memory, persistent requests."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nccl_m2n.errors import TransferTimeout, TransportError
from nccl_m2n.text import pip_install
from nccl_m2n.transport.base import Message, PreparedRound, Transport
from nccl_m2n.transport.ranks import DEFAULT_TIMEOUT, Held

if TYPE_CHECKING:
    from mpi4py import MPI

# Ranks may be more than cores, and one that spins keeps its peer waiting: after some tests of its requests,
# each of which offers the core to others, a rank sleeps in between. Messages move on only within the tests,
# so it never sleeps for long.
EAGER_POLLS = 50
SLEEPS = 20e-6, 100e-6  # seconds, the first and the longest


class MpiTransport(Transport):
    """The ranks of an MPI communicator, moving host memory.

    Collective over `comm`, which is duplicated, so that nothing here can match a message of the caller's.

    Args:
        comm: An mpi4py intracommunicator, such as ``MPI.COMM_WORLD``.
        timeout: Seconds that an exchange may take.

    Raises:
        TransportError: If mpi4py is missing or `comm` is no communicator of it.
    """

    memory = "host"

    def __init__(self, comm: Any, timeout: float = DEFAULT_TIMEOUT) -> None:
        try:
            from mpi4py import MPI
        except ImportError as error:
            raise TransportError(
                f"expected mpi4py, got {error}; {pip_install('mpich')} brings it with an MPI library"
            ) from None
        if not isinstance(comm, MPI.Intracomm):
            raise TransportError(f"expected an mpi4py intracommunicator, got {comm!r}; pass MPI.COMM_WORLD")
        self._mpi, self.timeout = MPI, timeout
        self._comm: MPI.Intracomm = comm.Dup()
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.size = self._comm.Get_size()
        self.local_ranks = (self._comm.Get_rank(),)

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.local_ranks[0]

    def _gather(self, messages: Mapping[int, bytes], deadline: float) -> list[bytes]:
        mine = np.frombuffer(messages[self.rank], np.uint8)
        sizes = np.zeros(self.size, np.int64)
        own = np.array([len(mine)], np.int64)
        self._hold_until_done(self._comm.Iallgather(own, sizes), (own, sizes), deadline)
        every = np.empty(int(sizes.sum()), np.uint8)
        starts = np.cumsum(sizes) - sizes
        layout = (every, (sizes.tolist(), starts.tolist()), self._mpi.BYTE)
        request = self._comm.Iallgatherv([mine, self._mpi.BYTE], layout)
        self._hold_until_done(request, (mine, every, layout), deadline)
        return [every[a : a + n].tobytes() for a, n in zip(starts.tolist(), sizes.tolist(), strict=True)]

    def _hold_until_done(self, request: Any, buffers: object, deadline: float) -> None:
        held = Held.hold((request, buffers))
        self._wait([request], deadline)
        Held.release(held)

    def prepare(self, messages: Sequence[Message]) -> PreparedRound:
        """Make a persistent request of each message; those of one pair match in posting order."""
        self.require_usable()
        requests = []
        for m in messages:
            make = self._comm.Send_init if m.send else self._comm.Recv_init
            requests.append(make([m.buffer, len(m.buffer), self._mpi.BYTE], m.peer))
        return _MpiRound(self, requests)

    def domain_labels(self) -> dict[int, str]:
        """Ranks of one host are one domain."""
        return {self.rank: self._mpi.Get_processor_name()}

    def _wait(self, requests: Sequence[Any], deadline: float | None) -> None:
        """Test until all requests are done, sleeping more and more in between."""
        testall: Callable[[Sequence[Any]], bool] = self._mpi.Request.Testall
        polls, (pause, longest) = 0, SLEEPS
        while not testall(requests):
            if deadline is not None and time.monotonic() > deadline:
                raise TransferTimeout(
                    f"rank {self.rank}: messages were still under way at the time limit; "
                    "a peer may be gone or late"
                )
            polls += 1
            if polls < EAGER_POLLS:
                os.sched_yield()
            else:
                time.sleep(pause)
                pause = min(2 * pause, longest)

    def _part(self) -> None:
        if not self._mpi.Is_finalized():
            self._comm.Free()

    def __repr__(self) -> str:
        return f"<MpiTransport: rank {self.rank} of {self.size}>"


class _MpiRound(PreparedRound):
    def __init__(self, transport: MpiTransport, requests: list[Any]) -> None:
        self._transport, self._requests = transport, requests
        self._held: int | None = None

    def start(self, stream: Any = None) -> None:
        self._transport.require_usable()
        if self._requests:
            self._held = Held.hold(self)
            self._transport._mpi.Prequest.Startall(self._requests)

    def finish(self, deadline: float | None = None) -> None:
        if self._held is not None:
            self._transport._wait(self._requests, deadline)
            Held.release(self._held)
            self._held = None

    def close(self) -> None:
        """Free the requests, which must not be under way."""
        for request in self._requests:
            request.Free()
        self._requests = []
