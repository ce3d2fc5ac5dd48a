# SPDX-License-Identifier: Apache-2.0
"""Sizes and shapes from the field, at the level of plans."""

from __future__ import annotations

import numpy as np
import pytest

from nccl_m2n import Layout, Mesh, Replicate, Segment, Shard, StridedShard, Topology, Transfer, plan
from nccl_m2n.planning.rounds import MAX_MESSAGES
from tests.planning import replay


def one(size: int, start: int = 0) -> Mesh:
    return Mesh.arange((size,), start)


def move(shape: tuple[int, ...], source, destination, dtype: str = "int8", name: str = "w") -> Transfer:
    """A transfer between two meshes, each given with its placements."""
    return Transfer(Layout(shape, *source), Layout(shape, *destination), dtype, name)


ALL = [Replicate()]
ROWS = [Shard(0)]

# 7 over 3 to 7 over 5; 10 over TP3 to TP4; more ranks than rows; nothing for the empty one; …
FIELD = {
    "10 over 4 to 5": (Layout((10, 3), one(4), [Shard(0)]), Layout((10, 3), one(5, 4), [Shard(0)])),
    "7 over 3 to 5": (Layout((7, 2), one(3), [Shard(0)]), Layout((7, 2), one(5, 3), [Shard(0)])),
    "10 over 3 to 4": (Layout((10,), one(3), [Shard(0)]), Layout((10,), one(4, 3), [Shard(0)])),
    "2 over 5 to 7": (Layout((2, 9), one(5), [Shard(0)]), Layout((2, 9), one(7, 5), [Shard(0)])),
    "FSDP over TP to TP": (
        Layout((10, 3), Mesh.arange((2, 2)), [StridedShard(0, 2), Shard(0)]),
        Layout((10, 3), one(3, 4), [Shard(0)]),
    ),
    "strided to nested on the same ranks": (
        Layout((5,), Mesh.arange((2, 2)), [StridedShard(0, 2), Shard(0)]),
        Layout((5,), Mesh.arange((2, 2)), [Shard(0), Shard(0)]),
    ),
    "gate and up over 8 to 4": (
        Layout((2 * 88, 3), one(8), [Shard(0, segments=(88, 88))]),
        Layout((2 * 88, 3), one(4, 8), [Shard(0, segments=(88, 88))]),
    ),
    "gate and up over 8 to 1": (
        Layout((2 * 88, 3), one(8), [Shard(0, segments=(88, 88))]),
        Layout((2 * 88, 3), one(1, 8), [Shard(0, segments=(88, 88))]),
    ),
    "unequal segments to a plain cut": (
        Layout((5152, 2), one(2), [Shard(0, segments=(2048, 2048, 512, 512, 32))]),
        Layout((5152, 2), one(2, 2), [Shard(0)]),
    ),
    "64 query and 2 KV heads, TP2 to TP8": (
        Layout((68 * 4, 3), one(2), [Shard(0, segments=(64 * 4, 8, 8))]),
        Layout((68 * 4, 3), one(8, 2), [Shard(0, segments=(64 * 4, Segment(8, 2), Segment(8, 2)))]),
    ),
    "8 KV heads, TP16 to TP4": (
        Layout((8 * 4, 3), one(16), [Shard(0, segments=(Segment(8 * 4, 8),))]),
        Layout((8 * 4, 3), one(4, 16), [Shard(0)]),
    ),
    "experts, EP4 x FSDP8 to TP4 x EP2": (
        Layout((8, 16, 3), Mesh.arange((4, 8)), [Shard(0), Shard(1)]),
        Layout((8, 16, 3), Mesh.arange((2, 4), 32), [Shard(0), Shard(2)]),
    ),
    "384 experts over 8 x 32": (
        Layout((384, 2), Mesh.arange((8, 32)), [Shard(0), Shard(0)]),
        Layout((384, 2), one(8), [Shard(0)]),
    ),
    "rank 8, mesh of 4 axes": (
        Layout(
            (2, 3, 2, 3, 2, 1, 2, 3), Mesh.arange((2, 3, 2, 2)), [Shard(7), Shard(1), Replicate(), Shard(4)]
        ),
        Layout((2, 3, 2, 3, 2, 1, 2, 3), Mesh.arange((3, 2), 5), [Shard(3), Shard(0)]),
    ),
    "scalar": (Layout((), one(2), [Replicate()]), Layout((), one(5, 1), [Replicate()])),
    "extent 0": (Layout((3, 0), one(2), [Shard(0)]), Layout((3, 0), one(3), [Shard(1)])),
    "4 bytes over many ranks": (Layout((4,), one(40), [Shard(0)]), Layout((4,), one(40, 20), [Replicate()])),
    "ranks far apart": (
        Layout((6,), Mesh([900, 3]), [Shard(0)]),
        Layout((6,), Mesh([41, 7, 900]), [Shard(0)]),
    ),
}


@pytest.mark.parametrize("per_domain", [1, 4, 8, 1000])
@pytest.mark.parametrize("name", FIELD)
def test_field_cases(name: str, per_domain: int) -> None:
    source, destination = FIELD[name]
    topology = Topology.regular(max(source.ranks + destination.ranks) + 1, per_domain)
    replay.check(plan(Transfer(source, destination, "int16", "w"), topology))


