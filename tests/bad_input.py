# SPDX-License-Identifier: Apache-2.0
"""Mistakes of single ranks: every rank must hear of them, in the same words, before any byte moves.

A case gives each rank its plan and its arrays, most of them in order. Used by all transports.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from nccl_m2n import Layout, M2nError, Mesh, Plan, Replicate, Shard, Topology, Transfer, errors, plan
from tests.scenarios import RANKS, UNTOUCHED

Arrays = dict[str, Any]
Change = Callable[[int, Arrays, Arrays], None]

W = Transfer(
    Layout((8, 6), Mesh.arange((4,)), [Shard(0)]),
    Layout((8, 6), Mesh.arange((3,), start=4), [Shard(1)]),
    "float32",
    "w",
)
B = Transfer(
    Layout((6,), Mesh.arange((4,)), [Replicate()]), Layout((6,), Mesh([5, 4, 6]), [Replicate()]), "int16", "b"
)
IN_PLACE = Transfer(
    Layout((8, 8), Mesh.arange((4,)), [Shard(0)]), Layout((8, 8), Mesh.arange((4,)), [Shard(1)]), "int16", "p"
)
TOPOLOGY = Topology.regular(RANKS, 4)


def good_plan(rank: int = 0) -> Plan:
    """The plan of which all cases are a spoilt version."""
    return plan([W, B, IN_PLACE], TOPOLOGY)


@dataclass(frozen=True)
class BadInput:
    """One mistake."""

    name: str
    error: type[M2nError]
    message: str  # a regular expression
    change: Change = lambda rank, sources, destinations: None
    plan: Callable[[int], Plan] = good_plan
    one_plan: bool = True  # else ranks have different ones, which one process cannot bind

    def make(self, rank: int) -> tuple[Plan, Arrays, Arrays]:
        """What `rank` binds."""
        made = self.plan(rank)
        sides: tuple[Arrays, Arrays] = ({}, {})
        for transfer in (W, B, IN_PLACE):
            for arrays, layout in zip(sides, (transfer.source, transfer.destination), strict=True):
                if rank in layout.ranks:
                    arrays[transfer.name] = np.zeros(layout.local_shape(rank), transfer.dtype)
        for array in sides[1].values():
            array.view(np.uint8)[...] = UNTOUCHED
        self.change(rank, *sides)
        return made, *sides


def on(where: int, name: str, array: Any, side: int = 0) -> Change:
    """Give another array on one rank and side; none where it is None."""

    def change(rank: int, *sides: Arrays) -> None:
        if rank == where:
            sides[side][name] = array
            if array is None:
                del sides[side][name]

    return change


def both(*changes: Change) -> Change:
    """Several changes."""

    def change(rank: int, sources: Arrays, destinations: Arrays) -> None:
        for one in changes:
            one(rank, sources, destinations)

    return change


def read_only(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """An array that may not be written."""
    array = np.zeros(shape, dtype)
    array.flags.writeable = False
    return array


def repeated(rank: int, sources: Arrays, destinations: Arrays) -> None:
    """Rank 4's destination has all its rows in one place."""
    if rank == 4:
        destinations["w"] = np.lib.stride_tricks.as_strided(np.zeros(2, "float32"), (8, 2), (0, 4))


def in_place(rank: int, sources: Arrays, destinations: Arrays) -> None:
    """Rank 1 receives into a part of the memory that it sends from."""
    if rank == 1:
        memory = np.zeros(24, "int16")
        sources["p"], destinations["p"] = memory[:16].reshape(2, 8), memory[8:].reshape(8, 2)


class OnDevice:
    """Looks like GPU memory."""

    dtype = np.dtype("float32")
    __cuda_array_interface__ = {  # noqa: RUF012
        "shape": (2, 6), "typestr": "<f4", "data": (4096, False), "version": 3,
    }  # fmt: skip


def replanned(where: int, *transfers: Transfer, topology: Topology = TOPOLOGY, **options: Any) -> Any:
    """One rank has another plan."""

    def make(rank: int) -> Plan:
        return plan(transfers, topology, **options) if rank == where else good_plan()

    return make


L, P, D = errors.LayoutError, errors.PlanError, errors.DisagreementError
OTHER_DTYPE = Transfer(W.source, W.destination, "int32", "w")
OTHER_LAYOUT = Transfer(W.source, Layout((8, 6), Mesh([4, 6, 5]), [Shard(1)]), "float32", "w")
OTHER_NAME = Transfer(W.source, W.destination, "float32", "ж'")

