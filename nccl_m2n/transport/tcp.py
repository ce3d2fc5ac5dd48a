# SPDX-License-Identifier: Apache-2.0
"""Host memory over TCP: one rank a process, a link between any two, no library but the standard one."""

from __future__ import annotations

import json
import os
import selectors
import time
from collections.abc import Mapping, Sequence
from typing import NoReturn

from nccl_m2n.errors import TransferTimeout, TransportError
from nccl_m2n.text import short_ranks
from nccl_m2n.transport.base import Message, PreparedRound, Transport
from nccl_m2n.transport.gathering import Gathering, addresses_of, open_listener
from nccl_m2n.transport.handshake import ProtocolError
from nccl_m2n.transport.nccl_domains import host_label
from nccl_m2n.transport.ranks import DEFAULT_TIMEOUT
from nccl_m2n.transport.rendezvous import Rendezvous
from nccl_m2n.transport.tcp_link import BROKEN, CLOSED, TcpLink
from nccl_m2n.typing import Communicator, Stream


class SocketTransport(Transport):
    """Ranks joined by TCP connections, one between any two, moving host memory. Collective.

    Args:
        rendezvous: Joins the ranks; it is this transport's from now on.
        address: Under which the others reach this rank's host; by default that under which it reaches rank 0.

    Raises:
        TransferTimeout: If not all links can be made within the rendezvous' time limit; names the ranks.
    """

    kind, carrier, launchers = "socket", "TCP", ("torchrun",)

    def __init__(self, rendezvous: Rendezvous, *, address: str | None = None) -> None:
        self._rendezvous, self.timeout = rendezvous, rendezvous.timeout
        self.rank, self.size = rendezvous.rank, rendezvous.size
        self.local_ranks = (self.rank,)
        self._links: dict[int, TcpLink] = {}
        self._selector = selectors.DefaultSelector()
        try:
            if self.size > 1:
                self._connect(address, time.monotonic() + self.timeout)
        except BaseException as error:
            self.abort(f"could not be formed: {error}")
            raise

    @classmethod
    def join(cls, launcher: str, world: Communicator, ranks: int | None) -> SocketTransport:
        """One rank a process."""
        return cls.from_environment()

    @classmethod
    def from_environment(
        cls,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        address: str | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> SocketTransport:
        """Join the ranks that torchrun started, by the variables that it sets. Collective.

        Args:
            timeout: Seconds that meeting, connecting, and each exchange, may take.
            address: Under which the others reach this rank's host.
            environment: Where RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and, maybe, M2N_SECRET are.
        """
        return cls(Rendezvous.from_environment(timeout=timeout, environment=environment), address=address)

    def _gather(self, messages: Mapping[int, bytes], deadline: float) -> list[bytes]:
        return self._rendezvous._gather(messages, deadline)

    def prepare(self, messages: Sequence[Message]) -> PreparedRound:
        """Make one round ready: messages of one pair match in posting order, and only those of one binding."""
        self.require_usable()
        by_peer: dict[int, tuple[list[memoryview], list[memoryview]]] = {}
        for message in messages:
            if message.peer not in self._links:
                raise TransportError(
                    f"expected a message between rank {self.rank} and another of {self.size} ranks, got one with "
                    f"rank {message.peer}"
                )
            by_peer.setdefault(message.peer, ([], []))[not message.send].append(memoryview(message.buffer))
        return _TcpRound(self, self.exchanges % (1 << 32), by_peer)

    def domain_labels(self) -> dict[int, str]:
        """Ranks of one host are one domain."""
        return {self.rank: host_label()}

    # Connecting

    def _connect(self, address: str | None, deadline: float) -> None:
        own = self._rendezvous.local_addresses()
        at = own.pop() if address is None and len(own) == 1 else ""
        with open_listener(at, [0], backlog=self.size) as listener:
            # Rank 0 is where it was found, which may be elsewhere for every rank.
            told = address or ("" if self.rank == 0 else at)
            said = json.dumps([told, listener.getsockname()[1]]).encode()
            ends = [json.loads(each) for each in self._share(said, "tell where the ranks are")]
            hosts = {}
            for rank, (host, port) in enumerate(ends[: self.rank]):
                where = host or self._rendezvous.address_of_root()
                hosts[rank] = addresses_of(where, [port], self.timeout)
            gathering = Gathering(
                self._rendezvous.key_for("links"),
                self.rank,
                listener=listener,
                guests=range(self.rank + 1, self.size),
                hosts=hosts,
            )
            # Time is left to tell all ranks who could not be reached.
            links = gathering.gather(deadline - self.timeout / 4)
        for rank, link in links.items():
            self._links[rank] = TcpLink(rank, link.socket)
            self._selector.register(link.socket, selectors.EVENT_READ, self._links[rank])
        self._agree_on_links(gathering)

    def _share(self, said: bytes, purpose: str) -> list[bytes]:
        return self._rendezvous.exchange({self.rank: said}, purpose)

    def _agree_on_links(self, gathering: Gathering) -> None:
        mine = json.dumps(gathering.missing).encode()
        lacks = [json.loads(said) for said in self._share(mine, "link the ranks")]
        if any(lacks):
            rank = next(rank for rank, lack in enumerate(lacks) if lack)
            raise TransferTimeout(
                f"rank {rank} got no connection with rank {short_ranks(lacks[rank])} within {self.timeout:g} s: each "
                f"rank must be reachable from all others on any port; address= says under which address"
            )

    # Moving

    def _start(self, link: TcpLink) -> None:
        """Send what can be sent at once."""
        if link.gone:
            self._lose(link)
        self._step(link, selectors.EVENT_WRITE)

    def _wait(self, batch: _TcpRound, deadline: float | None) -> None:
        """Move all messages, whoever asked for them, until those of a round are done."""
        began = time.monotonic()
        while batch.left:
            self.move_on()
            self.require_usable()
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                late = sorted(link.peer for link in self._links.values() if link.under_way)
                self._fail(
                    f"rank {self.rank}: messages were still under way at the time limit, after "
                    f"{time.monotonic() - began:.3g} s, with rank {short_ranks(late)}: gone or late",
                    TransferTimeout,
                )
            for key, events in self._selector.select(left):
                self._step(key.data, events)

    def _step(self, link: TcpLink, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                link.read()
            if link.has_unsent:
                link.write()
        except OSError as error:
            self._selector.unregister(link.socket)
            whole = isinstance(error, ProtocolError)
            link.gone = str(error) if whole else f"rank {link.peer} has left: {error}"
            if link.under_way or not link.orderly:
                self._lose(link)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.has_unsent else 0)
        if self._selector.get_key(link.socket).events != wanted:
            self._selector.modify(link.socket, wanted, link)

    def _lose(self, link: TcpLink) -> NoReturn:
        self._fail(link.gone, TransportError)

    def _fail(self, reason: str, kind: type[TransportError]) -> NoReturn:
        self.abort(f"broke: {reason}")
        raise kind(reason)

    def _give_up(self) -> None:
        """Close all connections: peers that wait for this rank hear of it at once."""
        self._leave(BROKEN)
        self._rendezvous.abort(self.broken or "")

    def _part(self) -> None:
        self._leave(CLOSED)
        self._rendezvous.close()

    def _leave(self, kind: int) -> None:
        for link in self._links.values():
            link.leave(kind, f"its transport {self.broken}")
        self._links.clear()
        self._selector.close()

    def __repr__(self) -> str:
        return f"<SocketTransport: rank {self.rank} of {self.size}>"


class _TcpRound(PreparedRound):
    """Some messages by peer: what is sent, what is received."""

    def __init__(
        self,
        transport: SocketTransport,
        space: int,
        by_peer: Mapping[int, tuple[list[memoryview], list[memoryview]]],
    ) -> None:
        self._transport, self._space, self._by_peer = transport, space, by_peer
        self._count = sum(len(sends) + len(receives) for sends, receives in by_peer.values())
        self.left = 0  # messages under way

    def start(self, stream: Stream = None) -> None:
        """Post all messages, and send what can be sent at once."""
        transport = self._transport
        transport.require_usable()
        if self.left:
            raise TransportError("expected a round that is over, got one whose messages are under way")
        self.left = self._count
        links = [transport._links[peer] for peer in self._by_peer]
        for link in links:
            link.post(self._space, *self._by_peer[link.peer], self)
        for link in links:
            transport._start(link)

    def finish(self, deadline: float | None = None) -> None:
        """Wait until all have gone and come."""
        self._transport._wait(self, deadline)

    def done(self) -> bool:
        """Whether all have gone and come, as far as somebody looked."""
        return not self.left
