# SPDX-License-Identifier: Apache-2.0
"""Byte streams that went wrong, fed to both ends of the handshake and to all that reads messages.

usage: python -m tests.transport.fuzz_streams [STREAMS [SEED]]

Whatever comes, an end either goes on or raises `ProtocolError`; it lets nobody in who did not say exactly what a
rank says, and gives no sealed message that was not sent, in the order in which it was sent. Messages of a link, which
are not sealed, touch no memory but their own.
"""

from __future__ import annotations

import collections
import random
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from nccl_m2n.transport import handshake
from nccl_m2n.transport.handshake import WELCOME, Guest, Host, Letter, ProtocolError, Session
from nccl_m2n.transport.tcp_link import TcpLink

KEY = handshake.job_key("a secret", "fuzz")
STREAMS = 100_000
Mutation = Callable[[random.Random, bytes, bytes], bytes]


def nothing(rng: random.Random, data: bytes, other: bytes) -> bytes:
    return data


def flip(rng: random.Random, data: bytes, other: bytes) -> bytes:
    made = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        made[rng.randrange(len(made))] ^= 1 << rng.randrange(8)
    return bytes(made)


def cut_out(rng: random.Random, data: bytes, other: bytes) -> bytes:
    start, stop = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    return data[:start] + data[stop:]


def truncate(rng: random.Random, data: bytes, other: bytes) -> bytes:
    return data[: rng.randrange(len(data))]


