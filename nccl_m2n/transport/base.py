# SPDX-License-Identifier: Apache-2.0
"""What a transport is: how bytes get from rank to rank. It knows nothing of layouts and plans."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol

from nccl_m2n.transport.ranks import Ranks

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
    """The messages of one round, ready to be started as often as wanted."""

    @abstractmethod
    def start(self, stream: Any = None) -> None:
        """Start all messages. On a device this enqueues one group and returns at once."""

    @abstractmethod
    def finish(self, deadline: float | None = None) -> None:
        """Wait for all messages, and move on with what else is under way; on a device the stream does that."""

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
    """A fixed set of ranks that can send bytes to each other."""

    memory: Literal["host", "device"]

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
