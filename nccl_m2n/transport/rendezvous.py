# SPDX-License-Identifier: Apache-2.0
"""Ranks that know nothing but a launcher's environment find each other over TCP.

Needs neither MPI nor PyTorch: rank 0 listens, the others connect and prove that they are ranks of the same job,
and from then on each exchange gathers one byte string a rank and hands all of them to every rank.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from typing import NoReturn

from nccl_m2n.checks import MAX_RANKS, limit_seconds, plain_text, whole_number
from nccl_m2n.errors import TransferTimeout, TransportError
from nccl_m2n.text import short_ranks
from nccl_m2n.transport.gathering import STRANGERS, Gathering, Link, addresses_of, is_loopback, open_listener
from nccl_m2n.transport.handshake import (
    FAILED,
    LARGEST_PAYLOAD,
    TIMED_OUT,
    Letter,
    ProtocolError,
    derived_key,
    job_key,
    join_payloads,
    split_payloads,
)
from nccl_m2n.transport.ranks import DEFAULT_TIMEOUT, Ranks
from nccl_m2n.transport.swap import Swap

PORTS_TRIED = 16
LARGEST_PORT = 65535
SECRET = "M2N_SECRET"
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Rendezvous(Ranks):
    """All ranks of a job, joined in a star around rank 0. It is made when all ranks have come.

    Args:
        rank: This process's rank.
        size: Number of ranks.
        address: Name or address of rank 0's host.
        port: Port of the launcher; the ports after it are used, since the launcher may hold this one.
        timeout: Seconds that meeting, and each exchange, may take.
        token: Text that tells this job from another one on the same host and port.
        secret: What only ranks of this job know; without it, that is the token.

    Raises:
        TransferTimeout: If not all ranks come in time; all that have come name those that did not.
        TransportError: If a number is out of range or no port is free.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        address: str,
        port: int,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        token: str = "",
        secret: str = "",
    ) -> None:
        _check(rank, size, address, port, timeout)
        self.rank, self.size, self.timeout, self.local_ranks = rank, size, timeout, (rank,)
        self._key = job_key(secret, "rendezvous", token, port, size)
        self._links: dict[int, Link] = {}
        self._last_word = FAILED, ""  # what the others are told when these ranks break
        self._met = False
        self._interrupted: set[int] = set()  # to whom a letter is half sent, so that no other can be
        ports = range(port + 1, min(port + PORTS_TRIED, LARGEST_PORT) + 1)
        try:
            meet = self._host if rank == 0 else self._visit
            salt = meet(address, ports, time.monotonic() + timeout) if size > 1 else b""
            self._key, self._met = derived_key(self._key, salt, "met"), True
        except BaseException as error:
            self.abort(f"could not be formed: {error}")
            raise

    @classmethod
    def from_environment(
        cls, *, timeout: float = DEFAULT_TIMEOUT, environment: Mapping[str, str] = os.environ
    ) -> Rendezvous:
        """Meet by the variables that torchrun sets: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

        Strangers are kept out by M2N_SECRET, where that is set on all ranks, or else by the launcher's run id.

        Raises:
            TransportError: If one of them is missing or is no number where it should be one.
        """
        missing = [name for name in _VARIABLES if name not in environment]
        if missing:
            raise TransportError(
                f"expected the variables {', '.join(_VARIABLES)} as torchrun sets them, but {', '.join(missing)} "
                f"is missing: start with torchrun, set them, or use MPI's launcher"
            )
        try:
            rank, size, port = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        except ValueError as error:
            raise TransportError(f"RANK, WORLD_SIZE and MASTER_PORT must be numbers: {error}") from None
        if not 0 <= rank < size:
            raise TransportError(f"RANK is {rank}, but WORLD_SIZE is {size}")
        if environment.get(SECRET) == "":
            raise TransportError(f"{SECRET} is set, but empty: set it to a secret text, or unset it")
        return cls(
            rank,
            size,
            environment["MASTER_ADDR"],
            port,
            timeout=timeout,
            token=run_id(environment),
            secret=environment.get(SECRET, ""),
        )

    def key_for(self, purpose: str) -> bytes:
        """A key that the ranks of this rendezvous, and nobody else, have for a purpose."""
        return derived_key(self._key, b"", purpose)

    def local_addresses(self) -> set[str]:
        """This host's addresses that lead to the ranks linked to this one: rank 0, or on rank 0 all others."""
        return {plain_address(link.socket.getsockname()[0]) for link in self._links.values()}

    def address_of_root(self) -> str:
        """Where this rank, which is not rank 0, found rank 0."""
        return plain_address(self._links[0].socket.getpeername()[0])

    # Meeting

    def _host(self, address: str, ports: range, deadline: float) -> bytes:
        try:
            at = address if is_loopback(address) else ""
            listener = open_listener(at, ports, backlog=self.size + STRANGERS)
        except OSError as error:
            raise TransportError(
                f"no port from {ports[0]} to {ports[-1]} is free on rank 0's host ({error}): set another MASTER_PORT"
            ) from None
        with listener:
            gathering = Gathering(self._key, 0, listener=listener, guests=range(1, self.size))
            self._links = gathering.gather(_early(deadline))
        if gathering.missing:
            self._fail(
                f"of {self.size} ranks, {_ranks(gathering.missing)} did not come to the rendezvous within "
                f"{self.timeout:g} s: check that all were started with the same MASTER_ADDR and MASTER_PORT, "
                f"{SECRET} and run id",
                TIMED_OUT,
            )
        # Nobody listens any more: a rank that now comes again is at its next rendezvous.
        salt = os.urandom(32)
        self._swap(dict.fromkeys(self._links, salt), (), deadline)
        return salt

    def _visit(self, address: str, ports: range, deadline: float) -> bytes:
        gathering = Gathering(self._key, self.rank, hosts={0: addresses_of(address, ports, self.timeout)})
        self._links = gathering.gather(deadline)
        if gathering.missing:
            self._fail(
                f"rank {self.rank} found no rank 0 at {address} on ports {ports[0]} to {ports[-1]} within "
                f"{self.timeout:g} s (last: {gathering.reason}); these ports must be reachable from every host, and "
                f"all ranks need the same WORLD_SIZE, {SECRET} and run id",
                TIMED_OUT,
            )
        return self._swap({}, [0], deadline)[0]

    # Exchanges

    def _gather(self, messages: Mapping[int, bytes], deadline: float) -> list[bytes]:
        payload = messages[self.rank]
        if len(payload) > LARGEST_PAYLOAD:
            self._fail(
                f"rank {self.rank} brought {len(payload)} bytes, {LARGEST_PAYLOAD} are allowed", FAILED
            )
        if self.size == 1:
            return [payload]
        if self.rank == 0:
            came = self._swap({}, self._links, _early(deadline))
            payloads = [payload] + [came[rank] for rank in range(1, self.size)]
            self._swap(dict.fromkeys(self._links, join_payloads(payloads)), (), deadline)
            return payloads
        self._links[0].session.limit = (LARGEST_PAYLOAD + 8) * self.size
        try:
            return split_payloads(self._swap({0: payload}, [0], deadline)[0], self.size)
        except ProtocolError as error:
            self._fail(f"rank 0 sent something else than all payloads: {error}", FAILED)

    def _swap(
        self, outgoing: Mapping[int, bytes], wanted: Collection[int], deadline: float
    ) -> dict[int, bytes]:
        """Send to some ranks and get one message from some."""
        letters = {payload: Letter.of(payload) for payload in set(outgoing.values())}
        swap = Swap([self._links[rank] for rank in sorted({*outgoing, *wanted})])
        for rank, payload in outgoing.items():
            swap.send(rank, letters[payload])
        swap.want(wanted)
        swap.work(deadline)
        self._interrupted = swap.unsent
        for rank, (kind, payload) in swap.came.items():
            if kind in (FAILED, TIMED_OUT):
                self._fail(f"rank {rank} gave up: {payload.decode(errors='replace')}", kind)
        if swap.gone:
            rank, reason = min(swap.gone.items())
            self._fail(f"rank {rank} has left the rendezvous: {reason}", FAILED)
        if swap.unfinished:
            late = f"{_ranks(swap.unfinished)} did not come"
            self._fail(late if self.rank == 0 else f"rank 0 did not answer rank {self.rank}", TIMED_OUT)
        return {rank: payload for rank, (_, payload) in swap.came.items()}

    def _fail(self, reason: str, kind: int) -> NoReturn:
        self._last_word = kind, reason
        raise (TransferTimeout if kind == TIMED_OUT else TransportError)(reason)

    def _give_up(self) -> None:
        """Tell the others why, as far as they listen, and leave."""
        kind, reason = self._last_word
        if self.rank and not self._met:  # rank 0 hears of it from the connection, and keeps the seat free
            self._part()
            return
        letter = Letter.of((reason or f"its rendezvous {self.broken}").encode(), kind)
        swap = Swap(self._links.values())
        for rank in set(self._links) - self._interrupted:
            swap.send(rank, letter)
        swap.work(time.monotonic())
        self._part()

    def _part(self) -> None:
        for link in self._links.values():
            link.socket.close()
        self._links.clear()


