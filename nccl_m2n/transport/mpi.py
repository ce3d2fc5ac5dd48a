# SPDX-License-Identifier: Apache-2.0
"""MPI: one rank a process, host memory, persistent requests."""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from nccl_m2n.checks import limit_seconds, shown
from nccl_m2n.errors import TransferTimeout, TransportError
from nccl_m2n.text import pip_install, short_ranks
from nccl_m2n.transport.base import Message, PreparedRound, Transport
from nccl_m2n.transport.deadline import poll
from nccl_m2n.transport.mpi_end import end_within
from nccl_m2n.transport.mpi_roll import RollCall
from nccl_m2n.transport.ranks import DEFAULT_TIMEOUT, Held, not_there
from nccl_m2n.typing import Communicator

if TYPE_CHECKING:
    from mpi4py import MPI

# Ranks may be more than cores, and one that spins keeps its peer waiting: after some tests of its requests,
# each of which offers the core to others, a rank sleeps in between. Messages move on only within the tests,
# so it never sleeps for long.
EAGER_POLLS = 50
SLEEPS = 20e-6, 100e-6  # seconds, the first and the longest


def require_mpi(comm: Communicator) -> None:
    """Refuse what is no communicator, and an MPI that cannot be called: the library would end the process.

    Raises:
        TransportError: If it is none, if mpi4py is missing, or if MPI was not initialized or is finalized.
    """
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise TransportError(
            f"expected mpi4py, got {error}; {pip_install('mpich')} brings it with an MPI library"
        ) from None
    if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
        raise TransportError(f"expected an mpi4py intracommunicator, got {shown(comm)}; pass MPI.COMM_WORLD")
    if MPI.Is_finalized() or not MPI.Is_initialized():
        state = "finalized" if MPI.Is_finalized() else "not initialized (mpi4py.rc.initialize was False)"
        raise TransportError(f"expected MPI in order, got it {state}; call MPI.Init() before, and once")


