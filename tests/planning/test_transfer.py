# SPDX-License-Identifier: Apache-2.0
"""Transfers, topologies and options: what is taken and what is refused."""

from __future__ import annotations

import pickle

import pytest

import nccl_m2n
from nccl_m2n import Box, Layout, LayoutError, Mesh, PlanError, Replicate, Shard, Topology, Transfer, plan

SOURCE = Layout((8, 6), Mesh([0, 1]), [Shard(0)])
DESTINATION = Layout((8, 6), Mesh([2, 3]), [Shard(1)])
T = Transfer(SOURCE, DESTINATION, "float32", "layers.0.weight")


@pytest.mark.parametrize(
    "value",
    [
        T,
        Transfer(SOURCE, DESTINATION, "float32", "w", "bfloat16"),
        Topology([[0, 2], [1]]),
        Topology.single([3]),
    ],
    ids=str,
)
def test_values(value: object) -> None:
    made = eval(repr(value), {name: getattr(nccl_m2n, name) for name in nccl_m2n.__all__})
    assert made == value
    assert hash(made) == hash(value)
    assert repr(made) == repr(value)
    assert pickle.loads(pickle.dumps(value)) == value


@pytest.mark.parametrize(
    ("dtype", "other", "wire", "size"),
    [
        ("float32", None, "float32", 4),
        ("float32", "float32", "float32", 4),
        ("float32", "bfloat16", "bfloat16", 2),
        ("bfloat16", "float32", "bfloat16", 2),
        ("float16", "bfloat16", "float16", 2),
        ("bfloat16", "float8_e4m3fn", "float8_e4m3fn", 1),
        ("float64", "float32", "float32", 4),
        ("bool", None, "bool", 1),
        ("complex64", None, "complex64", 8),
        ("V3", None, "V3", 3),
    ],
)
def test_the_narrower_type_crosses_the_wire(dtype: str, other: str | None, wire: str, size: int) -> None:
    transfer = Transfer(SOURCE, DESTINATION, dtype, "w", other)
    assert (transfer.wire_dtype, transfer.wire_size) == (wire, size)


HUGE, LONG = (
    Transfer(
        Layout((n,), Mesh([0]), [Replicate()]), Layout((n,), Mesh([1, 2]), [Replicate()]), "complex128", "w"
    )
    for n in (2**58, 2**52)
)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Transfer(SOURCE, Layout((6, 8), Mesh([2]), [Shard(0)]), "int8", "w"),
            r"tensor 'w': expected one global shape on both sides, got \(8, 6\) at the source and \(6, 8\)",
        ),
        (
            lambda: Transfer(SOURCE, DESTINATION, "int8", "w", "int16"),
            r"tensor 'w': expected equal element types.*got int8 at the source and int16 at the destination",
        ),
        (
            lambda: Transfer(SOURCE, DESTINATION, "float32", "w", "int32"),
            r"got float32 at the source and int32",
        ),
        (lambda: Transfer(SOURCE, DESTINATION, "complex64", "w", "float32"), r"got complex64 at the source"),
        (lambda: Transfer(SOURCE, DESTINATION, "bfloat17", "w"), r"expected an element type.*got 'bfloat17'"),
        (lambda: Transfer(SOURCE, DESTINATION, object, "w"), r"Python objects cannot be moved"),
        (lambda: Topology([[0, 1], [1, 2]]), r"each rank in one domain.*got rank 1 in several domains"),
        (lambda: Topology([[0], []]), r"no domain empty, got domains \(\(0,\), \(\)\)"),
        (
            lambda: Topology([[-1]]),
            r"expected integers from 0 .* as the ranks of a domain, got \[-1\]; one list of ranks",
        ),
        (lambda: Topology([]), r"expected at least one domain"),
        (
            lambda: Topology.regular(0, 4),
            r"expected a whole number from 1 to 1048576 as the number of ranks, got 0",
        ),
        (lambda: Topology.regular(4, 0), r"expected a whole number of 1 or more as ranks a domain, got 0"),
        (
            lambda: Topology([[0, 1]]).domain_of(2),
            r"expected every rank .* in a domain .*, got none for rank 2",
        ),
        (
            lambda: plan(T, Topology.regular(3, 3)),
            r"got none for rank 3; the topology has 3 ranks in 1 domains",
        ),
        (lambda: plan(HUGE), r"fewer than 2\*\*62 bytes in all, got 9223372036854775808; plan a part"),
        (
            lambda: plan(LONG),
            r"at most 4194304 rounds, got \d+ for \d+ bytes of one flow; give more staging_bytes",
        ),
        (
            lambda: plan([T, T]),
            r"expected one transfer of each name, got 'layers.0.weight' twice: transfers 0 and 1",
        ),
        (
            lambda: plan(["w"]),
            r"expected a Transfer as each transfer, got 'w' of type str; make them with Transfer\(source",
        ),
        (
            lambda: plan(T, method="fast"),
            r"expected one of reshard, direct, gather_broadcast as method, got 'fast'",
        ),
        (lambda: plan(T, chunk_bytes=0), r"expected a whole number of 1 or more as chunk_bytes, got 0"),
        (lambda: plan(T, staging_bytes=-1), r"expected a whole number of 1 or more as staging_bytes, got -1"),
    ],
)
def test_what_is_refused(make, message: str) -> None:
    with pytest.raises((PlanError, LayoutError), match=message):
        make()


def test_a_hole_in_the_source_is_named() -> None:
    holed = Layout.from_pieces((8, 6), {0: [Box((0, 0), (5, 6))], 1: [Box((6, 0), (8, 6))]})
    with pytest.raises(
        PlanError,
        match=r"tensor 'w': expected source pieces that cover box \[0:8, 0:3\] needed by ranks \[2\], "
        r"got none for 3 of its elements; give the missing pieces",
    ):
        plan(Transfer(holed, DESTINATION, "int8", "w"))


def test_a_hole_that_nobody_needs_is_none() -> None:
    holed = Layout.from_pieces((8, 6), {0: [Box((0, 0), (5, 6))]})
    top = Layout.from_pieces((8, 6), {1: [Box((2, 1), (5, 6))]})
    plan(Transfer(holed, top, "int8")).check()


def test_a_topology() -> None:
    topology = Topology([(5, 1), (0, 7, 3)])
    assert topology.ranks == (0, 1, 3, 5, 7)
    assert [topology.domain_of(rank) for rank in topology.ranks] == [1, 0, 1, 0, 1]
    assert Topology.regular(ranks=5, per_domain=2).domains == ((0, 1), (2, 3), (4,))
    assert str(topology) == "5 ranks in 2 domains of 2-3"
    assert Topology([[0, 1], [2, 3]]) != Topology([[2, 3], [0, 1]])


def test_replicated_everywhere_is_one_flow_for_all_tensors() -> None:
    """Thousands of small tensors between the same ranks are one stream."""
    source, destination = (Layout((5,), Mesh([rank]), [Replicate()]) for rank in (0, 1))
    made = plan([Transfer(source, destination, "uint8", f"t{i}") for i in range(3000)])
    assert len(made.flows) == 1
    assert made.rounds == 1
    assert made.traffic().nvlink_bytes == 15000
