# SPDX-License-Identifier: Apache-2.0
"""The arrays that a rank was given for a plan, checked: each fits its layout, none is missing, left over or shared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nccl_m2n.dtypes import item_size
from nccl_m2n.errors import LayoutError
from nccl_m2n.execution.factored import Factors, factor_shape
from nccl_m2n.execution.host import memory
from nccl_m2n.execution.views import ArrayView, view_array
from nccl_m2n.layout import Layout
from nccl_m2n.layout.shape import MAX_NDIM
from nccl_m2n.planning import Transfer

if TYPE_CHECKING:
    from nccl_m2n.planning import Plan

SIDES = ("source", "destination")


class Given:
    """One side's arrays at one rank, checked as they are taken in; only what the rank holds costs time.

    Args:
        plan: The plan.
        rank: The rank.
        side: ``"source"`` or ``"destination"``.
        arrays: What the user gave, by name: arrays, or mappings from rank to array where `several`.
        several: Whether this process drives several ranks.
        kind: ``"host"`` or ``"device"``, the memory that arrays must be in.

    Raises:
        LayoutError: For an array that does not fit, is missing or left over.
    """

    def __init__(
        self, plan: Plan, rank: int, side: str, arrays: Mapping[str, Any], several: bool, kind: str
    ) -> None:
        self.rank, self.side = rank, side
        self._arrays, self._several, self._kind = arrays, several, kind
        self.views: dict[int, ArrayView] = {}  # by number of the transfer
        self.factors: dict[int, Factors] = {}  # of arrays that split dimensions of their layout
        self._transfers = plan.transfers
        taken: set[str] = set()
        for number, layout, shape in self._expected(plan):
            taken.add(plan.transfers[number].name)
            self._take(number, layout, shape)
        self._refuse_extra(taken)

    def by_number(self) -> list[ArrayView | None]:
        """The view of each transfer, None where the rank has none."""
        views: list[ArrayView | None] = [None] * len(self._transfers)
        for number, view in self.views.items():
            views[number] = view
        return views

    def _expected(self, plan: Plan) -> Iterator[tuple[int, Layout, tuple[int, ...]]]:
        """The transfers whose layout has this rank, in the plan's order, with the local shape."""
        found = []
        for template in plan.bundles.templates:
            layout = template.source if self.side == "source" else template.destination
            if self.rank in layout.mesh.index:
                shape = layout.local_shape(self.rank)
                found += [(number, layout, shape) for number in template.transfers.tolist()]
        return iter(sorted(found, key=lambda one: one[0]))

    def _array(self, name: str) -> Any:
        array = self._arrays.get(name)
        if not self._several or array is None:
            return array
        if not isinstance(array, Mapping):
            raise LayoutError(
                f"tensor {name!r}: expected a mapping from rank to {self.side} array, for this process "
                f"drives several ranks, got {type(array).__name__}"
            )
        return array.get(self.rank)

    def _take(self, number: int, layout: Layout, shape: tuple[int, ...]) -> None:
        transfer = self._transfers[number]
        array = self._array(transfer.name)
        if array is None:
            if 0 in shape:
                return
            raise LayoutError(
                f"{self._what(transfer)}: expected one of local shape {shape}, got none; pass it under the "
                "tensor's name"
            )
        view = view_array(array)
        if view.shape != shape:
            factors = factor_shape(view.shape, shape)
            if factors is None or len(view.shape) > MAX_NDIM:
                raise LayoutError(
                    f"{self._what(transfer)}: expected local shape {shape} as {layout} has it, got {view.shape}"
                )
            if len(view.shape) != len(shape):
                self.factors[number] = factors
        self._check(transfer, view)
        self.views[number] = view

    def _check(self, transfer: Transfer, view: ArrayView) -> None:
        dtype = transfer.dtype if self.side == "source" else transfer.destination_dtype
        if view.dtype != dtype:
            raise LayoutError(
                f"{self._what(transfer)}: expected dtype {dtype}, got {view.dtype}; cast it, or plan a cast in "
                "flight"
            )
        if view.device != (self._kind == "device"):
            raise LayoutError(
                f"{self._what(transfer)}: expected an array in {self._kind} memory, as the transport moves it, "
                f"got one in {'device' if view.device else 'host'} memory"
            )
        if self.side == "source":
            return
        if not view.writable:
            raise LayoutError(
                f"{self._what(transfer)}: expected a writable array, got a read-only one; pass a copy"
            )
        if 0 in view.strides and view.size:
            repeats = [s == 0 and n > 1 for s, n in zip(view.strides, view.shape, strict=True)]
            if any(repeats):
                raise LayoutError(
                    f"{self._what(transfer)}: expected every element at a place of its own, got a broadcast array"
                )

    def _what(self, transfer: Transfer) -> str:
        return f"tensor {transfer.name!r}, {self.side} array"

    def _refuse_extra(self, taken: set[str]) -> None:
        extra = self._arrays.keys() - taken
        if not extra:
            return
        known = {t.name: t for t in self._transfers if t.name in extra}
        unknown = sorted(extra - known.keys())
        if unknown:
            raise LayoutError(
                f"expected {self.side} arrays of the plan's tensors, got {', '.join(map(repr, unknown[:4]))} too; "
                "leave them out or plan them"
            )
        for name, transfer in known.items():
            if self._array(name) is not None:
                layout = transfer.source if self.side == "source" else transfer.destination
                raise LayoutError(
                    f"{self._what(transfer)}: expected none on a rank outside {layout}, got one; leave it out here"
                )


def refuse_overlaps(transfers: Sequence[Transfer], source: Given, destination: Given) -> None:
    """Refuse a destination array that shares memory with a source array: it would be read half written."""
    if not source.views or not destination.views:
        return
    spans = [
        (*view.span, given.side, transfers[number].name, view)
        for given in (source, destination)
        for number, view in given.views.items()
        if view.size
    ]
    spans.sort(key=lambda span: span[:2])
    under_way: dict[str, list[Any]] = {side: [] for side in SIDES}  # spans that may reach further
    for span in spans:
        other = "destination" if span[2] == "source" else "source"
        under_way[other] = [before for before in under_way[other] if before[1] > span[0]]
        for before in under_way[other]:
            if _share(span[4], before[4]):
                raise LayoutError(
                    f"expected source and destination arrays apart in memory, got {span[2]} array {span[3]!r} over "
                    f"{other} array {before[3]!r}; receive into an array of its own"
                )
        under_way[span[2]].append(span)


def _share(a: ArrayView, b: ArrayView) -> bool:
    """Whether two arrays whose spans meet have a byte in common."""
    pair = [a, b]
    if any(view.device for view in pair):
        return True
    base = min(view.span[0] for view in pair)
    whole = memory(base, max(view.span[1] for view in pair) - base)
    arrays = [
        np.ndarray((*v.shape, item_size(v.dtype)), np.uint8, whole, v.pointer - base, (*v.strides, 1))
        for v in pair
    ]
    return bool(np.shares_memory(*arrays))
