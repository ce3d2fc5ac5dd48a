# SPDX-License-Identifier: Apache-2.0
"""Links to other ranks: all that connect and all that are connected to, at once and within one time limit.

Whoever else knocks, or answers, has a few seconds and a few bytes to prove itself, while the ranks go on.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import selectors
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from nccl_m2n.errors import TransferTimeout, TransportError
from nccl_m2n.transport.deadline import run_within
from nccl_m2n.transport.handshake import TAKEN, WELCOME, Guest, Host, ProtocolError, Session

Address: TypeAlias = tuple[socket.AddressFamily, tuple[str | int, ...]]

PROVE_LIMIT = 5.0  # seconds for a stranger to become a rank
PAUSES = 0.02, 0.5  # seconds before an address is tried again: the first, the longest
STRANGERS = 128  # at once, and two for each rank that may come; the oldest has to go for a new one
_REFUSED = os.strerror(errno.ECONNREFUSED)
_HANDSHAKE_BYTES = 4096  # read at once; a handshake is shorter


@dataclass(frozen=True, slots=True)
class Link:
    """A connection to a rank that proved itself."""

    peer: int
    socket: socket.socket
    session: Session


@dataclass(slots=True)
class _Talk:
    """A handshake under way."""

    socket: socket.socket
    machine: Host | Guest
    expires: float
    place: _Place | None = None  # where this end connected to; None for one who came
    unsent: bytes = b""


@dataclass(slots=True)
class _Place:
    """Where a rank may be found."""

    rank: int
    address: Address
    next_try: float = 0.0
    pause: float = PAUSES[0]
    under_way: bool = False


class Gathering:
    """Makes links until all are there. Use once.

    Args:
        key: What the ranks know and strangers do not.
        rank: The rank of this process.
        listener: Where guests come in; None if none come.
        guests: The ranks that may come.
        hosts: The ranks to connect to, and the addresses where each may be.
    """

    def __init__(
        self,
        key: bytes,
        rank: int,
        *,
        listener: socket.socket | None = None,
        guests: Iterable[int] = (),
        hosts: Mapping[int, Sequence[Address]] | None = None,
    ) -> None:
        self._key, self._rank, self._guests, self._listener = key, rank, frozenset(guests), listener
        self._places = [_Place(host, address) for host, all_of in (hosts or {}).items() for address in all_of]
        self._wanted = self._guests | set(hosts or {})
        self._talks: dict[socket.socket, _Talk] = {}
        self._selector = selectors.DefaultSelector()
        self.links: dict[int, Link] = {}
        self.reason = ""  # the last one why a host could not be reached

    @property
    def missing(self) -> list[int]:
        """The ranks that have not come."""
        return sorted(self._wanted - set(self.links))

    def gather(self, deadline: float) -> dict[int, Link]:
        """Wait until all are there or the time is over; gives the links, by rank.

        The sockets do not block. Unless all are there, the caller has to close them.

        Raises:
            TransportError: If the system has no socket left.
        """
        if self._listener is not None:
            self._listener.setblocking(False)
            self._selector.register(
                self._listener, selectors.EVENT_READ, partial(self._accept, self._listener)
            )
        try:
            while self.missing and (now := time.monotonic()) < deadline:
                self._connect(now)
                for key, events in self._selector.select(self._until_next(now, deadline)):
                    key.data(events)
                self._expire(time.monotonic())
        except OSError as error:
            raise TransportError(
                f"rank {self._rank} can make no more connections: {error}; each rank takes one (ulimit -n)"
            ) from error
        finally:
            for talk in list(self._talks.values()):
                self._end(talk, "time is over")
            self._selector.close()
        return self.links

    def _until_next(self, now: float, deadline: float) -> float:
        times = [talk.expires for talk in self._talks.values()]
        times += [p.next_try for p in self._places if not p.under_way and p.rank not in self.links]
        return max(0.0, min([deadline, *times]) - now)

    def _connect(self, now: float) -> None:
        for place in self._places:
            if place.under_way or place.next_try > now or place.rank in self.links:
                continue
            family, address = place.address
            end = socket.socket(family, socket.SOCK_STREAM)
            end.setblocking(False)
            talk = _Talk(end, Guest(self._key, self._rank, place.rank), now + PROVE_LIMIT, place)
            place.under_way = True
            self._begin(talk, selectors.EVENT_WRITE)  # writable is connected
            code = end.connect_ex(address)
            if code not in (0, errno.EINPROGRESS):
                self._end(talk, os.strerror(code))

    def _accept(self, listener: socket.socket, events: int) -> None:
        strangers = [talk for talk in self._talks.values() if talk.place is None]
        if len(strangers) >= STRANGERS + 2 * len(self._guests):
            self._end(strangers[0], "too many strangers")
        try:
            end = listener.accept()[0]
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                return  # gone again
            if not strangers:
                raise
            self._end(strangers[0], "no descriptor left")
            return
        end.setblocking(False)
        machine = Host(self._key, self._rank, self._seat)
        talk = _Talk(end, machine, time.monotonic() + PROVE_LIMIT, unsent=machine.greeting())
        self._begin(talk, selectors.EVENT_READ | selectors.EVENT_WRITE)

    def _begin(self, talk: _Talk, events: int) -> None:
        self._talks[talk.socket] = talk
        self._selector.register(talk.socket, events, partial(self._advance, talk))

    def _seat(self, guest: int) -> int | None:
        if guest not in self._guests:
            return None
        # One that was told that it is welcome has its seat, though the answer may still be on its way.
        told = [talk.machine.peer for talk in self._talks.values() if talk.machine.session and not talk.place]
        return TAKEN if guest in self.links or guest in told else WELCOME

    def _advance(self, talk: _Talk, events: int) -> None:
        if talk.socket not in self._talks:
            return  # ended by another event of the same look
        try:
            if events & selectors.EVENT_READ:
                data = talk.socket.recv(_HANDSHAKE_BYTES)
                if not data:
                    raise ProtocolError("the connection was closed")
                talk.unsent += talk.machine.feed(data)
            elif talk.place is not None:
                _require_connected(talk.socket)
            if talk.unsent:
                talk.unsent = talk.unsent[talk.socket.send(talk.unsent) :]
        except BlockingIOError:
            return
        except OSError as error:
            self._end(talk, str(error))
            return
        self._settle(talk)

    def _settle(self, talk: _Talk) -> None:
        """Go on with a talk, or end it if all is said."""
        machine = talk.machine
        if machine.verdict is None or talk.unsent:
            writes = selectors.EVENT_WRITE if talk.unsent else 0
            self._selector.modify(talk.socket, selectors.EVENT_READ | writes, partial(self._advance, talk))
        elif machine.session is None or machine.peer is None:
            self._end(talk, f"another process is rank {self._rank} there")
        elif machine.peer in self.links:
            self._end(talk, "found elsewhere already")
        else:
            self._selector.unregister(talk.socket)
            del self._talks[talk.socket]
            talk.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link = self.links[machine.peer] = Link(machine.peer, talk.socket, machine.session)
            if talk.place is None:
                self._selector.register(link.socket, selectors.EVENT_READ, partial(self._watch, link))

    def _watch(self, link: Link, events: int) -> None:
        """A guest that left before all were there may come again; only then is its seat free."""
        try:
            left = not link.socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            left = True
        self._selector.unregister(link.socket)
        if left:
            link.socket.close()
            del self.links[link.peer]

    def _expire(self, now: float) -> None:
        for talk in [talk for talk in self._talks.values() if talk.expires <= now]:
            self._end(talk, "no answer")

    def _end(self, talk: _Talk, reason: str) -> None:
        del self._talks[talk.socket]
        self._selector.unregister(talk.socket)
        talk.socket.close()
        place = talk.place
        if place is not None:
            if not self.reason or reason != _REFUSED:  # of most ports, even where another one answers
                self.reason = f"port {place.address[1][1]}: {reason}"
            place.under_way, place.next_try = False, time.monotonic() + place.pause
            place.pause = min(2 * place.pause, PAUSES[1])


def _require_connected(end: socket.socket) -> None:
    code = end.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise ConnectionError(os.strerror(code))
    if end.getsockname() == end.getpeername():
        raise ConnectionError("connected to itself")  # TCP does that where nobody listens


def addresses_of(host: str, ports: Iterable[int], limit: float) -> list[Address]:
    """Where a host's ports are, looked up within a limit in seconds.

    Raises:
        TransportError: If the name is not known.
        TransferTimeout: If nobody knows it in time.
    """
    look_up = partial(socket.getaddrinfo, host, None, type=socket.SOCK_STREAM)
    try:
        found = run_within(limit, f"looking up the address of {host!r}", look_up)
    except TransferTimeout:
        raise
    except (OSError, UnicodeError) as error:
        raise TransportError(f"the address of {host!r} cannot be found: {error}") from None
    ends = dict.fromkeys((family, name) for family, _, _, _, name in found)
    return [(family, (name[0], port, *name[2:])) for family, name in ends for port in ports]


def open_listener(address: str, ports: Iterable[int], backlog: int) -> socket.socket:
    """A listener at one of this host's addresses, or at all of them if that is empty, on the first port that is free.

    Raises:
        OSError: If none is free.
    """
    dual = not address and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual or ":" in address else socket.AF_INET
    at = "127.0.0.1" if address == "localhost" else address
    reason = OSError("no port to try")
    for port in ports:
        try:
            return socket.create_server((at, port), family=family, backlog=backlog, dualstack_ipv6=dual)
        except OSError as error:
            reason = error
    raise reason


def is_loopback(host: str) -> bool:
    """Whether only processes of the same machine can mean that address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