def insert(rng: random.Random, data: bytes, other: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.randbytes(rng.choice((1, 3, 40, 300))) + data[at:]


def repeat(rng: random.Random, data: bytes, other: bytes) -> bytes:
    start, stop = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    return data[:stop] + data[start:]


def splice(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """The beginning of one conversation and the rest of another, which a listener has recorded."""
    at = rng.randrange(len(data) + 1)
    return data[:at] + other[at:]


def swap_ends(rng: random.Random, data: bytes, other: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[at:] + data[:at]


def number(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """A length or a rank of the largest kind, anywhere."""
    value = rng.choice((0, 1, 2**31, 2**32 - 1, 2**62, 2**64 - 1)) & (2**64 - 1)
    at = rng.randrange(len(data) + 1)
    return data[:at] + struct.pack("<Q", value) + data[at + 8 :]


def noise(rng: random.Random, data: bytes, other: bytes) -> bytes:
    return rng.randbytes(rng.randrange(400))


MUTATIONS = (nothing, flip, cut_out, truncate, insert, repeat, splice, swap_ends, number, noise)


def pieces(rng: random.Random, data: bytes) -> Iterator[bytes]:
    """The stream as a network may hand it out."""
    largest = rng.choice((1, 7, 64, 4096))
    at = 0
    while at < len(data):
        count = rng.randint(1, largest)
        yield data[at : at + count]
        at += count


def letters(rng: random.Random, session: Session) -> tuple[list[bytes], bytes]:
    payloads = [rng.randbytes(rng.choice((0, 1, 9, 200))) for _ in range(rng.randrange(4))]
    made = [Letter.of(payload) for payload in payloads]
    return payloads, b"".join(session.head(letter) + letter.payload for letter in made)


def messages(session: Session, fed: bytes) -> list[bytes]:
    """Everything that a session gives."""
    session.feed(fed)
    came = []
    while (message := session.take()) is not None:
        came.append(message[1])
    return came


def pair() -> tuple[Host, Guest, bytes, bytes, bytes]:
    """Two ranks' whole handshake: both ends, and what host, guest and host said."""
    host, guest = Host(KEY, 0, lambda rank: WELCOME if rank == 3 else None), Guest(KEY, 3, 0)
    hello = host.greeting()
    claim = guest.feed(hello)
    verdict = host.feed(claim)
    guest.feed(verdict)
    return host, guest, hello, claim, verdict


def to_host(rng: random.Random, mutate: Mutation, other: tuple[bytes, ...]) -> str:
    """A guest's claim, and the letters after it, on their way to a host."""
    host, guest = Host(KEY, 0, lambda rank: WELCOME if rank == 3 else None), Guest(KEY, 3, 0)
    claim = guest.feed(host.greeting())
    wrong = mutate(rng, claim, other[1])
    for piece in pieces(rng, wrong):
        host.feed(piece)
    assert (host.session is not None) == (wrong == claim), "a host let somebody in"
    return "let in" if host.session else "waits for more"


def to_guest(rng: random.Random, mutate: Mutation, other: tuple[bytes, ...]) -> str:
    """A host's greeting or its verdict on their way to a guest, which answers in between."""
    host, guest = Host(KEY, 0, lambda rank: WELCOME if rank == 3 else None), Guest(KEY, 3, 0)
    hello, early = host.greeting(), rng.random() < 0.5
    said = mutate(rng, hello, other[0]) if early else hello
    claim = b"".join(guest.feed(piece) for piece in pieces(rng, said))
    if not claim:
        return "waits for more"
    assert claim[:8] == struct.pack("<II", 3, 0)
    try:
        verdict = host.feed(claim)
    except ProtocolError:
        verdict = other[2]  # a stranger in between has only what it recorded
    wrong = verdict if early else mutate(rng, verdict, other[2])
    for piece in pieces(rng, wrong):
        guest.feed(piece)
    right = said == hello and wrong[: len(verdict)] == verdict
    assert (guest.session is not None) == right, "a guest took a stranger for its host"
    return "let in" if right else "waits for more"


def to_session(rng: random.Random, mutate: Mutation, other: tuple[bytes, ...]) -> str:
    """Sealed messages on their way to either end."""
    host, guest, *_ = pair()
    ends = [host.session, guest.session]
    rng.shuffle(ends)
    sender, receiver = ends
    assert sender is not None and receiver is not None
    payloads, stream = letters(rng, sender)
    wrong = mutate(rng, stream or b"\0", other[3] or b"\0")
    came: list[bytes] = []
    try:
        for piece in pieces(rng, wrong):
            came += messages(receiver, piece)
    finally:
        assert came == payloads[: len(came)], "a message came that nobody sent"
    whole = len(came) == len(payloads)
    return "all came" if whole else "waits for more"


def to_split(rng: random.Random, mutate: Mutation, other: tuple[bytes, ...]) -> str:
    """What all ranks' payloads make up together."""
    payloads = [rng.randbytes(rng.choice((0, 1, 5, 60))) for _ in range(rng.randint(1, 5))]
    wrong = mutate(rng, handshake.join_payloads(payloads), other[3] or b"\0")
    made = handshake.split_payloads(wrong, len(payloads))
    assert handshake.join_payloads(made) == wrong
    return "taken apart"


class Pipe:
    """As much of a socket as a link uses, in memory."""

    def __init__(self) -> None:
        self.sent, self.came = bytearray(), bytearray()

    def sendmsg(self, views: Sequence[memoryview]) -> int:
        for view in views:
            self.sent += view
        return sum(map(len, views))

    def recv_into(self, view: memoryview) -> int:
        if not self.came:
            raise BlockingIOError
        count = min(len(view), len(self.came))
        view[:count] = self.came[:count]
        del self.came[:count]
        return count

    def recvmsg_into(self, views: Sequence[memoryview]) -> tuple[int]:
        first = self.recv_into(views[0])
        return (first + (self.recv_into(views[1]) if self.came else 0),)


@dataclass
class Batch:
    left: int


def link() -> tuple[TcpLink, Pipe]:
    pipe = Pipe()
    return TcpLink(1, pipe), pipe  # type: ignore[arg-type]


def to_link(rng: random.Random, mutate: Mutation, other: tuple[bytes, ...]) -> str:
    """Messages of two spaces on their way to arrays."""
    sizes = [rng.choice((0, 1, 9, 200)) for _ in range(rng.randint(1, 4))]
    payloads = [rng.randbytes(size) for size in sizes]
    memory = bytearray(sum(sizes) + 8 * len(sizes) + 8)
    places, at = [], 8
    for size in sizes:
        places.append(memoryview(memory)[at : at + size])
        at += size + 8
    (sender, out), (receiver, into), batch = link(), link(), Batch(len(sizes))
    for number, (payload, place) in enumerate(zip(payloads, places, strict=True)):
        sender.post(number % 2, [memoryview(payload)], [], Batch(1))
        receiver.post(number % 2, [], [place], batch)
    receiver.write()
    out.came += into.sent
    sender.read()
    sender.write()
    stream = bytes(out.sent)
    for piece in pieces(rng, mutate(rng, stream, other[3] or b"\0")):
        into.came += piece
        receiver.read()
    assert 0 <= batch.left <= len(sizes)
    outside, at = bytearray(memory), 8
    for size in sizes:
        outside[at : at + size] = bytes(size)
        at += size + 8
    assert not any(outside), "memory was touched that no message is for"
    if mutate is nothing:
        assert batch.left == 0
        assert [bytes(place) for place in places] == payloads
    return "all came" if batch.left == 0 else "waits for more"


TARGETS = (to_host, to_guest, to_session, to_split, to_link)


def fuzz(streams: int, seed: int = 0) -> collections.Counter[tuple[str, str]]:
    """How many streams ended how, by what they were fed to."""
    rng = random.Random(seed)
    told: collections.Counter[tuple[str, str]] = collections.Counter()
    for i in range(streams):
        if i % 1000 == 0:  # another conversation, of which pieces are mixed in
            host, _, *said = pair()
            assert host.session is not None
            other = (*said, letters(rng, host.session)[1])
        target, mutate = TARGETS[i % len(TARGETS)], rng.choice(MUTATIONS)
        try:
            outcome = target(rng, mutate, other)
        except ProtocolError:
            outcome = "refused"
            assert mutate is not nothing, f"{target.__name__} refused what was right"
        told[target.__name__, outcome] += 1
    return told


def main(streams: int = STREAMS, seed: int = 0) -> None:
    began = time.perf_counter()
    told = fuzz(streams, seed)
    for (target, outcome), count in sorted(told.items()):
        print(f"{target:12} {outcome:16} {count:9,}")
    print(f"{streams:,} streams in {time.perf_counter() - began:.1f} s, nothing went wrong")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
