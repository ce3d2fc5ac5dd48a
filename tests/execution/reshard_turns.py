# SPDX-License-Identifier: Apache-2.0
"""`reshard` called in turns that ranks see differently: what one rank remembers is not what all of them mean."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from nccl_m2n import Layout, LayoutError, M2nError, Mesh, Replicate, Shard, reshard
from tests.scenarios import UNTOUCHED

Call = dict[str, Any]
ROWS, ONE, COLUMNS, SWAPPED = (
    (Mesh.arange((4,)), Shard(0)),
    (Mesh([0]), Replicate()),
    (Mesh.arange((4,), start=4), Shard(1)),
    (Mesh([5, 4, 7, 6]), Shard(1)),
)


def sides(source: tuple[Mesh, Any], destination: tuple[Mesh, Any]) -> Call:
    """The arguments that describe a problem."""
    return {
        "src_mesh": source[0], "src_placements": [source[1]],
        "dst_mesh": destination[0], "dst_placements": [destination[1]],
    }  # fmt: skip


def layouts(given: Call, shape: tuple[int, ...]) -> tuple[Layout, Layout]:
    """The same as layouts."""
    return tuple(Layout(shape, given[f"{s}_mesh"], given[f"{s}_placements"]) for s in ("src", "dst"))  # type: ignore[return-value]


class Turn:
    """One problem with arrays of its own, to be called again and again."""

    def __init__(self, transport: Any, given: Call, shape: tuple[int, ...], dtype: str = "float32") -> None:
        self.transport, self.given, self.shape = transport, given, shape
        self.layouts = layouts(given, shape)
        self.arrays: list[dict[int, Any]] = [
            {r: np.zeros(layout.local_shape(r), kind) for r in transport.local_ranks if r in layout.ranks}
            for layout, kind in zip(self.layouts, (dtype, "float32"), strict=True)
        ]

    def fill(self, first: int) -> Any:
        """New values in the sources, none in the destinations; gives the whole tensor."""
        whole = np.arange(first, first + int(np.prod(self.shape)), dtype="float32").reshape(self.shape)
        for rank, array in self.arrays[0].items():
            array[...] = self.layouts[0].slice_global(whole, rank)
        for array in self.arrays[1].values():
            array.view(np.uint8)[...] = UNTOUCHED
        return whole

    def call(self, **changes: Any) -> None:
        """The collective call."""
        src, dst = self.arrays
        if len(self.transport.local_ranks) == 1:
            src, dst = (side.get(self.transport.local_ranks[0]) for side in self.arrays)
        reshard(src, dst, self.transport, **(self.given | changes))

    def moves(self, first: int) -> list[str]:
        """Call it; what arrived wrong."""
        whole = self.fill(first)
        self.call()
        return [
            f"rank {rank}, from {first}: {array.tolist()}"
            for rank, array in self.arrays[1].items()
            if not np.array_equal(array, self.layouts[1].slice_global(whole, rank))
        ]


def source_types_in_turns(transport: Any) -> list[str]:
    """One rank sends float16 and float32 in turns; to the destination every call looks like the last one."""
    given = sides(ONE, COLUMNS)
    halves, floats = (Turn(transport, given, (4, 8), dtype) for dtype in ("float16", "float32"))
    floats.arrays[1] = halves.arrays[1]
    wrong = []
    for number in range(8):
        wrong += (halves if number % 2 else floats).moves(number)
    return wrong


def bindings_made(transport: Any) -> int:
    """How many bindings `reshard` ever made over a transport."""
    memory = transport.__dict__.get("_reshard_memory")
    return memory.made if memory else 0


def known_problems_in_turns(transport: Any) -> list[str]:
    """Three problems in turns, bound once each, and by all ranks or by none."""
    turns = [
        Turn(transport, sides(ROWS, COLUMNS), (8, 8)),
        Turn(transport, sides(ROWS, SWAPPED), (8, 8)),
        Turn(transport, sides(ONE, COLUMNS), (4, 8), "float16"),
    ]
    turns[1].arrays = turns[0].arrays
    wrong = [what for turn in turns for what in turn.moves(1)]
    before = bindings_made(transport)
    for number in range(3):
        wrong += [what for turn in turns for what in turn.moves(number)]
    made = bindings_made(transport) - before
    return [*wrong, f"{made} bindings were made of known problems"] if made else wrong


def casts(transport: Any) -> list[str]:
    """A cast that loses values is refused on every rank, unless it is asked for by name."""
    turn = Turn(transport, sides(ONE, COLUMNS), (4, 8))
    turn.arrays[1] = {rank: array.astype("float16") for rank, array in turn.arrays[1].items()}
    whole = turn.fill(3)
    wrong = []
    try:
        turn.call()
        wrong.append("a cast to float16 was not refused")
    except LayoutError as error:
        if "pass dst_dtype='float16' if that is meant" not in str(error):
            wrong.append(str(error))
    turn.call(dst_dtype="float16")
    return wrong + [
        f"rank {rank}: {array.tolist()}"
        for rank, array in turn.arrays[1].items()
        if not np.array_equal(array, turn.layouts[1].slice_global(whole, rank))
    ]


def one_rank_names_another(transport: Any) -> list[str]:
    """Two problems are remembered, and rank 0 means the one while all others mean the other."""
    first, second = (Turn(transport, sides(ROWS, ends), (8, 8)) for ends in (COLUMNS, SWAPPED))
    second.arrays = first.arrays
    larger = Turn(transport, sides(ROWS, COLUMNS), (8, 12))
    wrong = first.moves(1) + second.moves(2) + larger.moves(3)
    first.call(global_shape=(8, 8))
    first.fill(0)
    wrong += refused(transport, first, "LayoutError", global_shape=(8, 8), src_local_shape=(3, 8))
    rank = transport.local_ranks[0]
    for mine, others, error in ((first, second, "DisagreementError"), (larger, second, "LayoutError")):
        mine.fill(0)
        others.fill(0)
        wrong += refused(transport, mine if rank == 0 else others, error)
        wrong += first.moves(4) + second.moves(5) + larger.moves(6)
    return wrong


def refused(transport: Any, turn: Turn, error: str, **changes: Any) -> list[str]:
    """Call what must be refused on every rank alike, before a byte moves."""
    said = None
    try:
        turn.call(**changes)
    except M2nError as raised:
        said = [type(raised).__name__, str(raised)]
    rank = transport.local_ranks[0]
    everyone = [json.loads(text) for text in transport.exchange({rank: json.dumps(said).encode()})]
    if said is None or said[0] != error or any(other != said for other in everyone):
        return [f"expected {error} on every rank, got {everyone}"]
    untouched = all((array.view(np.uint8) == UNTOUCHED).all() for array in turn.arrays[1].values())
    return [] if untouched else ["written"]


TURNS = {
    "source types in turns": source_types_in_turns,
    "known problems in turns": known_problems_in_turns,
    "a cast to a narrower range": casts,
}
APART = {"one rank names another problem": one_rank_names_another}  # only where ranks are processes
