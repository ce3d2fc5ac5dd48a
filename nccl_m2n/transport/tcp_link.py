# SPDX-License-Identifier: Apache-2.0
"""Messages of two ranks over one connection: both ways at once, straight between their arrays, without blocking.

A message is sent only when its receiver has said that it is ready for it. So nothing comes that there is no place
for, no message waits behind one that nobody has asked for, and however large they are, none is stored on the way.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Sequence
from typing import NoReturn, Protocol

from nccl_m2n.transport.handshake import ProtocolError

READY, DATA, CLOSED, BROKEN = (
    1,
    2,
    3,
    4,
)  # so many may be sent; a message; the last word, all being well or not
_HEAD = struct.Struct("<BxxxIQ")  # kind, space, how many or how long
_LAST_WORD = 1000  # bytes at most
_READ_AHEAD = 1 << 16  # bytes; heads and small messages are read many at once, and copied from here
_AT_ONCE = 64  # parts of messages given to the system in one call
_CALLS = 8  # to the system, before the other links have their turn


class Batch(Protocol):
    """Some messages; counts those that are still under way."""

    left: int


class TcpLink:
    """One rank's end of a connection.

    Args:
        peer: The rank at the other end.
        connection: A connected socket that does not block.
    """

    def __init__(self, peer: int, connection: socket.socket) -> None:
        self.peer, self.socket = peer, connection
        self.gone = ""  # why nothing more can be sent or received
        self.orderly = False  # whether it was closed when all was well
        # By space, while there is something to tell: messages that the peer is ready for, and is not.
        self._allowed: dict[int, int] = {}
        self._held_back: dict[int, deque[tuple[memoryview, Batch]]] = {}
        self._words: list[bytes] = []  # heads without a message, which overtake messages
        self._outgoing: deque[tuple[bytes, memoryview, Batch]] = deque()
        self._now: deque[tuple[memoryview, Batch | None]] = deque()  # given to the system next, in order
        self._expected: dict[int, deque[tuple[memoryview, Batch]]] = {}  # by space
        self._into: memoryview | None = None  # where the rest of the current message goes
        self._into_batch: Batch | None = None
        self._last_word: bytearray | None = None
        self._ahead = memoryview(bytearray(_READ_AHEAD))
        self._held = 0  # bytes in it

    @property
    def has_unsent(self) -> bool:
        """Whether something can be sent now."""
        return bool(self._now or self._words or self._outgoing)

    @property
    def under_way(self) -> bool:
        """Whether messages have been asked for that are not done."""
        return bool(
            self._into_batch
            or self._outgoing
            or any(batch is not None for _, batch in self._now)
            or self._expected
            or self._held_back
        )

    def post(
        self, space: int, sends: Sequence[memoryview], receives: Sequence[memoryview], batch: Batch
    ) -> None:
        """Ask for messages; within a space and a direction they match in the order of posting at both ends."""
        if receives:
            self._expected.setdefault(space, deque()).extend((view, batch) for view in receives)
            self._words.append(_HEAD.pack(READY, space, len(receives)))
        if sends:
            self._held_back.setdefault(space, deque()).extend((view, batch) for view in sends)
            self._release(space)

    def _release(self, space: int) -> None:
        """Let go of messages that the peer is ready for."""
        waiting, allowed = self._held_back.pop(space, deque()), self._allowed.pop(space, 0)
        while waiting and allowed:
            allowed -= 1
            view, batch = waiting.popleft()
            self._outgoing.append((_HEAD.pack(DATA, space, len(view)), view, batch))
        if waiting:
            self._held_back[space] = waiting
        if allowed:
            self._allowed[space] = allowed

    # Sending

    def write(self) -> None:
        """Send as much as the system takes.

        Raises:
            OSError: If the connection is broken.
        """
        for _ in range(_CALLS):
            if not self._now:
                self._choose()
            if not self._now:
                return
            try:
                count = self.socket.sendmsg([view for view, _ in self._now])
            except BlockingIOError:
                return
            while self._now and count >= len(self._now[0][0]):
                view, batch = self._now.popleft()
                count -= len(view)
                if batch is not None:
                    batch.left -= 1
            if count:
                view, batch = self._now[0]
                self._now[0] = view[count:], batch

    def _choose(self) -> None:
        if self._words:
            self._now.append((memoryview(b"".join(self._words)), None))
            self._words.clear()
        while self._outgoing and len(self._now) < _AT_ONCE:
            head, view, batch = self._outgoing.popleft()
            self._now.append((memoryview(head), None))
            self._now.append((view, batch))

    def leave(self, kind: int, reason: str) -> None:
        """Say a last word, as far as the peer can hear it now, and close the connection. May be called twice."""
        said = reason.encode()[:_LAST_WORD]
        try:
            if not self.gone and not self._now:
                self.socket.send(_HEAD.pack(kind, 0, len(said)) + said)
        except OSError:
            pass
        self.gone = self.gone or reason
        self.socket.close()

    # Receiving

    def read(self) -> None:
        """Receive what has come.

        Raises:
            ProtocolError: If the peer has left, or what came is no message that is expected.
            OSError: If the connection is broken.
        """
        for _ in range(_CALLS):
            into = memoryview(b"") if self._into is None else self._into
            free = self._ahead[self._held :]
            try:
                count = (
                    self.socket.recvmsg_into([into, free])[0] if len(into) else self.socket.recv_into(free)
                )
            except BlockingIOError:
                return
            if count == 0:
                raise ProtocolError(f"rank {self.peer} has left: the connection was closed")
            full = len(into) + len(free)
            directly = min(count, len(into))
            if directly:
                self._fill(directly)
            self._held += count - directly
            self._parse()
            if count < full:
                return

    def _fill(self, count: int) -> None:
        """So many bytes of the current message have come."""
        if self._into is None:
            return
        self._into = self._into[count:]
        if len(self._into) == 0:
            self._into = None
            if self._last_word is not None:
                self._hear(self._last_word.decode(errors="replace"))
            if self._into_batch is not None:
                self._into_batch.left -= 1
                self._into_batch = None

    def _hear(self, said: str) -> NoReturn:
        if self.orderly:
            raise ProtocolError(f"rank {self.peer} has left: {said}")
        if " gave up: " in said:  # passed on by a rank that heard it from another one
            raise ProtocolError(said.removeprefix("its transport broke: "))
        raise ProtocolError(f"rank {self.peer} gave up: {said}")

    def _parse(self) -> None:
        at = 0
        while True:
            if self._into is not None:
                count = min(len(self._into), self._held - at)
                if count == 0 and len(self._into):
                    break
                self._into[:count] = self._ahead[at : at + count]
                at += count
                self._fill(count)
            elif self._held - at >= _HEAD.size:
                self._begin(*_HEAD.unpack_from(self._ahead, at))
                at += _HEAD.size
            else:
                break
        rest = self._held - at
        if at and rest:
            self._ahead[:rest] = bytes(self._ahead[at : self._held])
        self._held = rest

    def _begin(self, kind: int, space: int, count: int) -> None:
        if kind == READY:
            self._allowed[space] = self._allowed.get(space, 0) + count
            self._release(space)
        elif kind in (CLOSED, BROKEN) and 0 < count <= _LAST_WORD:
            self.orderly = kind == CLOSED
            self._last_word = bytearray(count)
            self._into = memoryview(self._last_word)
        elif kind == DATA and space in self._expected:
            self._into, self._into_batch = self._expected[space].popleft()
            if not self._expected[space]:
                del self._expected[space]
            if len(self._into) != count:
                raise ProtocolError(
                    f"rank {self.peer} sent {count} bytes where {len(self._into)} were expected"
                )
        else:
            raise ProtocolError(f"rank {self.peer} sent what nobody asked for")
