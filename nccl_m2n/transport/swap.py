# SPDX-License-Identifier: Apache-2.0
"""Sealed messages that go and come at once, over links of which none can hold up another."""

from __future__ import annotations

import contextlib
import selectors
import time
from collections.abc import Iterable

from nccl_m2n.transport.gathering import Link
from nccl_m2n.transport.handshake import Letter

_READ_BYTES = 1 << 18


class Swap:
    """One letter at most to each rank, and one message of each that is waited for.

    Args:
        links: To whom.
    """

    def __init__(self, links: Iterable[Link]) -> None:
        self._links = {link.peer: link for link in links}
        self._unsent: dict[int, list[memoryview]] = {}
        self._wanted: set[int] = set()
        self.came: dict[int, tuple[int, bytes]] = {}  # kind and payload, by rank
        self.gone: dict[int, str] = {}  # why a link cannot be used any more, by rank

    def send(self, rank: int, letter: Letter) -> None:
        """Have a letter sent."""
        head = self._links[rank].session.head(letter)
        self._unsent[rank] = [memoryview(head), memoryview(letter.payload)]

    def want(self, ranks: Iterable[int]) -> None:
        """Have a message of each of these ranks read."""
        self._wanted = set(ranks)
        for rank in ranks:
            self._take(self._links[rank])  # it may have come along with the one before

    @property
    def unsent(self) -> set[int]:
        """The ranks to which not all is sent."""
        return set(self._unsent)

    @property
    def unfinished(self) -> list[int]:
        """The ranks to which not all is sent, or of which not all has come."""
        return sorted({*self._unsent, *self._wanted} - set(self.gone))

    def work(self, deadline: float) -> None:
        """Go on until all is sent and has come, somebody has left, or the time is over; one look at least."""
        with contextlib.closing(selectors.DefaultSelector()) as selector:
            for rank in self.unfinished:
                selector.register(self._links[rank].socket, self._events(rank), self._links[rank])
            while self.unfinished and not self.gone:
                left = deadline - time.monotonic()
                for key, events in selector.select(max(0.0, left)):
                    self._step(key.data, events)
                    rest = 0 if key.data.peer in self.gone else self._events(key.data.peer)
                    if not rest:
                        selector.unregister(key.fileobj)
                    elif rest != key.events:
                        selector.modify(key.fileobj, rest, key.data)
                if left <= 0:
                    return

    def _events(self, rank: int) -> int:
        reads = selectors.EVENT_READ if rank in self._wanted else 0
        return reads | (selectors.EVENT_WRITE if rank in self._unsent else 0)

    def _step(self, link: Link, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                data = link.socket.recv(_READ_BYTES)
                if not data:
                    raise ConnectionError("the connection was closed")
                link.session.feed(data)
                self._take(link)
            if events & selectors.EVENT_WRITE:
                self._send(link)
        except BlockingIOError:
            return
        except OSError as error:
            self.gone[link.peer] = str(error)

    def _send(self, link: Link) -> None:
        views = self._unsent[link.peer]
        count = link.socket.sendmsg(views)
        while views and count >= len(views[0]):
            count -= len(views.pop(0))
        if views:
            views[0] = views[0][count:]
        else:
            del self._unsent[link.peer]

    def _take(self, link: Link) -> None:
        message = link.session.take()
        if message is not None:
            self.came[link.peer] = message
            self._wanted.discard(link.peer)
