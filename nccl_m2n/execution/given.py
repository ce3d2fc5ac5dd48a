# SPDX-License-Identifier: Apache-2.0
"""The arrays that ranks were given for a plan: by rank and name from here on, and checked.

Each fits its layout, none is missing or left over, and none that is written shares memory with another.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from nccl_m2n.dtypes import item_size
from nccl_m2n.errors import LayoutError
from nccl_m2n.execution.descriptors import Boxes, Mask, join_boxes
from nccl_m2n.execution.factored import fit_view
from nccl_m2n.execution.lower import ArrayTable, Task
from nccl_m2n.execution.memory import gpu_at
from nccl_m2n.execution.overlaps import clashes, repeated
from nccl_m2n.execution.views import ArrayView, view_array
from nccl_m2n.layout import Layout
from nccl_m2n.layout.fit import Factors
from nccl_m2n.layout.shape import MAX_NDIM
from nccl_m2n.planning import Transfer
from nccl_m2n.planning.program import Program
from nccl_m2n.typing import Array

if TYPE_CHECKING:
    from nccl_m2n.planning import Plan

GivenArrays: TypeAlias = Mapping[Any, Array]  # by name, by name and then rank, or by rank and then name
SIDES = ("source", "destination")


def by_rank(arrays: GivenArrays, ranks: Sequence[int], side: str) -> dict[int, dict[str, Array]]:
    """Arrays as users give them, by rank and name.

    Args:
        arrays: By name; or by name and then rank, as a process that drives several ranks has to; or by rank and name.
        ranks: Those that this process drives.
        side: ``"source"`` or ``"destination"``, for messages.

    Raises:
        LayoutError: If it is none of these, or names a rank that this process does not drive.

    Example:
        >>> from nccl_m2n.execution.given import by_rank
        >>> by_rank({"w": {0: "array 0", 1: "array 1"}}, [0, 1], "source")
        {0: {'w': 'array 0'}, 1: {'w': 'array 1'}}
    """
    if not isinstance(arrays, Mapping):
        raise LayoutError(
            f"expected {side} arrays as a mapping from tensor's name to array, got {type(arrays).__name__}"
        )
    made: dict[int, dict[str, Array]] = {rank: {} for rank in ranks}
    if arrays and all(isinstance(key, int | np.integer) for key in arrays):
        _refuse_others(arrays, made, f"{side} arrays")
        for rank, own in arrays.items():
            if not isinstance(own, Mapping):
                raise LayoutError(
                    f"{side} arrays of rank {rank}: expected a mapping from tensor's name to array, got "
                    f"{type(own).__name__}"
                )
            made[int(rank)].update(own)
        return made
    for name, array in arrays.items():
        if isinstance(array, Mapping):
            _refuse_others(array, made, f"tensor {name!r}, {side} arrays")
            for rank, one in array.items():
                made[rank][name] = one
        elif len(ranks) == 1:
            made[ranks[0]][name] = array
        elif array is not None:
            raise LayoutError(
                f"tensor {name!r}: expected a mapping from rank to {side} array, for this process "
                f"drives several ranks, got {type(array).__name__}"
            )
    return made


def _refuse_others(given: Iterable[object], ranks: Collection[int], what: str) -> None:
    others = [key for key in given if key not in ranks]
    if others:
        raise LayoutError(
            f"{what}: expected those of the ranks that this process drives, {', '.join(map(str, ranks))}, got one of "
            f"{', '.join(map(repr, others[:4]))}; leave it out here"
        )


class Given:
    """One side's arrays at one rank, checked as they are taken in; only what the rank holds costs time.

    Args:
        plan: The plan.
        rank: The rank.
        side: ``"source"`` or ``"destination"``.
        arrays: What the rank was given, by name.
        gpu: Which GPU the arrays must be on; None: in host memory.

    Raises:
        LayoutError: For an array that does not fit, is missing or left over.
    """

    def __init__(
        self, plan: Plan, rank: int, side: str, arrays: Mapping[str, Array], gpu: int | None
    ) -> None:
        self.rank, self.side = rank, side
        self._arrays, self._gpu = arrays, gpu
        self.views: dict[int, ArrayView] = {}  # by number of the transfer
        self.factors: dict[int, Factors] = {}  # of arrays that split dimensions of their layout
        self._transfers = plan.transfers
        taken: set[str] = set()
        for number, layout, shape in self._expected(plan):
            taken.add(plan.transfers[number].name)
            self._take(number, layout, shape)
        self._refuse_extra(taken)

    def _expected(self, plan: Plan) -> Iterator[tuple[int, Layout, tuple[int, ...]]]:
        """The transfers whose layout has this rank, in the plan's order, with the local shape."""
        found = []
        for template in plan.bundles.templates:
            layout = template.source if self.side == "source" else template.destination
            if self.rank in layout.mesh.index:
                shape = layout.local_shape(self.rank)
                found += [(number, layout, shape) for number in template.transfers.tolist()]
        return iter(sorted(found, key=lambda one: one[0]))

    def _take(self, number: int, layout: Layout, shape: tuple[int, ...]) -> None:
        transfer = self._transfers[number]
        array = self._arrays.get(transfer.name)
        if array is None:
            if 0 in shape:
                return
            raise LayoutError(
                f"{self._what(transfer)}: expected one of local shape {shape}, got none; pass it under the "
                "tensor's name"
            )
        try:
            view = view_array(array)
        except LayoutError as error:
            raise LayoutError(f"{self._what(transfer)}: {error}") from error
        if view.shape != shape:
            found = fit_view(view, shape)
            if found is None or len(found[0].shape) > MAX_NDIM:
                raise LayoutError(
                    f"{self._what(transfer)}: expected local shape {shape} as {layout} has it, got {view.shape}"
                )
            view = found[0]
            if len(view.shape) != len(shape):
                self.factors[number] = found[1]
        self._check(transfer, view)
        self.views[number] = view

    def _check(self, transfer: Transfer, view: ArrayView) -> None:
        dtype = transfer.dtype if self.side == "source" else transfer.destination_dtype
        if view.dtype != dtype:
            raise LayoutError(
                f"{self._what(transfer)}: expected dtype {dtype}, got {view.dtype}; cast it, or plan a cast in "
                "flight"
            )
        if view.device != (self._gpu is not None):
            raise LayoutError(
                f"{self._what(transfer)}: expected an array in {'host' if self._gpu is None else 'device'} memory, "
                f"as the transport moves it, got one in {'device' if view.device else 'host'} memory"
            )
        if view.device and view.size:
            gpu = gpu_at(view.pointer) if view.gpu is None else view.gpu
            if gpu not in (None, self._gpu):
                raise LayoutError(
                    f"{self._what(transfer)}: expected an array on GPU {self._gpu}, which is rank {self.rank}'s, got "
                    f"one on GPU {gpu}; move it there"
                )
            if transfer.dtype != transfer.destination_dtype and _misaligned(view):
                raise LayoutError(
                    f"{self._what(transfer)}: expected elements at multiples of their size, to be cast by the GPU, got "
                    f"{view}; pass a copy"
                )
        if self.side == "destination" and not view.writable:
            raise LayoutError(
                f"{self._what(transfer)}: expected a writable array, got a read-only one; pass a copy"
            )

    def _what(self, transfer: Transfer) -> str:
        return f"tensor {transfer.name!r}, {self.side} array"

    def _refuse_extra(self, taken: set[str]) -> None:
        extra = self._arrays.keys() - taken
        if not extra:
            return
        known = {t.name: t for t in self._transfers if t.name in extra}
        unknown = sorted(map(repr, extra - known.keys()))
        if unknown:
            raise LayoutError(
                f"expected {self.side} arrays of the plan's tensors, got {', '.join(unknown[:4])} too; "
                "leave them out or plan them"
            )
        for name, transfer in known.items():
            if self._arrays[name] is not None:
                layout = transfer.source if self.side == "source" else transfer.destination
                raise LayoutError(
                    f"{self._what(transfer)}: expected none on a rank outside {layout}, got one; leave it out here"
                )


