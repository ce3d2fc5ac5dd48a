# SPDX-License-Identifier: Apache-2.0
"""How two ranks prove to each other that they know a key, and the sealed messages that they then exchange.

No sockets and no clock: bytes go in and bytes come out, so that any stream can be tried, however wrong it is.

1. The *host*, to whom the *guest* connected, speaks first, so that whatever else listens on a port never sees
   more of us than a connection: a fresh number.
2. The guest claims a rank: it adds a fresh number of its own and the HMAC of both numbers and both ranks.
3. The host, if that is right, answers with an HMAC that only the key's owner can make, and says whether the
   rank's seat is free.

From then on every message is sealed with a key of this one conversation, by its direction and its number:
one that was changed, repeated, left out or brought in from elsewhere is an error.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MAGIC = b"m2n v1\r\n"
WELCOME, TAKEN = 1, 2  # verdicts
MESSAGE, FAILED, TIMED_OUT = 0, 1, 2  # kinds of sealed messages; the last two carry the reason
LARGEST_PAYLOAD = 1 << 28  # bytes of one rank in one exchange

_HELLO = struct.Struct("<8s32s")  # magic, the host's number
_CLAIM = struct.Struct("<II32s32s")  # guest's rank, host's rank, the guest's number, proof
_VERDICT = struct.Struct("<B32s")  # verdict, proof
_HEAD = struct.Struct("<BQ32s")  # kind, bytes, seal
_COUNT = struct.Struct("<Q")


class ProtocolError(ConnectionError):
    """What came cannot come from a rank of this job."""


def job_key(secret: str, *facts: object) -> bytes:
    """The key of those who know a secret and mean the same job."""
    return hmac.digest(hashlib.sha256(secret.encode()).digest(), repr(facts).encode(), "sha256")


def derived_key(key: bytes, salt: bytes, purpose: str) -> bytes:
    """Another key, for another purpose, of those who know the first."""
    return hmac.digest(key, b"derived" + salt + purpose.encode(), "sha256")


@dataclass(frozen=True, slots=True)
class Letter:
    """What is to be sealed; its digest is made once, for however many peers it goes to."""

    kind: int
    payload: bytes
    digest: bytes

    @classmethod
    def of(cls, payload: bytes, kind: int = MESSAGE) -> Letter:
        """A letter with that payload."""
        return cls(kind, payload, hashlib.sha256(payload).digest())


class Session:
    """Sealed messages both ways, after the handshake.

    Args:
        key: Known to these two ends alone.
        is_host: Which end this is.
    """

    def __init__(self, key: bytes, *, is_host: bool) -> None:
        self._key, self._labels = key, (b"guest", b"host") if is_host else (b"host", b"guest")
        self._numbers = [0, 0]  # of messages that came, and that went
        self._came = bytearray()
        self.limit = LARGEST_PAYLOAD  # bytes of a message that may come

    def head(self, letter: Letter) -> bytes:
        """What goes on the wire before the letter's payload."""
        size = len(letter.payload)
        return _HEAD.pack(letter.kind, size, self._seal(1, letter.kind, size, letter.digest))

    def feed(self, data: bytes | bytearray) -> None:
        """Take in what arrived. No more is kept than has come, whatever length was announced."""
        self._came += data

    def take(self) -> tuple[int, bytes] | None:
        """The next whole message, its kind and payload, if all of it has come.

        Raises:
            ProtocolError: If it is longer than allowed, or not the peer's next message.
        """
        if len(self._came) < _HEAD.size:
            return None
        kind, size, seal = _HEAD.unpack_from(self._came)
        if size > self.limit:
            raise ProtocolError(f"a message of {size} bytes was announced, {self.limit} are allowed")
        if len(self._came) < _HEAD.size + size:
            return None
        payload = bytes(self._came[_HEAD.size : _HEAD.size + size])
        del self._came[: _HEAD.size + size]
        expected = self._seal(0, kind, size, hashlib.sha256(payload).digest())
        if not hmac.compare_digest(seal, expected):
            raise ProtocolError("a message does not bear the peer's seal")
        return kind, payload

    def _seal(self, direction: int, kind: int, size: int, digest: bytes) -> bytes:
        number = self._numbers[direction]
        self._numbers[direction] += 1
        text = self._labels[direction] + struct.pack("<QBQ", number, kind, size) + digest
        return hmac.digest(self._key, text, "sha256")


