# SPDX-License-Identifier: Apache-2.0
"""What MPI transports must stand: late ranks, calls that do not match, bindings side by side, being dropped.

Each case runs on all ranks and gives what went wrong on its own. Transports are broken here on purpose; each case
makes its own. `python -m tests.transport.mpi_cases` under mpiexec runs all of them.
"""

from __future__ import annotations

import gc
import json
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from nccl_m2n import (
    DisagreementError,
    Layout,
    M2nError,
    Mesh,
    MpiTransport,
    Shard,
    SocketTransport,
    Transfer,
    TransferTimeout,
    TransportError,
    plan,
)
from nccl_m2n.execution.bound import Bound

if TYPE_CHECKING:
    from mpi4py import MPI

RANKS = 4
LATE, LIMIT = RANKS - 1, 1.0  # who comes late, and for how long the others wait, in seconds
SLACK = 5.0  # seconds: many processes on few cores
SIDE = 256  # large enough for MPI to leave the bytes where they are until they are asked for
ROWS, COLUMNS = (Layout((RANKS * SIDE, RANKS * SIDE), Mesh.arange((RANKS,)), [Shard(dim)]) for dim in (0, 1))
Wrong = list[str]


class Case:
    """What one rank has of an all-to-all: rows before, columns after."""

    def __init__(self, transport: MpiTransport | SocketTransport, seed: int = 0) -> None:
        rank = transport.rank
        self.whole = (
            np.arange(ROWS.shape[0] * ROWS.shape[1], dtype=np.int64).reshape(ROWS.shape) + 7919 * seed
        )
        self.source = np.array(ROWS.slice_global(self.whole, rank))
        self.destination = np.full((RANKS * SIDE, SIDE), -1, np.int64)
        transfer = Transfer(ROWS, COLUMNS, dtype="int64", name="w")
        self.bound: Bound = plan([transfer]).bind(transport, {"w": self.source}, {"w": self.destination})
        self.wanted = COLUMNS.slice_global(self.whole, rank)

    def wrong(self) -> Wrong:
        """What has not arrived."""
        count = int((self.destination != self.wanted).sum())
        return [f"{count} of {self.wanted.size} elements are wrong"] if count else []


def raised(kind: type[Exception], call: Callable[[], Any], *words: str, within: float = 0.0) -> Wrong:
    """What is wrong with how a call fails."""
    began = time.monotonic()
    try:
        call()
    except Exception as error:
        took = time.monotonic() - began
        said = f"{type(error).__name__}: {error}"
        wrong = [] if type(error) is kind else [f"expected a {kind.__name__}, got {said}"]
        wrong += [f"expected {word!r} in {said}" for word in words if word not in said]
        return wrong + ([f"took {took:.1f} s"] if within and took > within else [])
    return [f"expected a {kind.__name__}, got none"]


@contextmanager
def others_first(comm: MPI.Intracomm) -> Iterator[None]:
    """The late rank waits until all others have left the block."""
    if comm.rank != LATE:
        yield
        comm.send(None, LATE, 77)
        return
    for rank in range(RANKS - 1):
        comm.recv(source=rank, tag=77)
    yield


def reuse_memory(nbytes: int, count: int = 24) -> list[Any]:
    """Arrays that take the place of what was freed, with a pattern in every byte."""
    gc.collect()
    return [np.full(nbytes, 0x5A, np.uint8) for _ in range(count)]


def overwritten(arrays: list[Any]) -> Wrong:
    count = sum(int((a != 0x5A).sum()) for a in arrays)
    return [f"{count} bytes of arrays that have nothing to do with it were overwritten"] if count else []


def different_calls(comm: MPI.Intracomm) -> Wrong:
    with MpiTransport(comm) as transport:
        rank = transport.rank
        purpose = "bind" if rank else "version 3"
        words = "got rank 0: version 3; rank 1-3: bind"
        wrong = raised(DisagreementError, lambda: transport.exchange({rank: b"x" * rank}, purpose), words)
        return wrong + Case(transport).wrong()[1:] + _moved(Case(transport))