def _misaligned(view: ArrayView) -> bool:
    strides = [step for n, step in zip(view.shape, view.strides, strict=True) if n > 1]
    return any(step % item_size(view.dtype) for step in (view.pointer, *strides))


@dataclass(frozen=True)
class _Side:
    """One side of one rank: where its arrays lie, and what of them moves."""

    rank: int
    number: int  # in `SIDES`
    program: Program
    arrays: ArrayTable

    def used(self, transfer: int) -> Boxes:
        """Where the cells of one transfer are written; all of a source, which must stay as it is."""
        if self.number == 0:
            return self.arrays.whole().take(np.array([transfer]))
        cells = self.program.destination_cells
        return self.arrays.boxes(cells[cells["transfer"] == transfer])


def refuse_overlaps(transfers: Sequence[Transfer], tasks: Mapping[int, Task]) -> None:
    """Refuse what is written over something else that this process's ranks read or write, or over itself.

    Whole arrays are looked at first, and where two of them have bytes in common, the cells that are really written:
    views of fused storage may span what belongs to others.

    Args:
        transfers: The plan's.
        tasks: For each rank its program, and its source and destination arrays.

    Raises:
        LayoutError: Naming the array, and the other one.
    """
    sides = [
        _Side(rank, number, program, arrays)
        for rank, (program, *tables) in tasks.items()
        for number, arrays in enumerate(tables)
    ]
    every = join_boxes([side.arrays.whole() for side in sides])
    rows = np.flatnonzero((every.extent > 0).all(axis=1))
    whole = every.take(rows)
    place, transfer = (each.tolist() for each in np.divmod(rows, max(1, len(transfers))))
    written = np.array([side.number == 1 for side in sides])[place]

    def what(row: int) -> str:
        side = sides[place[row]]
        rank = f" of rank {side.rank}" if len(tasks) > 1 else ""
        return f"{SIDES[side.number]} array {transfers[transfer[row]].name!r}{rank}"

    destinations = np.flatnonzero(written)
    for row in destinations[repeated(whole.take(destinations))].tolist():
        raise LayoutError(
            f"tensor {transfers[transfer[row]].name!r}, destination array: expected every element at a place of its "
            "own, got a broadcast array or overlapping strides; pass a copy"
        )
    for a, b in clashes(whole, written):
        first, second = (sides[place[row]].used(transfer[row]) for row in (a, b))
        if _meet(first, second, written[[a, b]]):
            raise LayoutError(
                f"expected arrays that are written apart from all others in memory, got {what(b)} over {what(a)}; "
                "receive into an array of its own"
            )


def _meet(a: Boxes, b: Boxes, written: Mask) -> bool:
    """Whether a box of one table has a byte in common with one of the other, if either is written."""
    count = len(a.address)
    pairs = clashes(join_boxes([a, b]), np.repeat(written, [count, len(b.address)]))
    return any((i < count) != (j < count) for i, j in pairs)