class MpiTransport(Transport):
    """The ranks of an MPI communicator, moving host memory.

    Collective over `comm`, which is duplicated, so that nothing here can match a message of the caller's. The
    duplicate is freed by `close`, or where the next transport is made once nobody has this one any more.

    Attributes:
        leave_limit: Seconds that a process, one of whose transports broke, gives MPI's orderly end at its exit:
            that waits for all processes, also for one that is stopped. Then it ends without. None waits for ever.

    Args:
        comm: An mpi4py intracommunicator, such as ``MPI.COMM_WORLD``.
        timeout: Seconds that making it, and each exchange, may take.

    Raises:
        TransferTimeout: If not all ranks make it in time.
        TransportError: If mpi4py is missing or `comm` is no communicator of it.
    """

    kind, carrier, launchers = "mpi", "MPI", ("mpi",)
    leave_limit: float | None = 10.0
    _dropped: ClassVar[list[MPI.Intracomm]] = []  # of transports that nobody has any more
    _unfinished: ClassVar[list[tuple[MPI.Intracomm, MPI.Request]]] = []  # made too late for their transports

    def __init__(self, comm: Communicator = None, timeout: float = DEFAULT_TIMEOUT) -> None:
        require_mpi(comm)
        from mpi4py import MPI

        self._mpi, self.timeout = MPI, limit_seconds(timeout, endless=False)
        with self._wrapped("duplicating the communicator"):
            self.size, self.local_ranks = comm.Get_size(), (comm.Get_rank(),)
            self._comm = self._duplicate(comm)
            self._comm.Set_errhandler(MPI.ERRORS_RETURN)
            tags = self._comm.Get_attr(MPI.TAG_UB)
        self._tags = int(tags) if tags else 32767  # MPI promises as many; the last one is the roll call's
        self._spaces: weakref.WeakValueDictionary[int, _Space] = weakref.WeakValueDictionary()
        self._drop = weakref.finalize(self, self._dropped.append, self._comm)
        self._drop.atexit = False

    @classmethod
    def join(cls, launcher: str, world: Communicator, ranks: int | None) -> MpiTransport:
        """One rank a process."""
        return cls(world)

    def _duplicate(self, comm: MPI.Intracomm) -> MPI.Intracomm:
        """A communicator of one's own. MPI has some 2,000 for a process, shared with what was dropped."""
        self._free_dropped()
        try:
            made, request = comm.Idup()
        except self._mpi.Exception:
            gc.collect()  # transports in reference cycles, on all ranks alike: MPI refuses all of them together
            self._free_dropped()
            made, request = comm.Idup()
        if not poll(request.Test, time.monotonic() + self.timeout):
            self._unfinished.append((made, request))
            end_within(self.leave_limit)
            raise TransferTimeout(
                f"rank {self.rank}: not all {self.size} ranks came to make an MpiTransport within "
                f"{self.timeout:g} s: one of them is gone or late"
            )
        return made

    def _free_dropped(self) -> None:
        late = [(made, request) for made, request in self._unfinished if not request.Test()]
        self._dropped.extend(made for made, request in self._unfinished if (made, request) not in late)
        self._unfinished[:] = late
        while self._dropped:
            self._dropped.pop().Free()

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.local_ranks[0]

    def _gather(self, messages: Mapping[int, bytes], deadline: float) -> list[bytes]:
        mine = np.frombuffer(messages[self.rank], np.uint8)
        sizes = np.zeros(self.size, np.int64)
        own = np.array([len(mine)], np.int64)
        self._complete(self._comm.Iallgather(own, sizes), (own, sizes), deadline)
        every = np.empty(int(sizes.sum()), np.uint8)
        starts = np.cumsum(sizes) - sizes
        layout = (every, (sizes.tolist(), starts.tolist()), self._mpi.BYTE)
        self._complete(
            self._comm.Iallgatherv([mine, self._mpi.BYTE], layout), (mine, every, layout), deadline
        )
        return [every[a : a + n].tobytes() for a, n in zip(starts.tolist(), sizes.tolist(), strict=True)]

    def _complete(self, request: MPI.Request, buffers: object, deadline: float) -> None:
        """End a collective step; its buffers are MPI's until it has ended, and may be for ever."""
        held = Held.hold((request, buffers))
        roll = self._poll([request], range(self.size), deadline)
        if roll is not None:
            raise TransferTimeout(not_there(roll.missing()))
        Held.release(held)

    def prepare(self, messages: Sequence[Message]) -> PreparedRound:
        """Make a persistent request of each message; those of one pair match in posting order.

        What is prepared between two exchanges has a message space of its own, so the rounds of bindings never
        mix, in whatever order ranks wait for them.
        """
        self.require_usable()
        space = self._space()
        requests = []
        with self._wrapped("preparing messages"):
            for m in messages:
                make = self._comm.Send_init if m.send else self._comm.Recv_init
                requests.append(make([m.buffer, len(m.buffer), self._mpi.BYTE], m.peer, space.tag))
        return _MpiRound(self, space, requests, [m.peer for m in messages])

    def _space(self) -> _Space:
        """The message space that belongs to the number of exchanges, which is equal on all ranks."""
        tag = self.exchanges % self._tags
        space = self._spaces.get(tag)
        if space is None or (space.number != self.exchanges and not space.open_rounds):
            space = self._spaces[tag] = _Space(tag, self.exchanges)
        if space.number != self.exchanges:
            raise TransportError(
                f"expected at most {self._tags} exchanges from the oldest binding that is still open to the "
                "newest, got more: their messages could not be kept apart; close it and bind it again"
            )
        return space

    def domain_labels(self) -> dict[int, str]:
        """Ranks of one host are one domain."""
        return {self.rank: self._mpi.Get_processor_name()}

    def _poll(
        self, requests: Sequence[MPI.Request], peers: Sequence[int], deadline: float | None
    ) -> RollCall | None:
        """Test until all requests are done, sleeping more and more in between; at the limit, who was there."""
        testall: Callable[[Sequence[MPI.Request]], bool] = self._mpi.Request.Testall
        polls, (pause, longest), roll = 0, SLEEPS, None
        while not testall(requests):
            self.move_on()
            late = deadline is not None and time.monotonic() > deadline
            polls += 1
            if polls < EAGER_POLLS and not late:
                os.sched_yield()
                continue
            if late or pause == longest:  # it takes long: others may want to know who is there
                roll = roll or RollCall(self._comm, self._tags, self.exchanges, peers, deadline)
                roll.look()
            if late:
                return roll
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return None

    @contextmanager
    def _wrapped(self, what: str) -> Iterator[None]:
        """MPI's own errors come out as this package's."""
        try:
            yield
        except self._mpi.Exception as error:
            raise TransportError(f"{what} over MPI failed: {error}") from error

    def _give_up(self) -> None:
        self._drop.detach()  # what is under way may still arrive
        Held.hold(self)  # and all memory that is kept with it: MPI cannot be told to let go
        end_within(self.leave_limit)

    def _part(self) -> None:
        if self._drop.detach() and not self._mpi.Is_finalized():
            self._comm.Free()

    def __repr__(self) -> str:
        return f"<MpiTransport: rank {self.rank} of {self.size}>"