def _moved(case: Case) -> Wrong:
    case.bound.run()
    case.bound.wait(30)
    case.bound.close()
    return case.wrong()


def late_for_an_exchange(comm: MPI.Intracomm) -> Wrong:
    transport = MpiTransport(comm, timeout=30)
    rank, mine = transport.rank, b"\xff" * 300_000
    arrays: list[Any] = []
    wrong: Wrong = []
    transport.exchange({rank: b""}, "all are here")
    with others_first(comm):
        if rank == LATE:
            transport.timeout = LIMIT
            try:
                transport.exchange({rank: mine}, "bind")
            except M2nError:  # or not: MPI may have all that it needs
                pass
        else:
            words = f"bind (exchange 1) took longer than {LIMIT:g} s: rank {LATE} did not come"
            call = partial(transport.exchange, {rank: mine}, "bind", LIMIT)
            wrong += raised(TransferTimeout, call, words, within=LIMIT + SLACK)
            wrong += raised(TransportError, call, f"got one that broke: {words}", within=SLACK)
            del call, transport
            arrays = reuse_memory(RANKS * 8, count=5000)  # of the sizes, which are exchanged first
    comm.Barrier()
    return wrong + overwritten(arrays) + fresh(comm)


def nearly_late(comm: MPI.Intracomm) -> Wrong:
    """Those who wait have asked for the late one already; nothing of that is in the way afterwards."""
    with MpiTransport(comm, timeout=2 * LIMIT) as transport:
        rank = transport.rank
        for turn in range(2):
            transport.exchange({rank: b""}, "all are here")
            if rank == LATE and turn == 0:
                time.sleep(1.4 * LIMIT)
            said = transport.exchange({rank: bytes([rank + turn])}, "bind")
            if said != [bytes([each + turn]) for each in range(RANKS)]:
                return [f"got {said!r}"]
        return _moved(Case(transport)) + fresh(comm)


def limits_that_differ(comm: MPI.Intracomm) -> Wrong:
    """Those who wait for longer are not missing, and neither is one who has given up before."""
    transport = MpiTransport(comm, timeout=30)
    rank = transport.rank
    wrong: Wrong = []
    transport.exchange({rank: b""}, "all are here")
    with others_first(comm):
        if rank != LATE:
            call = partial(transport.exchange, {rank: b""}, "bind", LIMIT * (3 if rank else 1))
            wrong += raised(TransferTimeout, call, f"s: rank {LATE} did not come")
        else:
            transport.abort()
    return wrong + fresh(comm)


def late_for_a_run(comm: MPI.Intracomm) -> Wrong:
    transport = MpiTransport(comm, timeout=30)
    case = Case(transport)
    arrays: list[Any] = []
    wrong: Wrong = []
    with others_first(comm):
        if comm.rank == LATE:
            case.bound.run()
            wrong += _ignored(lambda: case.bound.wait(LIMIT))
        else:
            case.bound.run()
            words = f"from or to rank {LATE} were still under way at the time limit: rank {LATE} did not come"
            wrong += raised(TransferTimeout, lambda: case.bound.wait(LIMIT), words, within=LIMIT + SLACK)
            wrong += raised(TransportError, case.bound.run, "got one that broke in a run")
            nbytes = case.destination.nbytes
            del case, transport
            arrays = reuse_memory(nbytes)
    comm.Barrier()
    return wrong + overwritten(arrays) + fresh(comm)


def dropped_in_a_run(comm: MPI.Intracomm) -> Wrong:
    transport = MpiTransport(comm, timeout=30)
    case = Case(transport)
    arrays: list[Any] = []
    with others_first(comm):
        case.bound.run()
        if comm.rank == LATE:
            _ignored(lambda: case.bound.wait(LIMIT))
        else:
            nbytes = case.destination.nbytes
            del case, transport
            arrays = reuse_memory(nbytes)
    comm.Barrier()
    return overwritten(arrays) + fresh(comm)


