# SPDX-License-Identifier: Apache-2.0
"""`reshard` in one call, by every transport: what it moves and what it refuses, on all ranks alike."""

from __future__ import annotations

import gc
import json
import re
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from nccl_m2n import Layout, M2nError, Mesh, Replicate, Shard, StridedShard, Topology, reshard
from tests.execution.reshard_turns import APART, TURNS, bindings_made
from tests.scenarios import RANKS, UNTOUCHED

Problem = dict[str, Any]
SRC, DST = Mesh.arange((2, 2)), Mesh.arange((4,), start=4)


def problem(rank: int, **changes: Any) -> Problem:
    """What a rank passes: a (8, 12) tensor, sharded both ways on 0-3 and in columns on 4-7."""
    given: Problem = {
        "global_shape": None,
        "src_mesh": SRC,
        "src_placements": [Shard(0), Shard(1)],
        "dst_mesh": DST,
        "dst_placements": [Shard(1)],
        "topology": None,
        "shape": (8, 12),
    }
    return given | changes


def arrays(rank: int, given: Problem, turn: int = 0, dtype: str = "int32") -> tuple[Any, Any, Any]:
    """The source array, the destination array and what is expected in it."""
    shape = given["shape"]
    values = np.arange(turn, turn + int(np.prod(shape)), dtype=dtype).reshape(shape)
    source = Layout(shape, given["src_mesh"], given["src_placements"])
    destination = Layout(shape, given["dst_mesh"], given["dst_placements"])
    src = source.slice_global(values, rank) if rank in source.ranks else None
    if rank not in destination.ranks:
        return src, None, None
    expected = destination.slice_global(values, rank)
    dst = np.empty_like(expected)
    dst.reshape(-1).view(np.uint8)[...] = UNTOUCHED
    return src, dst, expected


def call(transport: Any, made: dict[int, tuple[Any, Any, Any]], given: Problem) -> None:
    """One collective call with every local rank's arrays."""
    src, dst = ({r: m[i] for r, m in made.items() if m[i] is not None} for i in (0, 1))
    if len(transport.local_ranks) == 1:
        src, dst = (side.get(transport.local_ranks[0]) for side in (src, dst))
    reshard(src, dst, transport, **{k: v for k, v in given.items() if k != "shape"})


def moves(**changes: Any) -> Callable[[Any], list[str]]:
    """The right values arrive, three times over, and only the first call binds anything."""

    def case(transport: Any) -> list[str]:
        given = problem(0, **changes)
        made = {rank: arrays(rank, given) for rank in transport.local_ranks}
        wrong, before = [], 0
        for turn in range(3):
            for rank in transport.local_ranks:
                src, _, expected = arrays(rank, given, turn)
                if src is not None:
                    made[rank][0][...] = src
                if expected is not None:
                    made[rank][2][...] = expected
            call(transport, made, given)
            before = before or bindings_made(transport)  # by then; a former case may have left just this one
            for rank, (_, dst, expected) in made.items():
                if expected is not None and not np.array_equal(dst, expected):
                    wrong.append(f"rank {rank}, turn {turn}: {dst}")
        return wrong if bindings_made(transport) == before else [*wrong, "the binding was not remembered"]

    return case


def new_arrays_of_one_rank(transport: Any) -> list[str]:
    """All ranks bind anew when a single one has other arrays, which alone could not know."""
    given = problem(0)
    made = {rank: arrays(rank, given) for rank in transport.local_ranks}
    call(transport, made, given)
    if 5 in made:
        made[5] = arrays(5, given)
    call(transport, made, given)
    return [
        f"rank {r}" for r, (_, dst, want) in made.items() if dst is not None and not np.array_equal(dst, want)
    ]


def lets_go_of_arrays(transport: Any) -> list[str]:
    """What is remembered are places: the arrays of a call live no longer than until the next."""
    given = problem(0)
    made = {rank: arrays(rank, given) for rank in transport.local_ranks}
    call(transport, made, given)
    kept = [weakref.ref(a) for held in made.values() for a in held[:2] if a is not None]
    made = {rank: arrays(rank, given) for rank in transport.local_ranks}
    call(transport, made, given)
    gc.collect()
    return (
        [f"{sum(one() is not None for one in kept)} arrays are still held"]
        if any(r() is not None for r in kept)
        else []
    )


def refuses(
    message: str,
    where: int,
    error: str = "LayoutError",
    dtype: str = "int32",
    given: Any = None,
    **changes: Any,
) -> Any:
    """Rank `where` alone passes something else; every rank must hear of it."""

    def case(transport: Any) -> list[str]:
        rank = transport.local_ranks[0]
        made = {rank: arrays(rank, problem(rank), dtype=dtype if rank == where else "int32")}
        if rank == where and given is not None:
            made[rank] = (given, *made[rank][1:])
        said = None
        try:
            call(transport, made, problem(rank, **(changes if rank == where else {})))
        except M2nError as raised:
            said = [type(raised).__name__, str(raised)]
        everyone = [json.loads(text) for text in transport.exchange({rank: json.dumps(said).encode()})]
        if said is None or said[0] != error or not re.search(message, said[1]):
            return [f"expected {error}: {message}, got {said}"]
        dst = made[rank][1]
        written = dst is not None and not (dst.view(np.uint8) == UNTOUCHED).all()
        alike = all(other == said for other in everyone)
        wrong = (["written"] if written else []) + ([] if alike else [f"told different things: {everyone}"])
        return wrong + moves()(transport)  # the transport is as good as before

    return case


