# SPDX-License-Identifier: Apache-2.0
"""What each of eight MPI processes does in `test_mpi`: refits of whole small models, its own rank's part of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from nccl_m2n import (
    DisagreementError,
    LayoutError,
    Mesh,
    MpiTransport,
    Parameter,
    Refit,
    Shard,
    SocketTransport,
    Topology,
    TransferTimeout,
)
from nccl_m2n.errors import M2nError
from nccl_m2n.layout import Layout
from nccl_m2n.transport.base import Transport

from .test_families import DESTINATIONS, SOURCES, side

Case = Callable[[MpiTransport], list[str]]

# Half of the ranks on each side, or all of them on both (then a rank copies to itself what it has).
APART: list[tuple[str, Any, Any]] = [
    ("dense", ("megatron", 2, 2, 1, 2, 1, "grouped"), ("vllm", 4, 1, 1, False)),
    ("dense", ("fsdp", 2, 1, 2), ("vllm", 2, 1, 2, False)),
    ("moe", ("megatron", 1, 2, 2, 1, 2, "grouped"), ("vllm", 2, 1, 2, False)),
    ("moe", ("megatron", 1, 1, 4, 1, 4, "legacy"), ("vllm", 4, 1, 1, True)),
    ("mla", ("megatron", 2, 2, 2, 1, 1, "sequential"), ("vllm", 2, 2, 1, False)),
    ("mla", ("fsdp", 4, 1, 1), ("vllm", 4, 1, 1, True)),
]
TOGETHER = [
    ("dense", "megatron tp2 pp2 ep2", "vllm tp8"),
    ("dense, tied, few key-value heads, biases", "megatron pp4 ep2 etp1", "vllm tp4 dp2, experts parallel"),
    ("moe", "megatron tp2 ep4 etp1", "vllm tp2 pp2 dp2"),
    ("moe", "fsdp8", "vllm tp4 dp2, experts parallel"),
    ("mla", "megatron ep8", "vllm tp2 dp4"),
    ("mla", "megatron tp4 pp2 ep4 etp1", "vllm tp8"),
]


def move(transport: MpiTransport, family: str, source: Any, destination: Any, start: int) -> list[str]:
    """One refit, run twice; gives the names of this rank's arrays that are wrong."""
    rank = transport.rank
    trainer, _ = side(family, source, 0)
    generator, expected = side(family, destination, start)
    mine = generator.states.get(rank, {})
    wrong = []
    for turn in (1, 2):
        for array in mine.values():
            array.fill(-1)
        sides = [each.parameters.get(rank, []) for each in (trainer, generator)]
        with Refit(transport, *sides, Topology.regular(8, 4)) as refit:
            refit.run(version=turn)
            refit.wait(timeout=60)
            good = refit.report is not None and refit.report.share == 1.0 and refit.version == turn
            wrong += [] if good else [f"rank {rank}: {refit!r} {refit.report}"]
            wrong += [f"rank {rank}: verify says {name}" for name in refit.verify()]
        wrong += [f"rank {rank}: {n}" for n, a in mine.items() if a.tobytes() != expected[rank][n].tobytes()]
    return wrong


def torn(transport: MpiTransport) -> list[str]:
    """One rank breaks down between two runs: no rank takes what it has for a whole model."""
    rows = Layout((8, 3), Mesh.arange((4,)), [Shard(0)])
    columns = Layout((8, 3), Mesh.arange((4,), start=4), [Shard(0)])
    source = [Parameter("w", rows, np.full((2, 3), transport.rank))] if transport.rank < 4 else []
    array = np.zeros((2, 3), int)
    destination = [Parameter("w", columns, array)] if transport.rank >= 4 else []

    def load(name: str, tensor: Any) -> None:
        if transport.rank == 6:
            raise RuntimeError("no place for it")

    late = [Parameter("late", rows, np.zeros((2, 3)))] if transport.rank < 4 else []
    wanted = [Parameter("late")] if transport.rank >= 4 else []
    with Refit(transport, source + late, destination + wanted, load=load) as refit:
        refit.run(version=1)
        try:
            refit.wait(timeout=60)
        except M2nError as error:
            said = "rank 6: RuntimeError: no place for it" in str(error)
            return [] if said and refit.version is None else [f"rank {transport.rank}: {error}"]
    return [f"rank {transport.rank}: nothing was raised"]