def late_for_the_start(comm: MPI.Intracomm) -> Wrong:
    wrong: Wrong = []
    with others_first(comm):
        if comm.rank == LATE:
            _ignored(lambda: MpiTransport(comm, timeout=LIMIT))
        else:
            words = f"not all {RANKS} ranks came to make an MpiTransport within {LIMIT:g} s"
            wrong = raised(
                TransferTimeout, lambda: MpiTransport(comm, timeout=LIMIT), words, within=LIMIT + SLACK
            )
    return wrong + fresh(comm)


def _ignored(call: Callable[[], Any]) -> Wrong:
    try:
        call()
    except M2nError:
        pass
    return []


def fresh(comm: MPI.Intracomm) -> Wrong:
    """A new transport, after another one broke, is in order."""
    with MpiTransport(comm) as transport:
        return _moved(Case(transport))


def waits_in_another_order(comm: MPI.Intracomm) -> Wrong:
    wrong: Wrong = []
    with MpiTransport(comm) as transport:
        cases = [Case(transport, seed) for seed in range(3)]
        for turn in range(2):
            for case in cases if comm.rank % 2 or not turn else cases[::-1]:
                case.bound.run()
            for case in cases if comm.rank else cases[::-1]:
                case.bound.wait(30)
            for case in cases:
                wrong += case.wrong()
                case.destination[:] = -1
        for case in cases:
            case.bound.close()
    return wrong


def spaces_come_round(comm: MPI.Intracomm) -> Wrong:
    with MpiTransport(comm) as transport:
        rank = transport.rank
        transport._tags = 5
        first = Case(transport)
        for _ in range(4):
            transport.exchange({rank: b""})
        wrong = raised(
            TransportError, lambda: Case(transport), "expected at most 5 exchanges", "close it and bind it"
        )
        wrong += _moved(first)
        del first
        for _ in range(4):
            transport.exchange({rank: b""})
        return wrong + _moved(Case(transport))


def ended(comm: MPI.Intracomm) -> Wrong:
    wrong: Wrong = []
    for end, word in ((MpiTransport.abort, "was aborted"), (MpiTransport.close, "was closed")):
        transport = MpiTransport(comm)
        case = Case(transport)
        end(transport)
        end(transport)
        for call in (
            lambda t=transport: t.exchange({t.rank: b""}),
            lambda t=transport: t.prepare([]),
            transport.discover_domains,
            case.bound.run,
            lambda t=transport: Case(t),
        ):
            wrong += raised(TransportError, call, f"expected a transport in order, got one that {word}")
        case.bound.close()
    return wrong + raised(TransportError, MpiTransport, "expected an mpi4py intracommunicator, got None")


def dropped(comm: MPI.Intracomm) -> Wrong:
    """More than MPI has communicators for, some of them in cycles of references."""
    from mpi4py import MPI

    for number in range(3000):
        transport: Any = MpiTransport(MPI.COMM_SELF)
        if number % 3 == 0:
            transport.itself = transport
    return []


def what_is_held(comm: MPI.Intracomm) -> Wrong:
    """Nothing stays of what went well."""
    from nccl_m2n.transport.ranks import Held

    before = len(Held._things)
    wrong = fresh(comm)
    left = len(Held._things) - before
    return wrong + ([f"{left} things are still held"] if left else [])


CASES: dict[str, Callable[[MPI.Intracomm], Wrong]] = {
    case.__name__.replace("_", " "): case
    for case in (
        different_calls, late_for_an_exchange, nearly_late, limits_that_differ, late_for_a_run, dropped_in_a_run,
        late_for_the_start, waits_in_another_order, spaces_come_round, ended, dropped, what_is_held,
    )
}  # fmt: skip


def main() -> None:
    warnings.simplefilter("error")
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    for name, case in CASES.items():
        began = time.monotonic()
        try:
            wrong = case(comm)
        except Exception:
            wrong = [traceback.format_exc()]
        every = comm.gather([f"rank {comm.rank}: {what}" for what in wrong])
        if every is not None:
            said = [what for each in every for what in each]
            print(json.dumps([name, said, round(time.monotonic() - began, 2)]), flush=True)


if __name__ == "__main__":
    main()