UNEVEN = {"shape": (5, 7), "global_shape": (5, 7)}
MOVES = {
    "even shards, shape inferred": moves(),
    "uneven shards": moves(**UNEVEN),
    "ranks in another order": moves(dst_mesh=Mesh([7, 4, 6, 5])),
    "replicas": moves(dst_placements=[Replicate()]),
    "strided": moves(src_placements=[StridedShard(0, 2), Shard(0)]),
    "the same ranks": moves(dst_mesh=Mesh([[3, 1], [0, 2]]), dst_placements=[Shard(1), Replicate()]),
    "a topology given": moves(topology=Topology.regular(RANKS, 2)),
    "what nccl.m2n wants to be told": moves(
        src_local_shape=(4, 6), src_dtype="int32", dst_local_shape=(8, 3), dst_dtype=np.int32
    ),
    "new arrays of one rank": new_arrays_of_one_rank,
    "arrays let go of": lets_go_of_arrays,
    **TURNS,
}
REFUSES = {
    # First, while no topology is remembered: finding one out is collective.
    "another topology": refuses(
        r"got for the topology: ", 1, "DisagreementError", topology=Topology.regular(RANKS, 2)
    ),
    "a placement too few": refuses(r"rank 3: expected 2 source placements", 3, src_placements=[Shard(0)]),
    "a dimension out of range": refuses(r"rank 6: .*Shard\(7\).*got 7", 6, dst_placements=[Shard(7)]),
    "a rank twice": refuses(r"rank 1: expected distinct ranks", 1, src_mesh=[[0, 1], [2, 2]]),
    "no placement at all": refuses(r"rank 2: expected .*None", 2, src_placements=[None, Shard(0)]),
    "another placement": refuses(
        r"rank 7: tensor .*local shape", 7, dst_placements=[Shard(0)], global_shape=(8, 12)
    ),
    "another mesh": refuses(
        r"got for the details of tensor 'tensor': rank 0: ",
        0,
        "DisagreementError",
        dst_mesh=Mesh([5, 4, 6, 7]),
    ),
    "another shape": refuses(r"expected one global shape, got", 4, global_shape=(8, 13)),
    "another dtype": refuses(r"expected one source dtype, got int32 and float32", 1, dtype="float32"),
    "another local shape": refuses(r"expected one global shape, got", 2, src_local_shape=(4, 5)),
    "another dtype than the array's": refuses(
        r"expected one destination dtype, got .*int64", 6, dst_dtype="int64"
    ),
    "a topology without all ranks": refuses(
        r"rank 5: expected every rank of the plan in a domain",
        5,
        "PlanError",
        topology=Topology.regular(7, 7),
    ),
    "a shape that is none": refuses(r"rank 5: expected integers .*got 'ab'", 5, global_shape="ab"),
    "a shape of digits": refuses(r"rank 5: expected integers .*got '44'", 5, global_shape="44"),
    "a shape in fractions": refuses(
        r"rank 5: expected integers .*got \(8.5, 12\)", 5, global_shape=(8.5, 12)
    ),
    "domains for a topology": refuses(
        r"rank 1: expected a Topology as topology, got \[\[0, 1\]\] .*write Topology",
        1,
        "PlanError",
        topology=[[0, 1]],
    ),
    "no domains for a topology": refuses(r"rank 1: expected a Topology", 1, "PlanError", topology=[]),
    "a text for a mesh": refuses(r"rank 4: expected integer ranks in a mesh, got 'x'", 4, src_mesh="x"),
    "no mesh": refuses(r"rank 4: expected integer ranks in a mesh, got None", 4, dst_mesh=None),
    "one placement alone": refuses(
        r"rank 0: expected a sequence of destination placements, got Shard\(1\); .*\[Shard",
        0,
        dst_placements=Shard(1),
    ),
    "no placements": refuses(r"rank 0: expected a sequence of source placements", 0, src_placements=None),
    "a dtype that is none": refuses(r"rank 3: expected an element type.*got 'wide'", 3, src_dtype="wide"),
    "a list for an array": refuses(r"rank 2: source array: expected an array .*got list", 2, given=[1, 2]),
    "arrays of other ranks": refuses(
        r"rank 2: .*source arrays: expected those of the ranks that this process drives, 2, got one of 99",
        2,
        given={99: np.zeros(2)},
    ),
    "another local shape than the layout's": refuses(
        r"rank 7: expected a destination local shape of 8 × 12 .*got \(8, 4\)",
        7,
        global_shape=(8, 12),
        dst_local_shape=(8, 4),
    ),
    **APART,
}