def different(transport: MpiTransport) -> list[str]:
    """Two ranks call the same parameter by two element types, or one brings a wrong shape: all ranks hear of it."""
    rows = Layout((8, 3), Mesh.arange((8,)), [Shard(0)])
    dtype = np.float32 if transport.rank == 5 else np.float64
    wrong = []
    for kind, said, array in (
        (DisagreementError, "from rank 5", np.zeros((1, 3), dtype)),
        (LayoutError, "rank 3: ", np.zeros((2, 3) if transport.rank == 3 else (1, 3))),
    ):
        try:
            Refit(transport, [Parameter("w", rows, array)], [Parameter("w", rows, array.copy())])
            wrong.append(f"rank {transport.rank}: nothing was raised")
        except kind as error:
            wrong += [] if said in str(error) else [f"rank {transport.rank}: {error}"]
    return wrong


def simple(transport: MpiTransport, **options: Any) -> Refit:
    """Two tensors from ranks 0-3 to ranks 4-7."""
    rows = [Layout((8, 3), Mesh.arange((4,), start=at), [Shard(0)]) for at in (0, 4)]
    names, side = options.pop("mine", ("a", "b")), int(transport.rank >= 4)
    mine = [Parameter(name, rows[side], np.full((2, 3), transport.rank, float)) for name in names]
    return Refit(transport, *([], mine) if side else (mine, []), **options)


def raised(
    transport: MpiTransport, said: str, call: Callable[[], Any], kind: type[M2nError] = M2nError
) -> list[str]:
    """What is wrong about the error that a call raises: all ranks must raise the same one, in time."""
    began = time.monotonic()
    try:
        call()
    except kind as error:
        texts = set(transport.exchange({transport.rank: f"{type(error).__name__}: {error}".encode()}))
        late = [f"after {time.monotonic() - began:.1f} s"] if time.monotonic() - began > 5 else []
        same = [] if len(texts) == 1 else [f"other words: {sorted(texts)}"]
        return late + same + ([] if said in str(error) else [f"rank {transport.rank}: {error!r}"])
    transport.exchange({transport.rank: b"nothing"})
    return [f"rank {transport.rank}: nothing was raised"]


def usable(transport: MpiTransport, refit: Refit | None = None) -> list[str]:
    """The transport can still be used."""
    with refit or simple(transport) as made:
        made.run(version=7)
        made.wait(timeout=20)
        return [] if made.version == 7 and made.verify() == [] else [f"rank {transport.rank}: {made!r}"]