BAD_INPUT = [
    BadInput("rows of too short an array", L,
             r"rank 2: tensor 'w', source array: expected local shape \(2, 6\) as 8 × 6 on .* has it, got \(3, 6\)",
             on(2, "w", np.zeros((3, 6), "float32"))),
    BadInput("a transposed array", L,
             r"rank 4: tensor 'w', destination array: expected local shape \(8, 2\).*got \(2, 8\)",
             on(4, "w", np.zeros((2, 8), "float32"), 1)),
    BadInput("another dtype", L, r"rank 5: tensor 'w', destination array: expected dtype float32, got float64; cast it",
             on(5, "w", np.zeros((8, 2), "float64"), 1)),
    BadInput("another dtype of the same size", L, r"rank 3: tensor 'b', source array: expected dtype int16, got uint16",
             on(3, "b", np.zeros(6, "uint16"))),
    BadInput("a missing source", L,
             r"rank 1: tensor 'w', source array: expected one of local shape \(2, 6\), got none; pass",
             on(1, "w", None)),
    BadInput("a missing destination", L,
             r"rank 6: tensor 'b', destination array: expected one of local shape \(6,\), got none",
             on(6, "b", None, 1)),
    BadInput("a tensor that is not planned", L,
             r"rank (3|0-7): expected source arrays of the plan's tensors, got 'c' too; leave them out or plan them",
             on(3, "c", np.zeros(3))),
    BadInput("an array on a rank outside the layout", L,
             r"rank 7: tensor 'w', source array: expected none on a rank outside .*, got one; leave it out here",
             on(7, "w", np.zeros((2, 6), "float32"))),
    BadInput("a read-only destination", L,
             r"rank 4: tensor 'w', destination array: expected a writable array, got a read-only one; pass a copy",
             on(4, "w", read_only((8, 2), "float32"), 1)),
    BadInput("a destination without room", L,
             r"rank 4: tensor 'w', destination array: expected every element at a place of its own, got a broadcast",
             repeated),
    BadInput("a destination over a source", L,
             r"rank 1: expected arrays that are written apart from all others.*, got \w+ array 'p' over \w+ array 'p'",
             in_place),
    BadInput("a list", L, r"rank 0: tensor 'b', source array: expected an array \(NumPy, .*\), got list",
             on(0, "b", [1, 2, 3, 4, 5, 6])),
    BadInput("GPU memory on a host transport", L,
             r"rank 0: tensor 'w', source array: expected an array in host memory.*got one in device memory",
             on(0, "w", OnDevice())),
    BadInput("the same mistake on two ranks", L,
             r"^rank 1-2: tensor 'b', source array: expected dtype int16, got int8[^\n]*$",
             both(on(1, "b", np.zeros(6, "int8")), on(2, "b", np.zeros(6, "int8")))),
    BadInput("different mistakes on two ranks", L,
             r"(?s)rank 1: tensor 'b', source array: expected dtype int16, got int8.*"
             r"rank 5: tensor 'w', destination array: .* got none",
             both(on(1, "b", np.zeros(6, "int8")), on(5, "w", None, 1))),
    BadInput("more ranks than there are", P,
             r"expected a transport of 12 ranks or more, for the plan has rank 11, got 8; start more processes",
             plan=lambda rank: plan(Transfer(W.source, Layout((8, 6), Mesh([11]), [Shard(0)]), "float32", "w"))),
    BadInput("plans that differ in a dtype", D,
             r"got for tensor 'w': rank 0-2, 4-7: w: float32 8 × 6, .*; rank 3: w: int32 8 × 6, 8 × 6 on ",
             on(3, "w", np.zeros((2, 6), "int32")), replanned(3, OTHER_DTYPE, B, IN_PLACE), one_plan=False),
    BadInput("plans that differ in a layout", D, r"got for .*tensor 'w': .*rank 6: ",
             plan=replanned(6, OTHER_LAYOUT, B, IN_PLACE), one_plan=False),
    BadInput("plans that differ in a name", D, r"got for the order of the tensors, number 0: rank 0-6: w; rank 7: ж'$",
             plan=replanned(7, OTHER_NAME, B, IN_PLACE), one_plan=False),
    BadInput("plans that differ in order", D,
             r"got for the order of the tensors, number 0: rank 0-1, 3-7: w; rank 2: b$",
             plan=replanned(2, B, W, IN_PLACE), one_plan=False),
    BadInput("plans that differ in number", D, r"got for the number of transfers: rank [\d, -]*: 3; rank 7: 2",
             plan=replanned(7, W, B), one_plan=False),
    BadInput("plans that differ in topology", D, r"got for the topology: .*rank 7: Topology",
             plan=replanned(7, W, B, IN_PLACE, topology=Topology.regular(8, 2)), one_plan=False),
    BadInput("plans that differ in options", D, r"got for the options: .*chunk_bytes=None.*rank 7: .*chunk_bytes=32",
             plan=replanned(7, W, B, IN_PLACE, chunk_bytes=32), one_plan=False),
    BadInput("a mistake and plans that differ", L, r"rank 1: tensor 'b', source array: expected dtype int16, got int8",
             on(1, "b", np.zeros(6, "int8")), plan=replanned(7, W, B, IN_PLACE, chunk_bytes=32), one_plan=False),
]  # fmt: skip


def refused(case: BadInput, transport: Any) -> list[str]:
    """Bind a spoilt problem; what is wrong with how that was refused. Collective."""
    import re

    ranks = transport.local_ranks
    made = {rank: case.make(rank) for rank in ranks}
    sides = []
    for side in (1, 2):
        if len(ranks) == 1:
            sides.append(made[ranks[0]][side])
        else:
            names = sorted({name for rank in ranks for name in made[rank][side]})
            sides.append({n: {r: made[r][side][n] for r in ranks if n in made[r][side]} for n in names})
    said = None
    try:
        made[ranks[0]][0].bind(transport, *sides)
    except M2nError as error:
        said = [type(error).__name__, str(error)]
    everyone = [
        json.loads(text) for text in transport.exchange({r: json.dumps(said).encode() for r in ranks})
    ]
    wrong = []
    if said is None:
        wrong.append("nothing was refused")
    else:
        if said[0] != case.error.__name__ or not re.search(case.message, said[1]):
            wrong.append(f"expected {case.error.__name__}: {case.message}\ngot {said[0]}: {said[1]}")
        if any(other != said for other in everyone):
            wrong.append(f"ranks were told different things: {everyone}")
    for rank in ranks:
        for name, array in made[rank][2].items():
            if (
                isinstance(array, np.ndarray)
                and not (array.view(np.uint8) == UNTOUCHED).all()
                and array.any()
            ):
                wrong.append(f"destination {name!r} on rank {rank} was written")
    return wrong
