# SPDX-License-Identifier: Apache-2.0
"""Ranks meet over TCP, survive strangers on the port, and say who is missing."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from nccl_m2n.errors import TransferTimeout, TransportError
from nccl_m2n.transport.rendezvous import Rendezvous


def free_port() -> int:
    with socket.create_server(("", 0)) as listener:
        return listener.getsockname()[1]


def meet(size, body, port, timeout=20.0, ranks=None):
    def one(rank):
        meeting = Rendezvous(rank, size, "127.0.0.1", port, timeout=timeout)
        with contextlib.closing(meeting):
            return body(meeting)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size) if ranks is None else ranks))


def test_every_rank_gets_every_payload():
    def body(meeting):
        first = meeting.exchange(bytes([meeting.rank]) * meeting.rank)
        second = meeting.exchange(b"x" * (100_000 * (meeting.rank == 2)))
        return first, [len(one) for one in second]

    expected = ([bytes([rank]) * rank for rank in range(4)], [0, 0, 100_000, 0])
    assert meet(4, body, free_port()) == [expected] * 4


def test_one_rank_needs_nobody():
    assert meet(1, lambda meeting: meeting.exchange(b"alone"), free_port()) == [[b"alone"]]


def test_meeting_twice_on_the_same_port():
    port = free_port()
    for text in (b"a", b"b"):
        assert meet(3, lambda meeting, text=text: meeting.exchange(text), port) == [[text] * 3] * 3


def test_ports_that_others_hold_are_passed_over():
    """A launcher's store that accepts and says nothing, as torchrun's does, must not stop the ranks."""
    port = free_port()
    silent = socket.create_server(("", port + 1))
    with silent:
        assert meet(2, lambda meeting: meeting.exchange(b"hi"), port) == [[b"hi"] * 2] * 2


def test_a_stranger_does_not_take_a_seat():
    port = free_port()

    def stranger():
        for _ in range(100):
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", port + 1), timeout=1) as link,
            ):
                link.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"x" * 64)
                return
            time.sleep(0.02)

    thread = threading.Thread(target=stranger)
    thread.start()

    def late(rank):
        time.sleep(0.3 * rank)
        with contextlib.closing(Rendezvous(rank, 2, "127.0.0.1", port, timeout=20.0)) as meeting:
            return meeting.exchange(b"ok")

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(late, range(2))) == [[b"ok"] * 2] * 2
    thread.join()


def test_missing_ranks_are_named():
    with pytest.raises(TransferTimeout, match="ranks 1, 2 did not come"):
        meet(3, lambda meeting: None, free_port(), timeout=0.3, ranks=[0])
    with pytest.raises(TransferTimeout, match="rank 1 found no rank 0 at 127.0.0.1"):
        meet(3, lambda meeting: None, free_port(), timeout=0.3, ranks=[1])


def test_a_rank_that_leaves_is_named():
    def body(meeting):
        if meeting.rank == 1:
            return None
        with pytest.raises(TransportError, match="rank 1 has left"):
            meeting.exchange(b"")
        return None

    meet(2, body, free_port())


def test_a_rank_that_is_late_is_named():
    barrier = threading.Barrier(2)

    def body(meeting):
        if meeting.rank == 0:
            with pytest.raises(TransferTimeout, match="rank 1 did not come to the exchange within 0.5 s"):
                meeting.exchange(b"")
        barrier.wait(10)

    meet(2, body, free_port(), timeout=0.5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": None}, "RANK is missing"),
        ({"RANK": "one"}, "must be numbers"),
        ({"RANK": "7"}, "RANK is 7, but WORLD_SIZE is 2"),
    ],
)
def test_a_bad_environment_is_explained(change, message):
    environment = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
    } | change
    environment = {name: value for name, value in environment.items() if value is not None}
    with pytest.raises(TransportError, match=message):
        Rendezvous.from_environment(environment=environment)