def test_nothing_goes_to_an_empty_shard() -> None:
    made = plan(Transfer(Layout((5, 2), one(2), [Shard(0)]), Layout((5, 2), one(4, 2), [Shard(0)]), "int8"))
    assert made.traffic().nvlink_received.tolist() == [0, 0, 4, 4, 2, 0]
    assert len(made.program(5).messages) == 0


@pytest.mark.parametrize("chunk_bytes", [1, 16, 17, 100, 4096, 1 << 40, None])
def test_chunk_sizes(chunk_bytes: int | None) -> None:
    """The result does not depend on how it is cut; chunks keep to the bound as far as 16 bytes do."""
    tensors = [
        Transfer(Layout((31, 3), one(3), [Shard(0)]), Layout((31, 3), one(4, 3), [Replicate()]), dtype, dtype)
        for dtype in ("uint8", "bfloat16", "float64")
    ]
    made = plan(tensors, Topology.regular(8, 2), chunk_bytes=chunk_bytes)
    run = replay.check(made)
    largest = max(p.chunks["bytes"].max(initial=0) for p in run.programs.values())
    assert largest <= max(chunk_bytes or 1 << 40, 16)


@pytest.mark.parametrize("staging_bytes", [1, 64, 1 << 10, 1 << 14, 1 << 20])
def test_staging_is_bounded(staging_bytes: int) -> None:
    tensors = [move((64, 8), (one(4), ROWS), (one(4, 4), ALL), "float32", f"t{i}") for i in range(8)]
    made = plan(tensors, Topology.regular(8, 4), staging_bytes=staging_bytes)
    replay.check(made)
    # Four receive slots of one 16-byte chunk for each of three fan-outs and an entry, and a packed one.
    assert made.staging.max() <= max(staging_bytes, 2 * 5 * 16)


def test_32_to_1() -> None:
    made = plan(
        move((320, 64), (one(32, 1), ROWS), (one(1), ROWS), "bfloat16"),
        Topology.regular(33, 8),
    )
    traffic = replay.check(made).plan.traffic()
    assert traffic.network_bytes == 25 * 10 * 64 * 2  # ranks 8 to 32 are elsewhere


def test_1_to_128() -> None:
    made = plan(
        move((1 << 22,), (one(1), ALL), (one(128), ALL)),
        Topology.regular(128, 8),
    )
    made.check()
    traffic = made.traffic()
    assert traffic.network_bytes == 15 << 22
    assert traffic.sent[0] == 1 << 22  # once, not fifteen times
    assert traffic.sent[1:].max() <= (1 << 22) / 8 * 1.05


def test_one_to_many_is_a_chain_of_pipelined_hops() -> None:
    """Depth grows with the number of domains, rounds with depth, so the pipeline stays full."""
    made = plan(
        move((1 << 28,), (one(1), ALL), (one(64), ALL)),
        Topology.regular(64, 8),
    )
    assert made.depth == 7
    assert made.chunk_rounds >= 16 * made.depth


@pytest.mark.parametrize("shape", [(2**40,), (2**20, 2**20)])
def test_a_trillion_elements(shape: tuple[int, ...]) -> None:
    last = len(shape) - 1
    made = plan(
        move(shape, (one(4), ROWS), (Mesh.arange((2, 2), 4), [Replicate(), Shard(last)])),
        Topology.regular(8, 4),
    )
    made.check()
    traffic = made.traffic()
    assert traffic.network_bytes == traffic.network_bytes_bound == np.prod(shape, dtype=object)
    assert made.staging.max() <= 256 << 20


def test_odd_bytes_before_bfloat16() -> None:
    """A stream holds wide elements first, so no element is cut and none lies at an odd place."""
    made = plan(
        [
            move((n,), (one(2), ROWS), (one(3, 2), ALL), dtype, f"{dtype}{n}")
            for dtype, n in [
                ("uint8", 13),
                ("bfloat16", 7),
                ("uint8", 1),
                ("complex64", 5),
                ("V3", 5),
                ("V12", 3),
            ]
        ],
        Topology.regular(5, 2),
        chunk_bytes=16,
    )
    run = replay.check(made)
    for program in run.programs.values():
        for side, cells in ((False, program.source_cells), (True, program.destination_cells)):
            spans = program.spans[program.chunks["received"][program.spans["chunk"]] == side]
            size = np.array([t.wire_size for t in made.transfers])[cells["transfer"][spans["cell"]]]
            unit = np.minimum(size & -size, 16)
            for field in ("start", "stop", "offset"):
                assert (spans[field] % unit == 0).all()


def test_messages_of_a_group_are_capped() -> None:
    tensors = [
        move((32 << 10,), (one(32), ROWS), (Mesh.arange((n, 32 // n), 32), [*ALL, *ROWS]), "int8", f"t{n}")
        for n in (1, 2, 4, 8, 16)
    ]
    made = plan(tensors, Topology.regular(64, 32), chunk_bytes=16)
    most = 0
    for rank in made.ranks:
        most = max(most, np.bincount(made.program(rank).messages["round"]).max())
    assert most <= MAX_MESSAGES
