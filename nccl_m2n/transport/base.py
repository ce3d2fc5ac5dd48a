# SPDX-License-Identifier: Apache-2.0
"""What a transport is: how bytes get from rank to rank. It knows nothing of layouts and plans."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from nccl_m2n.errors import TransportError
from nccl_m2n.transport.ranks import Ranks
from nccl_m2n.typing import Communicator

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, slots=True)
class Message:
    """One point-to-point call of one round."""

    rank: int  # the local rank that sends or receives
    peer: int
    send: bool
    buffer: Any  # host transports: a NumPy array of bytes; device transports: a `DeviceBuffer`


@dataclass(frozen=True, slots=True)
class DeviceBuffer:
    """Bytes in device memory."""

    pointer: int
    nbytes: int


class PreparedRound(ABC):
    """The messages of one round, ready to be started as often as wanted.

    The contract of a round, for those who write a transport and those who run rounds:

    - Rounds are started and finished by one thread, the one that runs the binding, in the same order on all ranks
      as far as they belong to one binding. Bindings may interleave: on a host transport their messages are kept
      apart, on a device they are started in the same order on all ranks.
    - Between `start` and the return of `finish` the buffers are the transport's. No send may be changed and no receive
      be read then; the copies of other rounds go on.
    - `start` does not wait for a peer, whatever the peer does; it may copy. On a device it enqueues and returns.
    - `finish` waits, on a host transport, until all messages of this process have gone and come, or raises
      `TransferTimeout` at the deadline. Sends and receives of a pair of ranks match in the order of the messages.
    - `done` looks without waiting. While `finish` waits it calls `Transport.move_on`, so that runs that nobody waits
      for on this rank go on: a peer may wait for them first.
    - After any error the transport is given up by whoever ran the round (`Transport.abort`), and no round of it is
      started again. What may still touch the buffers then keeps them alive.
    """

    @abstractmethod
    def start(self, stream: Mapping[int, int] | None = None) -> None:
        """Start all messages. On a device this enqueues one group and returns at once.

        Args:
            stream: On a device, for each local rank the stream handle that its messages go on.
        """

    @abstractmethod
    def finish(self, deadline: float | None = None) -> None:
        """Wait for all messages, and move on with what else is under way; on a device the stream does that.

        Args:
            deadline: On the clock of `time.monotonic`; None for none.
        """

    def done(self) -> bool:
        """Whether all messages are over, found out without waiting."""
        return True

    def close(self) -> None:  # noqa: B027 - most have nothing to release
        """Release what was prepared, once no message is under way."""


class Run(Protocol):
    """A started run whose rounds follow each other only as somebody moves it on."""

    def move_on(self) -> None:
        """Go as far as it goes without waiting."""


class Transport(Ranks):
    """A fixed set of ranks that can send bytes to each other.

    Besides what all `Ranks` do, a kind of transport says how messages are prepared, and registers itself in
    `nccl_m2n.transport.KINDS`: it is then found by the commands, too.
    """

    kind: ClassVar[str] = ""  # what commands call it
    carrier: ClassVar[str] = ""  # and how it reads for people
    launchers: ClassVar[tuple[str, ...]] = ()  # under which it can be made: "mpi", "torchrun", "none"
    memory: Literal["host", "device"] = "host"
    devices: Mapping[int, int] = MappingProxyType({})  # the GPU of each local rank; none in host memory

    @classmethod
    def join(cls, launcher: str, world: Communicator, ranks: int | None) -> Transport:
        """The transport of a whole job. Collective.

        Args:
            launcher: Which one of `launchers` started the processes.
            world: The communicator of all processes, from mpi4py, under ``"mpi"``; else None.
            ranks: How many ranks are wanted of a transport within one process; None for as many as there can be.
        """
        raise TransportError(f"expected a transport that joins a whole job, got {cls.__name__}")

    @cached_property
    def under_way(self) -> list[Run]:
        """Started runs that nobody waits for yet: whoever waits moves them on, for a peer may wait for them first."""
        return []

    def move_on(self) -> None:
        """Move on with all that is under way."""
        for run in tuple(self.under_way):
            run.move_on()

    @abstractmethod
    def prepare(self, messages: Sequence[Message]) -> PreparedRound:
        """Make one round ready: the messages of all local ranks, in posting order."""

    @abstractmethod
    def domain_labels(self) -> dict[int, str]:
        """For each local rank a text that is equal on exactly the ranks that NVLink joins with it."""

    def connect(self, pairs: Iterable[tuple[int, int, bool]]) -> None:
        """Set up connections to peers now, within the time limit, rather than in the first round. Collective.

        Args:
            pairs: For each connection the local rank, the peer, and whether the local rank sends.
        """

    def discover_domains(self) -> list[list[int]]:
        """The ranks of each NVLink domain. Collective."""
        labels = {rank: label.encode() for rank, label in self.domain_labels().items()}
        domains: dict[bytes, list[int]] = {}
        for rank, label in enumerate(self.exchange(labels, "discover the domains")):
            domains.setdefault(label, []).append(rank)
        return list(domains.values())

    def keep(self, thing: object) -> None:
        """Hold on to memory that an unfinished run may still touch, for as long as this transport lives."""
        self.__dict__.setdefault("_kept", []).append(thing)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        else:  # peers may be anywhere: an orderly end, which takes all ranks, would hang
            self.abort(f"was left by {type(error).__name__}")


class HoldsGraph(Protocol):
    """What has captured CUDA graphs that hold on to communicators."""

    def release_graph(self) -> None:
        """Let go of them."""


class DeviceTransport(Transport):
    """A transport for device memory: what an executor for GPUs needs besides.

    Attributes:
        devices: The GPU of each local rank.
        graphs: Who holds captured graphs: they are asked to let go before communicators end.
    """

    memory: Literal["host", "device"] = "device"
    graphs: weakref.WeakSet[HoldsGraph]

    @abstractmethod
    def wait(self, done: Callable[[], bool], deadline: float | None, what: str) -> None:
        """Wait for work on the device, watching for failures meanwhile. Sleeps, never spins.

        Args:
            done: Whether the work is done; asked again and again.
            deadline: On the clock of `time.monotonic`; None waits for ever.
            what: The work, for the error.

        Raises:
            TransferTimeout: If the work is not done in time; it may still be waited for, or aborted.
            TransportError: If the transport failed.
        """

    @abstractmethod
    def gather(self, buffers: Mapping[int, tuple[int, int]], nbytes: int, streams: Mapping[int, int]) -> None:
        """Enqueue an all-gather of device memory. Collective.

        Args:
            buffers: For each local rank the address of its share, and of room for those of all ranks.
            nbytes: Bytes of one rank's share.
            streams: For each local rank the ``cudaStream_t`` that it goes on.
        """

    @abstractmethod
    def communicator(self, rank: int) -> Communicator:
        """The low-level handle of a local rank's communicator, for collectives of one's own."""