# What one rank, rank 2, is given otherwise than all others, and what all ranks then say.
OTHERWISE: dict[str, tuple[dict[str, Any], str]] = {
    "whole=5": ({"whole": 5}, "rank 2: expected "),
    "whole='*'": ({"whole": "*"}, "rank 2: expected "),
    "topology=5": ({"topology": 5}, "rank 2: expected "),
    "missing='x'": ({"missing": "x"}, "rank 2: expected "),
    "method='x'": ({"method": "x"}, "rank 2: expected "),
    "staging_bytes=-1": ({"staging_bytes": -1}, "rank 2: expected "),
    "chunk_bytes=nan": ({"chunk_bytes": float("nan")}, "rank 2: expected "),
    "bucket_bytes=-5": ({"bucket_bytes": -5}, "rank 2: expected "),
    "cast='yes'": ({"cast": "yes"}, "rank 2: expected an element type"),
    "names=5": ({"names": 5}, "rank 2: expected names to be a mapping"),
    "load=5": ({"load": 5}, "rank 2: expected load to be a function"),
    "names that raise": ({"names": {}.__getitem__}, "rank 2: KeyError: 'a'"),
    "no name": ({"mine": ()}, "'a', source side: expected every rank of"),
    "another name": ({"mine": ("a", "b", "c")}, "'c', source side: expected every rank of"),
    "a name twice": ({"mine": ("a", "a")}, "rank 2: expected one parameter of each name, got 'a' twice"),
    "another topology": ({"topology": Topology.single(range(8))}, "got for topology: rank 0-1, 3-7: nothing"),
    "another cast": ({"cast": True}, "got for cast: "),
    "another missing": ({"missing": "skip"}, "got for missing: rank 0-1, 3-7: error; rank 2: skip"),
    "another whole": ({"whole": ["a"]}, "got for whole"),
    "another bucket": ({"bucket_bytes": 4096}, "got for bucket_bytes"),
    "another method": ({"method": "direct"}, "got for method: rank 0-1, 3-7: reshard; rank 2: direct"),
    "another staging": ({"staging_bytes": 1 << 20}, "got for staging_bytes"),
    "another chunk": ({"chunk_bytes": 1 << 20}, "got for chunk_bytes"),
}


def otherwise(transport: MpiTransport, options: dict[str, Any], said: str) -> list[str]:
    """One rank constructs otherwise: all raise the same, and the transport is as it was."""
    mine = options if transport.rank == 2 else {}
    return raised(transport, said, lambda: simple(transport, **mine)) + usable(transport)


def subsets(transport: MpiTransport) -> list[str]:
    """One rank means another subset, or none that there is: all raise the same, and go on."""
    odd, wrong = transport.rank == 5, []
    with simple(transport) as refit:
        for method in ("prepare", "run", "capture", "verify"):
            for only, said in (
                (["nothing"], "rank 5: expected names of parameters of this refit"),
                ([], "rank 5: expected names of parameters of this refit"),
                (5, "rank 5: expected only to be names"),
                (["b"], "rank 5: "),
                (["a", "b"], "rank 5: "),
            ):
                call = getattr(refit, method)
                wrong += raised(
                    transport, said, lambda call=call, only=only: call(only=only if odd else ["a"])
                )
        refit.run(only="a", version=3)
        refit.wait(timeout=20)
        wrong += [] if refit.version == 3 and refit.verify() == ["b"] else [f"{refit!r}"]
        return wrong + usable(transport, refit)


def versions(transport: MpiTransport) -> list[str]:
    """Ranks that stamp a run differently stamp nothing, and go on."""
    wrong = []
    with simple(transport) as refit:
        for version, said in (
            (2, "got for the version: "),
            ("2", "rank 5: expected a whole number as version"),
        ):
            refit.run(version=version if transport.rank == 5 else 1)
            wrong += raised(transport, said, lambda: refit.wait(timeout=20))
            wrong += [] if refit.version is None else [f"{refit!r}"]
        return wrong + usable(transport, refit)


def loaders(transport: MpiTransport) -> list[str]:
    """A rank without a loader is heard of before anything moves, one whose loader fails after."""
    rows = Layout((8, 3), Mesh.arange((4,)), [Shard(0)])
    source = [Parameter("w", rows, np.full((2, 3), transport.rank))] if transport.rank < 4 else []
    wanted = [Parameter("w")] if transport.rank >= 4 else []
    got: list[int] = []

    def load(name: str, tensor: Any) -> None:
        got.append(int(tensor.sum()))
        if transport.rank == 6 and len(got) < 2:
            raise RuntimeError("no place for it")

    mine = None if transport.rank == 5 else load
    wrong = raised(
        transport, "rank 5: parameter 'w' has no layout", lambda: Refit(transport, source, wanted, load=mine)
    )
    with Refit(transport, source, wanted, load=load) as refit:
        refit.run(version=1)
        wrong += raised(transport, "rank 6: RuntimeError: no place for it", lambda: refit.wait(timeout=20))
        wrong += [] if refit.version is None else [f"{refit!r}"]
        wrong += usable(transport, refit)
    return wrong + ([] if got == [36, 36][: 2 * (transport.rank >= 4)] else [f"rank {transport.rank}: {got}"])


