# SPDX-License-Identifier: Apache-2.0
"""Exchanges have an identity, agreement raises alike, and what broke stays broken."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import pytest

from nccl_m2n import DisagreementError, LayoutError, LocalTransport, M2nError, TransferTimeout, TransportError
from nccl_m2n.transport.agree import together
from nccl_m2n.transport.ranks import Held, Ranks

Result = TypeVar("Result")


class Threads(Ranks):
    """Each rank in a thread of its own, as each has a process of its own elsewhere."""

    def __init__(self, rank: int, table: list[dict[int, bytes]], barrier: threading.Barrier) -> None:
        self.size, self.local_ranks, self.timeout = barrier.parties, (rank,), 10.0
        self._table, self._barrier = table, barrier

    def _gather(self, messages: Mapping[int, bytes], deadline: float) -> list[bytes]:
        try:
            self._table[0].update(messages)
            self._barrier.wait(max(0.0, deadline - time.monotonic()))
            came = [self._table[0][rank] for rank in range(self.size)]
            self._barrier.wait(max(0.0, deadline - time.monotonic()))
        except threading.BrokenBarrierError:
            raise TransferTimeout("somebody did not come") from None
        return came


def on_all(size: int, body: Callable[[Ranks], Result]) -> list[Result | Exception]:
    """What the body gave, or raised, on each rank."""
    table: list[dict[int, bytes]] = [{}]
    barrier = threading.Barrier(size)
    came: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            came[rank] = body(Threads(rank, table, barrier))
        except Exception as error:
            came[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return came


def alike(came: list[Any], kind: type[Exception], *words: str) -> None:
    assert [type(each) for each in came] == [kind] * len(came)
    assert len({str(each) for each in came}) == 1
    for word in words:
        assert word in str(came[0])


def rank_of(ranks: Ranks) -> int:
    return ranks.local_ranks[0]


def test_different_calls_that_meet_raise_the_same_error_and_go_on() -> None:
    def body(ranks: Ranks) -> str:
        rank = rank_of(ranks)
        with pytest.raises(DisagreementError) as raised:
            ranks.exchange({rank: b"x"}, "bind" if rank else "version 3")
        assert ranks.exchange({rank: bytes([rank])}, "after it") == [b"\0", b"\1", b"\2"]
        return str(raised.value)

    assert (
        on_all(3, body)
        == [
            "expected all ranks to come to the same call, in the same order, got rank 0: version 3; rank 1-2: bind"
        ]
        * 3
    )


def test_a_number_of_exchanges_that_differs_is_told() -> None:
    def body(ranks: Ranks) -> None:
        ranks.exchanges += rank_of(ranks)
        ranks.exchange({rank_of(ranks): b""}, "bind")

    alike(on_all(2, body), DisagreementError, "rank 0: bind (exchange 0)", "rank 1: bind (exchange 1)")


def test_one_ranks_error_is_raised_by_all() -> None:
    def work(rank: int) -> int:
        if rank == 1:
            raise LayoutError("it does not fit")
        return rank

    def body(ranks: Ranks) -> None:
        with pytest.raises(LayoutError) as raised:
            together(ranks, "try", work)
        assert isinstance(raised.value.__cause__, LayoutError) == (rank_of(ranks) == 1)
        assert together(ranks, "try again", lambda rank: rank) == {rank_of(ranks): rank_of(ranks)}
        raise raised.value

    alike(on_all(3, body), LayoutError, "rank 1: it does not fit")


@pytest.mark.parametrize("where", ["work", "facts", "no JSON"])
def test_a_fault_of_any_kind_leaves_nobody_waiting(where: str) -> None:
    def faulty(rank: int) -> Any:
        if rank:
            return {"x": 1}
        return 1 / 0 if where == "work" else {"x": object()} if where == "no JSON" else None

    def body(ranks: Ranks) -> None:
        together(ranks, "try", faulty, facts=lambda made: dict(made[rank_of(ranks)]))

    words = {"work": "ZeroDivisionError", "facts": "TypeError", "no JSON": "not JSON serializable"}
    alike(on_all(2, body), M2nError, "rank 0: ", words[where])


def test_facts_that_differ_are_told_and_then_their_details() -> None:
    def body(ranks: Ranks) -> None:
        rank = rank_of(ranks)
        facts = {"same": [1], "list": [1, 2, rank], "later": rank}
        together(ranks, "compare", lambda _: facts, facts=lambda made: made[rank])

    alike(on_all(2, body), DisagreementError, "got for list, number 2: rank 0: 0; rank 1: 1")

    def detailed(ranks: Ranks) -> None:
        rank = rank_of(ranks)
        together(
            ranks, "compare", str, facts=lambda made: {"digest": made[rank]}, details=lambda: {"why": rank}
        )

    alike(on_all(2, detailed), DisagreementError, "got for why: rank 0: 0; rank 1: 1")


def test_a_limit_of_its_own_and_what_broke_stays_broken() -> None:
    def body(ranks: Ranks) -> float:
        if rank_of(ranks) == 1:
            time.sleep(1.0)
            return 0.3
        began = time.monotonic()
        with pytest.raises(TransferTimeout, match=r"bind \(exchange 0\) took longer than 0.3 s: somebody"):
            ranks.exchange({0: b""}, "bind", limit=0.3)
        took = time.monotonic() - began
        assert ranks.broken is not None and ranks.broken.startswith("broke: bind (exchange 0)")
        with pytest.raises(TransportError, match=r"got one that broke: bind.*; form a new one"):
            together(ranks, "next", str)
        return took

    assert all(0.25 < took < 0.9 for took in on_all(2, body) if isinstance(took, float))


def test_an_error_of_the_ranks_own_does_not_hide_behind_a_broken_transport() -> None:
    transport = LocalTransport(2)
    transport.abort("lost its peers")
    with pytest.raises(TransportError, match="lost its peers") as raised:
        together(transport, "try", lambda rank: 1 // rank)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


def test_a_local_transport_that_was_aborted_or_closed_refuses_everything() -> None:
    for end, reason in ((LocalTransport.abort, "was aborted"), (LocalTransport.close, "was closed")):
        transport = LocalTransport(2)
        prepared = transport.prepare([])
        end(transport)
        end(transport)
        for call in (
            lambda t=transport: t.exchange({0: b"", 1: b""}),
            lambda t=transport: t.prepare([]),
            prepared.start,
            transport.discover_domains,
        ):
            with pytest.raises(TransportError, match=f"got one that {reason}; form a new one"):
                call()


def test_what_is_held_lives_until_it_is_released() -> None:
    number = Held.hold([b"bytes"])
    assert Held._things[number] == [b"bytes"]
    Held.release(number)
    assert number not in Held._things