def _early(deadline: float) -> float:
    """Rank 0's own limit: its word on who is missing should reach those who wait for it before theirs ends."""
    return deadline - min(1.0, max(0.0, deadline - time.monotonic()) / 10)


def run_id(environment: Mapping[str, str]) -> str:
    """What the launcher calls this run of the job; empty where it does not tell."""
    if "TORCHELASTIC_RUN_ID" in environment:
        names = ["TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"]
    else:
        names = ["SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"]
    return " ".join(filter(None, (environment.get(name, "") for name in names)))


def plain_address(address: str) -> str:
    """An address without the clothes of IPv6 that one of IPv4 wears on a listener for both."""
    return address.removeprefix("::ffff:")


def protection(environment: Mapping[str, str]) -> str:
    """What keeps strangers out of the rendezvous of a job that was started with these variables."""
    if environment.get(SECRET):
        return f"{SECRET} keeps strangers out"
    run = run_id(environment)
    if run.split()[:1] in ([], ["none"]):  # what torchrun says where it was told nothing
        return f"nothing but the network keeps strangers out: set {SECRET}"
    return f"the run id keeps strangers out who cannot guess it; {SECRET} keeps out all"


def _check(rank: int, size: int, address: str, port: int, timeout: float) -> None:
    whole_number(size, "number of ranks", least=1, most=MAX_RANKS, error=TransportError)
    whole_number(rank, "rank", least=0, most=size - 1, error=TransportError)
    whole_number(
        port, "port", least=1, most=LARGEST_PORT - 1, error=TransportError, hint="the ports after it are used"
    )
    plain_text(address, "address of rank 0's host", error=TransportError)
    limit_seconds(timeout, endless=False)


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {short_ranks(ranks)}"
