# SPDX-License-Identifier: Apache-2.0
"""Ranks that know nothing but a launcher's environment find each other over TCP.

Needs neither MPI nor PyTorch: rank 0 listens, the others connect, and from then on `exchange` gathers one
byte string a rank and hands all of them to every rank. Nothing that arrives is ever interpreted.
"""

from __future__ import annotations

import hashlib
import os
import socket
import struct
import time
from collections.abc import Mapping

from nccl_m2n.errors import TransferTimeout, TransportError

PORTS_TRIED = 16
LARGEST_MESSAGE = 1 << 32  # bytes; more can only be a stream that lost its framing
_LENGTH = struct.Struct("<q")
_GREETING_BYTES = 32
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Rendezvous:
    """All ranks of a job, joined in a star around rank 0.

    Args:
        rank: This process's rank.
        size: Number of ranks.
        address: Name or address of rank 0's host.
        port: Port of the launcher; the ports after it are used, since the launcher may hold this one.
        timeout: Seconds that meeting, and each exchange, may take.
        token: Text that tells this job from another one on the same host and port.

    Raises:
        TransferTimeout: If not all ranks come in time; rank 0 names those that did not.
        TransportError: If no port is free.
    """

    def __init__(
        self, rank: int, size: int, address: str, port: int, *, timeout: float = 120.0, token: str = ""
    ) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self._greeting = hashlib.sha256(f"nccl_m2n {token} {address}:{port} {size}".encode()).digest()
        self._links: dict[int, socket.socket] = {}
        deadline = time.monotonic() + timeout
        ports = range(port + 1, port + 1 + PORTS_TRIED)
        try:
            if rank == 0:
                self._listen(ports, deadline)
            else:
                self._connect(address, ports, deadline)
        except BaseException:
            self.close()
            raise

    @classmethod
    def from_environment(
        cls, *, timeout: float = 120.0, environment: Mapping[str, str] = os.environ
    ) -> Rendezvous:
        """Meet by the variables that torchrun sets: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

        Raises:
            TransportError: If one of them is missing or is no number where it should be one.
        """
        missing = [name for name in _VARIABLES if name not in environment]
        if missing:
            raise TransportError(
                f"expected the variables {', '.join(_VARIABLES)} as torchrun sets them, but {', '.join(missing)} "
                f"is missing: start with torchrun, set them, or use NcclTransport.from_mpi"
            )
        try:
            rank, size, port = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        except ValueError as error:
            raise TransportError(f"RANK, WORLD_SIZE and MASTER_PORT must be numbers: {error}") from None
        if not 0 <= rank < size:
            raise TransportError(f"RANK is {rank}, but WORLD_SIZE is {size}")
        token = environment.get("TORCHELASTIC_RUN_ID", "") + environment.get("TORCHELASTIC_RESTART_COUNT", "")
        return cls(rank, size, environment["MASTER_ADDR"], port, timeout=timeout, token=token)

    def exchange(self, payload: bytes) -> list[bytes]:
        """All ranks' payloads, in rank order. Collective.

        Raises:
            TransferTimeout: If a rank does not come within the time limit.
            TransportError: If a rank has left.
        """
        deadline = time.monotonic() + self.timeout
        if self.rank == 0:
            payloads = [payload]
            payloads += [self._receive(rank, deadline) for rank in range(1, self.size)]
            answer = b"".join(_LENGTH.pack(len(one)) + one for one in payloads)
            for rank in range(1, self.size):
                self._send(rank, answer, deadline)
            return payloads
        self._send(0, payload, deadline)
        return _split(self._receive(0, deadline))

    def close(self) -> None:
        """Leave. May be called twice."""
        for link in self._links.values():
            link.close()
        self._links.clear()

    def _listen(self, ports: range, deadline: float) -> None:
        listener = _free_listener(ports, self.size)
        with listener:
            while len(self._links) < self.size - 1:
                missing = sorted(set(range(1, self.size)) - set(self._links))
                link = self._accept(listener, missing, deadline)
                try:
                    link.settimeout(min(5.0, _left(deadline)))
                    link.sendall(self._greeting)
                    hello = _read(link, _GREETING_BYTES + _LENGTH.size)
                    (rank,) = _LENGTH.unpack(hello[_GREETING_BYTES:])
                    if hello[:_GREETING_BYTES] != self._greeting or not 0 < rank < self.size:
                        raise ConnectionError("not a rank of this job")
                    link.sendall(self._greeting)
                except OSError:  # a stranger, or a peer that gave up and will come again
                    link.close()
                    continue
                self._links[rank] = _quick(link)  # a rank that comes again takes its own seat

    def _accept(self, listener: socket.socket, missing: list[int], deadline: float) -> socket.socket:
        listener.settimeout(max(0.001, _left(deadline)))
        try:
            return listener.accept()[0]
        except TimeoutError:
            raise TransferTimeout(
                f"of {self.size} ranks, {_ranks(missing)} did not come to the rendezvous within "
                f"{self.timeout:g} s: check that all were started with the same MASTER_ADDR and MASTER_PORT"
            ) from None

    def _connect(self, address: str, ports: range, deadline: float) -> None:
        reason: Exception | str = "nothing was tried"
        while _left(deadline) > 0:
            for port in ports:
                try:
                    link = socket.create_connection(
                        (address, port), timeout=min(2.0, max(0.001, _left(deadline)))
                    )
                except OSError as error:
                    reason = error
                    if not isinstance(error, ConnectionRefusedError):
                        break
                    continue
                if self._meet(link, deadline):
                    return
                link.close()
                reason = f"port {port} answers, but not as this job's rank 0"
            time.sleep(0.05)
        raise TransferTimeout(
            f"rank {self.rank} found no rank 0 at {address} on ports {ports[0]} to {ports[-1]} within "
            f"{self.timeout:g} s (last: {reason}); these ports must be reachable from every host"
        )

    def _meet(self, link: socket.socket, deadline: float) -> bool:
        """Whether the other end is this job's rank 0 and takes this rank in."""
        # The server speaks first, so that a launcher's own store on this port never sees our bytes.
        link.settimeout(min(2.0, max(0.001, _left(deadline))))
        try:
            if _read(link, _GREETING_BYTES) != self._greeting:
                return False
            link.sendall(self._greeting + _LENGTH.pack(self.rank))
            if _read(link, _GREETING_BYTES) != self._greeting:
                return False
        except OSError:
            return False
        self._links[0] = _quick(link)
        return True

    def _send(self, rank: int, payload: bytes, deadline: float) -> None:
        with _Link(self, rank, deadline) as link:
            link.sendall(_LENGTH.pack(len(payload)) + payload)

    def _receive(self, rank: int, deadline: float) -> bytes:
        with _Link(self, rank, deadline) as link:
            (length,) = _LENGTH.unpack(_read(link, _LENGTH.size))
            if not 0 <= length <= LARGEST_MESSAGE:
                raise ConnectionError(f"a message of {length} bytes was announced")
            return _read(link, length)


