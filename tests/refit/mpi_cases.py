# SPDX-License-Identifier: Apache-2.0
"""What each of eight MPI processes does in `test_mpi`: refits of whole small models, its own rank's part of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nccl_m2n import DisagreementError, LayoutError, Mesh, MpiTransport, Parameter, Refit, Shard, Topology
from nccl_m2n.errors import M2nError
from nccl_m2n.layout import Layout

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
        (LayoutError, "rank 3: ", np.zeros((3, 1) if transport.rank == 3 else (1, 3))),
    ):
        try:
            Refit(transport, [Parameter("w", rows, array)], [Parameter("w", rows, array.copy())])
            wrong.append(f"rank {transport.rank}: nothing was raised")
        except kind as error:
            wrong += [] if said in str(error) else [f"rank {transport.rank}: {error}"]
    return wrong


def _cases() -> dict[str, Case]:
    pairs = [(f, s, d, 4, f"{s} to {d}, apart") for f, s, d in APART]
    pairs += [(f, SOURCES[s], DESTINATIONS[d], 0, f"{s} to {d}, together") for f, s, d in TOGETHER]
    made: dict[str, Case] = {
        f"{family}: {name}": lambda t, f=family, s=source, d=destination, at=start: move(t, f, s, d, at)
        for family, source, destination, start, name in pairs
    }
    return made | {"torn": torn, "different": different}


CASES = _cases()
