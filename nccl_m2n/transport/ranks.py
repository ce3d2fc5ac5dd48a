# SPDX-License-Identifier: Apache-2.0
"""Ranks that exchange host bytes, under MPI, over TCP, over NCCL or within one process, and what breaks them."""

from __future__ import annotations

import itertools
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from nccl_m2n.errors import DisagreementError, M2nError, TransferTimeout, TransportError
from nccl_m2n.text import short_ranks

DEFAULT_TIMEOUT = 120.0  # seconds
ROLL_CALL_SECONDS = 0.5
_IDENTITY = struct.Struct("<QH")  # the exchange's number, bytes of its purpose
_LONGEST_PURPOSE = 200  # characters


class Ranks(ABC):
    """A fixed set of ranks that exchange host bytes, and the one place that decides whether they still may.

    What goes wrong half way breaks them for good: a peer may have gone on, or may still be about to touch
    memory of this process. `broken` then says why, and every later call raises at once.

    A kind of ranks says how the bytes of an exchange get around (`_gather`), and what is to be done when they
    are given up (`_give_up`) or part in good order (`_part`).
    """

    size: int
    local_ranks: tuple[int, ...]  # those that this process drives
    timeout: float = DEFAULT_TIMEOUT  # seconds that an exchange may take where its caller sets no limit
    broken: str | None = None  # why nothing can be sent any more, after "a transport that "
    exchanges = 0  # how many there were; equal on all ranks

    def exchange(
        self, messages: Mapping[int, bytes], purpose: str = "an exchange", limit: float | None = None
    ) -> list[bytes]:
        """All ranks' bytes, in rank order. Collective, and limited in time.

        Every exchange has an identity, its purpose and its number. Ranks that come to different ones all
        raise the same error, and may go on: each of them has ended its exchange.

        Args:
            messages: What each local rank contributes.
            purpose: What for, in a few words; equal on all ranks.
            limit: Seconds that it may take; None for `timeout`.

        Raises:
            DisagreementError: If ranks came for different purposes.
            TransferTimeout: If not all came in time.
            TransportError: If the exchange failed, or something earlier did.
        """
        self.require_usable()
        head = _identity(self.exchanges, purpose)
        self.exchanges += 1
        seconds = self.timeout if limit is None else max(0.0, limit)
        what = f"{purpose} (exchange {self.exchanges - 1})"
        try:
            sealed = {rank: head + payload for rank, payload in messages.items()}
            every = self._gather(sealed, time.monotonic() + seconds)
            came = [_identified(each) for each in every]
        except BaseException as error:  # an interrupt, too, leaves the others half way
            reason = str(error) if isinstance(error, M2nError) else f"{type(error).__name__}: {error}"
            late = isinstance(error, TransferTimeout)
            told = f"{what} took longer than {seconds:g} s: {reason}" if late else f"{what} failed: {reason}"
            self.abort(f"broke: {told}")
            if not isinstance(error, Exception):
                raise
            raise (TransferTimeout if late else TransportError)(told) from error
        if len({identity for identity, _ in came}) > 1:
            raise alike(_meeting_of_different([identity for identity, _ in came]), self)
        return [payload for _, payload in came]

    def require_usable(self) -> None:
        """Raise if these ranks cannot send any more.

        Raises:
            TransportError: With the reason.
        """
        if self.broken is not None:
            raise TransportError(f"expected a transport in order, got one that {self.broken}; form a new one")

    def abort(self, reason: str = "was aborted") -> None:
        """Give up: nothing further can be sent, and what is under way ends where it can be ended.

        Not collective. Peers hear of it where the ranks have a way to tell them, or else by their time limit.

        Args:
            reason: Why, as it goes on after "a transport that ".
        """
        if self.broken is None:
            self.broken = reason
            self._give_up()

    def close(self) -> None:
        """Part in good order, and release what was made. Collective where that takes all ranks. May be called twice."""
        if self.broken is None:
            self.broken = "was closed"
            self._part()

    def who_is_missing(self) -> str:
        """Who does not wait for anything, for the error of one that waited in vain. Breaks these ranks.

        Everyone who waited in vain asks at about the same time; who does not is missing.
        """
        try:
            self.exchange(dict.fromkeys(self.local_ranks, b""), "a roll call", ROLL_CALL_SECONDS)
        except M2nError as error:
            self.abort(f"broke: {error}")
            return str(error)
        return not_there(())

    @abstractmethod
    def _gather(self, messages: Mapping[int, bytes], deadline: float) -> list[bytes]:
        """All ranks' bytes, in rank order.

        Args:
            messages: What each local rank contributes.
            deadline: On the clock of `time.monotonic`.

        Raises:
            TransferTimeout: At the deadline, naming those who did not come, as far as that can be known.
        """

    def _give_up(self) -> None:  # noqa: B027 - most have nothing to end
        """End what is under way; the peers may be anywhere. Called once, instead of `_part`."""

    def _part(self) -> None:  # noqa: B027 - most have nothing to release
        """Release what was made. Called once."""


def alike(error: M2nError, ranks: Ranks) -> M2nError:
    """An error that all ranks are about to raise, marked as such."""
    error.raised_by = ranks.size
    return error


def not_there(ranks: Sequence[int]) -> str:
    """Which ranks did not come, for the error of those who waited for them."""
    if not ranks:
        return "all ranks are there, but not done"
    return f"rank {short_ranks(ranks)} did not come, and may be gone or late"


class Held:
    """Memory that a peer, or a library, may still touch, held until it is known that nobody does.

    Not by its transport, which may be dropped while a late peer still writes.
    """

    _things: ClassVar[dict[int, object]] = {}
    _numbers: ClassVar[itertools.count[int]] = itertools.count()

    @classmethod
    def hold(cls, thing: object) -> int:
        """Hold on to something, from before it is handed over; gives a number to `release` it by."""
        number = next(cls._numbers)
        cls._things[number] = thing
        return number

    @classmethod
    def release(cls, number: int) -> None:
        """Let go of something that is known to be untouched from now on."""
        del cls._things[number]


def _identity(number: int, purpose: str) -> bytes:
    text = purpose[:_LONGEST_PURPOSE].encode()
    return _IDENTITY.pack(number, len(text)) + text


def _identified(message: bytes) -> tuple[tuple[int, str], bytes]:
    """Number and purpose, and what was sent for it."""
    number, length = _IDENTITY.unpack_from(message)
    start = _IDENTITY.size + length
    return (number, message[_IDENTITY.size : start].decode()), message[start:]


def _meeting_of_different(identities: Sequence[tuple[int, str]]) -> DisagreementError:
    callers: dict[tuple[int, str], list[int]] = {}
    for rank, identity in enumerate(identities):
        callers.setdefault(identity, []).append(rank)
    numbers = len({number for number, _ in callers}) > 1
    said = "; ".join(
        f"rank {short_ranks(ranks)}: {purpose}" + (f" (exchange {number})" if numbers else "")
        for (number, purpose), ranks in callers.items()
    )
    return DisagreementError(f"expected all ranks to come to the same call, in the same order, got {said}")