class Host:
    """The end that was connected to.

    Args:
        key: The ranks' common key.
        rank: The rank of this end.
        seat: What to answer to a rank that proved itself: `WELCOME`, `TAKEN`, or None for a rank that is none.
    """

    def __init__(self, key: bytes, rank: int, seat: Callable[[int], int | None]) -> None:
        self._key, self._rank, self._seat = key, rank, seat
        self._number, self._came = os.urandom(32), bytearray()
        self.peer: int | None = None
        self.verdict: int | None = None
        self.session: Session | None = None

    def greeting(self) -> bytes:
        """What to send before anything has come."""
        return _HELLO.pack(MAGIC, self._number)

    def feed(self, data: bytes) -> bytes:
        """Take in what arrived; gives what to answer.

        Raises:
            ProtocolError: If no rank of this job says that.
        """
        self._came += data
        if self.verdict is not None or len(self._came) > _CLAIM.size:
            raise ProtocolError("more was said than a claim")
        if len(self._came) < _CLAIM.size:
            return b""
        guest, host, number, proof = _CLAIM.unpack(self._came)
        facts = _facts(self._number, number, guest, host)
        if host != self._rank or not hmac.compare_digest(proof, _proof(self._key, b"guest", facts)):
            raise ProtocolError("not a rank of this job")
        verdict = self._seat(guest)
        if verdict is None:
            raise ProtocolError(f"rank {guest} is not expected here")
        self.peer, self.verdict = guest, verdict
        if verdict == WELCOME:
            self.session = Session(_proof(self._key, b"session", facts), is_host=True)
        return _VERDICT.pack(verdict, _proof(self._key, b"host" + bytes([verdict]), facts))


class Guest:
    """The end that connected.

    Args:
        key: The ranks' common key.
        rank: The rank of this end.
        host: The rank that is looked for.
    """

    def __init__(self, key: bytes, rank: int, host: int) -> None:
        self._key, self._rank, self.peer = key, rank, host
        self._number, self._came, self._facts = os.urandom(32), bytearray(), b""
        self.verdict: int | None = None
        self.session: Session | None = None

    def greeting(self) -> bytes:
        """What to send before anything has come."""
        return b""

    def feed(self, data: bytes) -> bytes:
        """Take in what arrived; gives what to answer. What follows the handshake goes to the session.

        Raises:
            ProtocolError: If the rank that is looked for does not say that.
        """
        if self.session is not None:
            self.session.feed(data)
            return b""
        self._came += data
        return self._judge() if self._facts else self._claim()

    def _claim(self) -> bytes:
        if self._came[: len(MAGIC)] != MAGIC[: len(self._came)] or len(self._came) > _HELLO.size:
            raise ProtocolError("not a rank of this job")
        if len(self._came) < _HELLO.size:
            return b""
        _, number = _HELLO.unpack(self._came)
        self._came.clear()
        self._facts = _facts(number, self._number, self._rank, self.peer)
        return _CLAIM.pack(self._rank, self.peer, self._number, _proof(self._key, b"guest", self._facts))

    def _judge(self) -> bytes:
        if len(self._came) < _VERDICT.size:
            return b""
        verdict, proof = _VERDICT.unpack_from(self._came)
        expected = _proof(self._key, b"host" + bytes([verdict]), self._facts)
        if verdict not in (WELCOME, TAKEN) or not hmac.compare_digest(proof, expected):
            raise ProtocolError(f"not rank {self.peer} of this job")
        self.verdict = verdict
        if verdict == WELCOME:
            self.session = Session(_proof(self._key, b"session", self._facts), is_host=False)
            self.session.feed(self._came[_VERDICT.size :])
        return b""


def join_payloads(payloads: Sequence[bytes]) -> bytes:
    """All ranks' payloads as one."""
    return b"".join(_COUNT.pack(len(one)) + one for one in payloads)


def split_payloads(joined: bytes, count: int) -> list[bytes]:
    """The opposite.

    Raises:
        ProtocolError: If it is not exactly that many payloads.
    """
    payloads: list[bytes] = []
    at = 0
    for _ in range(count):
        if len(joined) - at < _COUNT.size:
            raise ProtocolError(f"expected {count} payloads, got {len(payloads)}")
        (size,) = _COUNT.unpack_from(joined, at)
        at += _COUNT.size
        if size > len(joined) - at:
            raise ProtocolError(f"expected a payload of {size} bytes, got {len(joined) - at}")
        payloads.append(joined[at : at + size])
        at += size
    if at != len(joined):
        raise ProtocolError(f"expected {count} payloads, got {len(joined) - at} bytes more")
    return payloads


def _facts(host_number: bytes, guest_number: bytes, guest: int, host: int) -> bytes:
    return host_number + guest_number + struct.pack("<II", guest, host)


def _proof(key: bytes, who: bytes, facts: bytes) -> bytes:
    return hmac.digest(key, who + b" " + facts, "sha256")