class _Space:
    """A message space; it lives as long as rounds that were prepared in it."""

    def __init__(self, tag: int, number: int) -> None:
        self.tag, self.number, self.open_rounds = tag, number, 0


class _MpiRound(PreparedRound):
    def __init__(
        self, transport: MpiTransport, space: _Space, requests: list[MPI.Prequest], peers: Sequence[int]
    ) -> None:
        self._transport, self._requests, self._peers = transport, requests, peers
        self._space = space
        space.open_rounds += 1
        self._held: int | None = None
        self._open = True

    def start(self, stream: object = None) -> None:
        transport = self._transport
        transport.require_usable()
        if self._requests:
            self._held = Held.hold(self)  # the buffers are MPI's now, whatever becomes of this object's owner
            try:
                transport._mpi.Prequest.Startall(self._requests)
            except transport._mpi.Exception as error:
                raise TransportError(f"starting messages over MPI failed: {error}") from error

    def finish(self, deadline: float | None = None) -> None:
        if self._held is None:
            return
        transport = self._transport
        try:
            roll = transport._poll(self._requests, self._peers, deadline)
            if roll is not None:
                raise TransferTimeout(self._late(roll))
        except transport._mpi.Exception as error:
            raise TransportError(
                f"rank {transport.rank}: messages from or to rank {short_ranks(self._in_trouble())} failed: {error}"
            ) from error
        self._release()

    def done(self) -> bool:
        """Whether all messages are over."""
        if self._held is None:
            return True
        with self._transport._wrapped("moving messages"):
            over: bool = self._transport._mpi.Request.Testall(self._requests)
        if over:
            self._release()
        return over

    def _release(self) -> None:
        if self._held is not None:
            Held.release(self._held)
        self._held = None

    def _late(self, roll: RollCall) -> str:
        peers = self._in_trouble()
        return (
            f"rank {self._transport.rank}: messages from or to rank {short_ranks(peers)} were still under way at "
            f"the time limit: {not_there(roll.missing(peers))}"
        )

    def _in_trouble(self) -> list[int]:
        """Peers whose messages failed, or else those whose messages are under way."""
        failed, under_way = set[int](), set[int]()
        for request, peer in zip(self._requests, self._peers, strict=True):
            try:
                if not request.Test():
                    under_way.add(peer)
            except self._transport._mpi.Exception:
                failed.add(peer)
        return sorted(failed or under_way)

    def close(self) -> None:
        """Free the requests, which must not be under way."""
        self._space.open_rounds -= self._open
        self._open = False
        for request in self._requests:
            request.Free()
        self._requests = []