class _Link:
    """The socket to one rank, with what is left of the time; its errors name the rank."""

    def __init__(self, meeting: Rendezvous, rank: int, deadline: float) -> None:
        self._meeting, self._rank, self._deadline = meeting, rank, deadline

    def __enter__(self) -> socket.socket:
        link = self._meeting._links.get(self._rank)
        if link is None:
            raise TransportError("the rendezvous is closed")
        link.settimeout(max(0.001, _left(self._deadline)))
        return link

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, TimeoutError):
            raise TransferTimeout(
                f"rank {self._rank} did not come to the exchange within {self._meeting.timeout:g} s"
            ) from None
        if isinstance(error, OSError):
            raise TransportError(f"rank {self._rank} has left the rendezvous: {error}") from None


def _free_listener(ports: range, backlog: int) -> socket.socket:
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    for port in ports:
        try:
            return socket.create_server(("", port), family=family, backlog=backlog, dualstack_ipv6=dual)
        except OSError:
            continue
    raise TransportError(
        f"no port from {ports[0]} to {ports[-1]} is free on rank 0's host: set another MASTER_PORT"
    )


def _quick(link: socket.socket) -> socket.socket:
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return link


def _read(link: socket.socket, length: int) -> bytes:
    received = bytearray(length)
    view = memoryview(received)
    while view:
        count = link.recv_into(view)
        if count == 0:
            raise ConnectionError("the connection was closed")
        view = view[count:]
    return bytes(received)


def _split(joined: bytes) -> list[bytes]:
    payloads, at = [], 0
    while at < len(joined):
        (length,) = _LENGTH.unpack_from(joined, at)
        at += _LENGTH.size
        payloads.append(joined[at : at + length])
        at += length
    return payloads


def _left(deadline: float) -> float:
    return deadline - time.monotonic()


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