def _another(transport: Transport) -> Transport:
    """A transport of the same kind among the same ranks. Collective."""
    if isinstance(transport, SocketTransport):
        return SocketTransport.from_environment()
    from mpi4py import MPI

    return MpiTransport(MPI.COMM_WORLD)


def limits(transport: MpiTransport) -> list[str]:
    """One rank has its bytes and does not come to stamp them: the others raise within the limit of `wait`."""
    own = _another(transport)  # it will be broken
    refit, late = simple(own), transport.rank == 5
    refit.run(version=1)
    if late:
        refit._subsets.all.moving.bound.wait(timeout=20)
        time.sleep(2)
    began = time.monotonic()
    try:
        refit.wait(timeout=1)
        wrong = ["nothing was raised"]
    except TransferTimeout as error:
        took = time.monotonic() - began
        in_time = took < 2 if late else 0.9 < took < 2  # over TCP who is late hears of it at once
        wrong = [] if "version" in str(error) and in_time else [f"after {took:.1f} s: {error}"]
    wrong += [] if refit.version is None else ["a version was stamped"]
    transport.exchange({transport.rank: b""}, "come together again")
    return [f"rank {transport.rank}: {each}" for each in wrong]


def rebinds(transport: MpiTransport) -> list[str]:
    """A destination sleeps and wakes with other arrays; one that does not fit on one rank is refused on all."""
    rows = [Layout((8, 3), Mesh.arange((4,), start=at), [Shard(0)]) for at in (0, 4)]
    side, wrong = int(transport.rank >= 4), []
    source = [Parameter("w", rows[0], np.full((2, 3), transport.rank))]

    def wake(shape: tuple[int, ...] = (2, 3)) -> list[Parameter]:
        return [Parameter("w", rows[1], np.zeros(shape, int))] if side else []

    arrays = wake()
    with Refit(transport, [] if side else source, arrays) as refit:
        for turn in range(3):
            refit.release()
            arrays = wake() if transport.rank != 6 else arrays  # rank 6 keeps its own
            mine = arrays if side and transport.rank != 6 else None
            refit.rebind(destination=mine)
            for call in (lambda: refit.rebind(destination=wake((3, 2) if transport.rank == 5 else (2, 3))),
                         lambda: refit.rebind(source=[] if transport.rank == 2 else None)):  # fmt: skip
                wrong += raised(
                    transport, "rank 5: " if call.__code__.co_consts.count(5) else "rank 2: ", call
                )
            refit.run(version=turn)
            refit.wait(timeout=20)
            wrong += [] if refit.version == turn and refit.verify() == [] else [f"{refit!r}"]
            wrong += [] if not side or (arrays[0].array == transport.rank - 4).all() else [f"{arrays}"]
    return [f"rank {transport.rank}: {each}" for each in wrong]


def _cases() -> dict[str, Case]:
    pairs = [(f, s, d, 4, f"{s} to {d}, apart") for f, s, d in APART]
    pairs += [(f, SOURCES[s], DESTINATIONS[d], 0, f"{s} to {d}, together") for f, s, d in TOGETHER]
    made: dict[str, Case] = {
        f"{family}: {name}": lambda t, f=family, s=source, d=destination, at=start: move(t, f, s, d, at)
        for family, source, destination, start, name in pairs
    }
    made |= {
        f"rank 2 constructs otherwise: {name}": lambda t, one=one: otherwise(t, *one)
        for name, one in OTHERWISE.items()
    }
    return made | {
        "torn": torn,
        "different": different,
        "subsets": subsets,
        "versions": versions,
        "loaders": loaders,
        "limits": limits,
        "rebinds": rebinds,
    }


CASES = _cases()
