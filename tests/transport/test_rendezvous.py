# SPDX-License-Identifier: Apache-2.0
"""Ranks meet over TCP, let no stranger in, and say who is missing."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest

from nccl_m2n.errors import TransferTimeout, TransportError
from nccl_m2n.transport import gathering
from nccl_m2n.transport.handshake import Letter
from nccl_m2n.transport.rendezvous import Rendezvous, protection, run_id

Result = TypeVar("Result")


def free_port() -> int:
    """A port of which the next ones are free too, below those that systems give to connections."""
    while True:
        port = random.randrange(10_000, 30_000)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for i in range(1, 10):
                stack.enter_context(socket.create_server(("127.0.0.1", port + i)))
            return port


def meet(
    size: int,
    body: Callable[[Rendezvous], Result],
    port: int,
    timeout: float = 20.0,
    ranks: Sequence[int] | None = None,
    secret: str = "",
) -> list[Result]:
    def one(rank: int) -> Result:
        meeting = Rendezvous(rank, size, "127.0.0.1", port, timeout=timeout, secret=secret)
        with contextlib.closing(meeting):
            return body(meeting)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size) if ranks is None else ranks))


def come(port: int, *ranks: int, size: int, timeout: float = 20.0) -> None:
    """These ranks meet the others, and leave."""
    assert meet(size, lambda meeting: meeting.rank, port, timeout, ranks) == list(ranks)


@contextlib.contextmanager
def waiting_root(port: int, size: int = 2, timeout: float = 20.0) -> Iterator[list[Rendezvous]]:
    """Rank 0 waits for the others in a thread; if they come, its rendezvous is in the list at the end."""
    made: list[Rendezvous] = []

    def wait() -> None:
        with contextlib.suppress(TransferTimeout):
            made.append(Rendezvous(0, size, "127.0.0.1", port, timeout=timeout))

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        yield made
    finally:
        thread.join()
        for meeting in made:
            meeting.close()


def knock(port: int, limit: float = 5.0) -> socket.socket:
    """A connection to a rank 0 that is about to listen there."""
    deadline = time.monotonic() + limit
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port + 1), timeout=limit)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def wait_until_closed(link: socket.socket) -> None:
    """Read until the other end closes the connection; raises if it does not."""
    with contextlib.suppress(ConnectionResetError):
        while link.recv(4096):
            pass


def test_every_rank_gets_every_payload() -> None:
    def body(meeting: Rendezvous) -> tuple[list[bytes], list[int]]:
        first = meeting.exchange({meeting.rank: bytes([meeting.rank]) * meeting.rank})
        second = meeting.exchange({meeting.rank: b"x" * (100_000 * (meeting.rank == 2))})
        return first, [len(one) for one in second]

    expected = ([bytes([rank]) * rank for rank in range(4)], [0, 0, 100_000, 0])
    assert meet(4, body, free_port()) == [expected] * 4


def test_one_rank_needs_nobody() -> None:
    assert meet(1, lambda meeting: meeting.exchange({meeting.rank: b"alone"}), free_port()) == [[b"alone"]]


def test_meeting_again_and_again_on_the_same_port() -> None:
    port = free_port()

    def body(meeting: Rendezvous) -> list[bytes]:
        return meeting.exchange({meeting.rank: b"%d" % meeting.rank})

    for _ in range(5):
        assert meet(3, body, port) == [[b"0", b"1", b"2"]] * 3


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "::1"])
def test_addresses_of_this_machine(address: str) -> None:
    if ":" in address and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    port = free_port()

    def process(rank: int) -> set[str]:
        with contextlib.closing(Rendezvous(rank, 2, address, port, timeout=20.0)) as meeting:
            return meeting.local_addresses()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(process, range(2))) == [{address.replace("localhost", "127.0.0.1")}] * 2


def test_a_hundred_ranks() -> None:
    sizes = meet(100, lambda meeting: len(meeting.exchange({meeting.rank: b"x"})), free_port())
    assert sizes == [100] * 100


def test_a_large_payload_goes_both_ways_at_once() -> None:
    """Larger than what sockets hold: nobody waits for somebody who waits to get rid of his."""
    big = bytes(8_000_000)
    sizes = meet(3, lambda meeting: [len(one) for one in meeting.exchange({meeting.rank: big})], free_port())
    assert sizes == [[8_000_000] * 3] * 3


# Strangers


@pytest.mark.parametrize("said", ["echo", "another protocol", "noise"])
def test_a_stranger_does_not_take_a_seat(said: str) -> None:
    port = free_port()
    with waiting_root(port) as made:
        with knock(port) as stranger:
            greeting = stranger.recv(4096)
            replies = {"echo": greeting * 2, "another protocol": b"GET / HTTP/1.1\r\n\r\n" * 9}
            stranger.sendall(replies.get(said, b"x" * 400))
            wait_until_closed(stranger)
        come(port, 1, size=2)
    assert len(made) == 1


def test_silent_and_slow_strangers_take_nobody_s_time() -> None:
    port, done = free_port(), threading.Event()

    def drip(link: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while not done.wait(0.05):
                link.send(b"m")

    with waiting_root(port, size=4), contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(knock(port)) for _ in range(30)]
        drips = [threading.Thread(target=drip, args=(link,)) for link in strangers[:5]]
        for thread in drips:
            thread.start()
        began = time.monotonic()
        come(port, 1, 2, 3, size=4)
        assert time.monotonic() - began < 3
        done.set()
        for thread in drips:
            thread.join()


def test_a_stranger_s_time_is_over_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "PROVE_LIMIT", 0.3)
    port = free_port()
    with waiting_root(port), knock(port) as silent, knock(port) as slow:
        began = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() < began + 3:
                slow.send(b"m")
                time.sleep(0.05)
        assert time.monotonic() - began < 1.5
        wait_until_closed(silent)
        come(port, 1, size=2)


def test_the_oldest_stranger_has_to_go_for_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "STRANGERS", 3)
    port = free_port()
    with waiting_root(port), contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(knock(port)) for _ in range(9)]
        began = time.monotonic()
        wait_until_closed(strangers[0])
        assert time.monotonic() - began < 2
        come(port, 1, size=2)


def test_ports_where_somebody_says_nothing() -> None:
    """A launcher's store accepts and waits, as torchrun's does: all ports are tried at once."""
    port = free_port()
    with contextlib.ExitStack() as stack:
        for i in range(1, 9):
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_server(("127.0.0.1", port + i)))
        began = time.monotonic()
        assert meet(2, lambda meeting: meeting.exchange({meeting.rank: b"hi"}), port) == [[b"hi"] * 2] * 2
        assert time.monotonic() - began < 2


def test_another_secret_is_another_job() -> None:
    port = free_port()
    said = pytest.raises(TransferTimeout, match="found no rank 0 .*the connection was closed")
    with waiting_root(port, timeout=1.0) as made, said:
        meet(2, lambda meeting: None, port, ranks=[1], secret="x", timeout=0.8)
    assert made == []


def test_two_jobs_on_one_port_do_not_mix() -> None:
    port = free_port()

    def rank_of_a_job(number: int) -> list[bytes]:
        job, rank = divmod(number, 3)
        meeting = Rendezvous(rank, 3, "127.0.0.1", port, timeout=20.0, token=f"job {job}")
        with contextlib.closing(meeting):
            return meeting.exchange({meeting.rank: b"%d" % job})

    with ThreadPoolExecutor(9) as pool:
        assert list(pool.map(rank_of_a_job, range(9))) == [[b"%d" % (i // 3)] * 3 for i in range(9)]


def test_a_rank_that_comes_twice_does_not_throw_out_the_first() -> None:
    port = free_port()

    def process(number: int) -> str | list[bytes]:
        time.sleep(0.3 * number)
        rank = [0, 1, 1, 2][number]
        try:
            meeting = Rendezvous(rank, 3, "127.0.0.1", port, timeout=0.25 if number == 2 else 10.0)
        except TransferTimeout as error:
            return str(error)
        with contextlib.closing(meeting):
            return meeting.exchange({meeting.rank: b"%d" % number})

    with ThreadPoolExecutor(4) as pool:
        first, one, again, two = pool.map(process, range(4))
    assert first == one == two == [b"0", b"1", b"3"]
    assert "rank 1 found no rank 0" in again
    assert "another process is rank 1 there" in str(again)


def test_a_rank_that_left_may_come_again() -> None:
    port = free_port()
    with waiting_root(port, size=3) as made:
        with pytest.raises(TransferTimeout, match="rank 0 did not answer rank 1"):
            meet(3, lambda meeting: None, port, ranks=[1], timeout=0.5)
        come(port, 1, 2, size=3)
    assert len(made) == 1


def test_only_this_machine_reaches_a_rendezvous_on_a_loopback_address() -> None:
    port = free_port()
    with waiting_root(port), knock(port):
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port + 1))
        with socket.socket() as other:
            other.bind(("127.0.0.2", port + 1))  # free, so not every address is listened on
        come(port, 1, size=2)


def test_keys_are_of_one_meeting_and_one_purpose() -> None:
    def body(meeting: Rendezvous) -> tuple[bytes, bytes]:
        return meeting.key_for("links"), meeting.key_for("more")

    first, second = (meet(2, body, free_port()) for _ in range(2))
    assert first[0] == first[1]
    assert len({*first[0], *second[0]}) == 4


# Ranks that are missing, late or gone


def test_missing_ranks_are_named() -> None:
    with pytest.raises(TransferTimeout, match="ranks 1-2 did not come"):
        meet(3, lambda meeting: None, free_port(), timeout=0.3, ranks=[0])
    with pytest.raises(TransferTimeout, match="rank 1 found no rank 0 at 127.0.0.1 .*Connection refused"):
        meet(3, lambda meeting: None, free_port(), timeout=0.3, ranks=[1])


def test_missing_ranks_are_named_to_those_that_came() -> None:
    def process(rank: int) -> str:
        with pytest.raises(TransferTimeout) as told:
            Rendezvous(rank, 4, "127.0.0.1", port, timeout=1.0 + rank)
        return str(told.value)

    port = free_port()
    with ThreadPoolExecutor(3) as pool:
        assert all("of 4 ranks, rank 3 did not come" in said for said in pool.map(process, range(3)))


def test_a_rank_that_leaves_is_named_to_all() -> None:
    def body(meeting: Rendezvous) -> None:
        if meeting.rank == 1:
            return
        with pytest.raises(TransportError, match="rank 1 has left the rendezvous"):
            meeting.exchange({meeting.rank: b""})

    meet(3, body, free_port())


def test_a_rank_that_is_late_is_named_to_all_and_finds_it_over() -> None:
    barrier = threading.Barrier(4)
    late = "took longer than 0.5 s: (rank 0 gave up: )?rank 2 did not come"

    def body(meeting: Rendezvous) -> None:
        if meeting.rank == 2:
            barrier.wait(10)
        elif meeting.rank != 0:
            time.sleep(0.1)  # whose time ends before rank 0's hears nothing of it
        with pytest.raises(TransferTimeout, match=late):
            meeting.exchange({meeting.rank: b""})
        if meeting.rank != 2:
            barrier.wait(10)
        with pytest.raises(TransportError, match=f"got one that broke: .*{late}; form a new one"):
            meeting.exchange({meeting.rank: b""})

    meet(4, body, free_port(), timeout=0.5)


def test_a_dripping_peer_does_not_stretch_a_limit() -> None:
    def body(meeting: Rendezvous) -> float:
        began = time.monotonic()
        if meeting.rank == 1:
            payload, link = bytes(1000), meeting._links[0]
            with contextlib.suppress(OSError):
                for byte in link.session.head(Letter.of(payload)) + payload:
                    link.socket.send(bytes([byte]))
                    time.sleep(0.02)
        else:
            with pytest.raises(TransferTimeout, match="rank 1 did not come"):
                meeting.exchange({meeting.rank: b""})
        return time.monotonic() - began

    assert meet(2, body, free_port(), timeout=1.0)[0] < 1.5


def test_a_payload_beyond_the_limit_ends_it_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nccl_m2n.transport.rendezvous.LARGEST_PAYLOAD", 100)

    def body(meeting: Rendezvous) -> None:
        with pytest.raises(TransportError, match="rank 1 brought 1.. bytes|rank 1 has left"):
            meeting.exchange({meeting.rank: bytes(101 if meeting.rank == 1 else 0)})

    meet(3, body, free_port())


# What is asked for


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ((0, 1, 0), "expected a whole number from 1 to 65534 as port"),
        ((0, 1, 65535), "expected a whole number from 1 to 65534 as port"),
        ((0, 1, -1), "as port"),
        ((2, 2, 29500), "expected a whole number from 0 to 1 as rank"),
        ((-1, 2, 29500), "expected a whole number from 0 to 1 as rank"),
    ],
)
def test_numbers_out_of_range_are_refused(numbers: tuple[int, int, int], said: str) -> None:
    rank, size, port = numbers
    with pytest.raises(TransportError, match=said):
        Rendezvous(rank, size, "127.0.0.1", port, timeout=0.5)


@pytest.mark.parametrize("address", ["no.such.host.invalid", "a..b", "x" * 100])
def test_a_host_that_nobody_knows(address: str) -> None:
    with pytest.raises(TransportError, match="the address of|looking up the address of"):
        Rendezvous(1, 2, address, 29500, timeout=2.0)


def test_more_ranks_than_sockets() -> None:
    import resource

    port = free_port()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (held + 8, hard))
    try:
        with pytest.raises(TransportError, match="rank 1 can make no more connections: .*ulimit -n"):
            Rendezvous(1, 2, "127.0.0.1", port, timeout=2.0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("timeout", [-1.0, float("nan"), float("inf")])
def test_a_limit_is_a_number_of_seconds(timeout: float) -> None:
    with pytest.raises(TransportError, match="expected a timeout in seconds"):
        Rendezvous(0, 1, "127.0.0.1", 29500, timeout=timeout)


@pytest.mark.parametrize(
    ("environment", "run"),
    [
        ({}, ""),
        ({"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "2", "SLURM_JOB_ID": "7"}, "a 2"),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}, "7 0"),
    ],
)
def test_the_run_is_what_the_launcher_says(environment: dict[str, str], run: str) -> None:
    assert run_id(environment) == run


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, "nothing but the network"),
        ({"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0"}, "nothing but the network"),
        ({"TORCHELASTIC_RUN_ID": "3b1c"}, "the run id keeps strangers out who cannot guess it"),
        ({"M2N_SECRET": "x", "TORCHELASTIC_RUN_ID": "none"}, "M2N_SECRET keeps strangers out"),
    ],
)
def test_what_keeps_strangers_out(environment: dict[str, str], said: str) -> None:
    assert protection(environment).startswith(said)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": None}, "RANK is missing"),
        ({"RANK": "one"}, "must be numbers"),
        ({"RANK": "7"}, "RANK is 7, but WORLD_SIZE is 2"),
        ({"MASTER_PORT": "70000"}, "as port"),
        ({"M2N_SECRET": ""}, "M2N_SECRET is set, but empty"),
    ],
)
def test_a_bad_environment_is_explained(change: dict[str, str | None], message: str) -> None:
    given = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500", **change}
    environment = {name: value for name, value in given.items() if value is not None}
    with pytest.raises(TransportError, match=message):
        Rendezvous.from_environment(environment=environment)


def test_the_secret_and_the_run_come_from_the_environment() -> None:
    port = free_port()

    def process(change: dict[str, str]) -> str:
        environment = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        environment |= {"M2N_SECRET": "right", "TORCHELASTIC_RUN_ID": "run"} | change
        try:
            meeting = Rendezvous.from_environment(timeout=0.8, environment=environment)
        except TransferTimeout:
            return "kept out"
        with contextlib.closing(meeting):
            return b"".join(meeting.exchange({meeting.rank: environment["RANK"].encode()})).decode()

    for wrong in ({"M2N_SECRET": "wrong"}, {"TORCHELASTIC_RUN_ID": "ran"}):
        with ThreadPoolExecutor(2) as pool:
            assert set(pool.map(process, [{"RANK": "0"}, {"RANK": "1"} | wrong])) == {"kept out"}
    with ThreadPoolExecutor(2) as pool:
        assert set(pool.map(process, [{"RANK": "0"}, {"RANK": "1"}])) == {"01"}
