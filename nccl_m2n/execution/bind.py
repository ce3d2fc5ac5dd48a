# SPDX-License-Identifier: Apache-2.0
"""Binding: a plan, a transport and arrays become something that runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from nccl_m2n.dtypes import item_size
from nccl_m2n.errors import LayoutError, PlanError
from nccl_m2n.execution.agree import attempt, raise_together
from nccl_m2n.execution.bound import Bound, Executor
from nccl_m2n.execution.factored import Factors, factor_shape, split_factored
from nccl_m2n.execution.formats import format_number
from nccl_m2n.execution.host import HostExecutor, memory
from nccl_m2n.execution.lower import Arrays, Wire
from nccl_m2n.execution.views import ArrayView, view_array
from nccl_m2n.layout.layout import MAX_NDIM
from nccl_m2n.planning import Transfer
from nccl_m2n.planning.program import Program
from nccl_m2n.transport.base import Transport

if TYPE_CHECKING:
    from nccl_m2n.planning import Plan

SIDES = ("source", "destination")


def bind(
    plan: Plan, transport: Transport, sources: Mapping[str, Any], destinations: Mapping[str, Any]
) -> Bound:
    """Bind a plan to arrays. Collective: every rank of the transport must call it.

    All that can go wrong goes wrong here, on every rank alike, before a byte moves: each rank checks its
    arrays, allocates its staging and prepares its messages, and then all ranks hear of each other's errors and
    compare what they were asked to do.

    Args:
        plan: The same on all ranks.
        transport: Joins the ranks.
        sources: For each transfer of which this rank is a source, by name, its local array: anything
            `view_array` takes, of the layout's local shape (or with a dimension split further, in row-major
            order) and dtype, with any strides. A rank whose shard is
            empty may leave it out. With a transport that drives several ranks, a mapping from rank to array.
        destinations: Likewise, what is written. May not overlap any source array in memory.

    Returns:
        Something to run as often as wanted. The arrays are read and written in place at every run.

    Raises:
        LayoutError: For an array that does not fit, is missing, left over, read-only, or overlaps another.
        DisagreementError: If the ranks' plans differ; names the tensor, the ranks and what each was told.
    """
    failures: dict[int, Exception] = {}
    tasks = {}
    for rank in transport.local_ranks:
        task = attempt(partial(_task, plan, transport, rank, sources, destinations), failures, rank)
        if task is not None:
            tasks[rank] = task
    executor = None
    if not failures:
        executor = attempt(lambda: _executor(plan, transport, tasks), failures, transport.local_ranks[0])
    try:
        raise_together(transport, failures, {"the plan": plan.digest}, partial(_facts, plan))
    except Exception:
        if executor is not None:
            executor.close()
        raise
    executor.connect()
    owners = [view for views in tasks.values() for side in views[3] for view in side]
    return Bound(plan, transport, executor, owners)


def _facts(plan: Plan) -> dict[str, Any]:
    """What ranks compare, one by one, once they know that their plans differ."""
    options = plan.options
    facts: dict[str, Any] = {
        "the number of transfers": len(plan.transfers),
        "the order of the tensors": [t.name for t in plan.transfers],
    }
    facts |= {f"tensor {t.name!r}": str(t) for t in plan.transfers}
    facts["the topology"] = repr(plan.topology)
    facts["the options"] = repr(options)
    facts |= {f"the details of tensor {t.name!r}": repr(t) for t in plan.transfers}
    return facts


def _executor(plan: Plan, transport: Transport, tasks: Mapping[int, Any]) -> Executor:
    wire = Wire(
        np.array([t.wire_size for t in plan.transfers], np.int64),
        np.array([_format(t.wire_dtype, t) for t in plan.transfers], np.int64),
    )
    bound = {rank: task[:3] for rank, task in tasks.items()}
    if transport.memory == "host":
        return HostExecutor(transport, bound, wire)
    from nccl_m2n.execution.device import DeviceExecutor

    return DeviceExecutor(transport, bound, wire)


def _format(dtype: str, transfer: Transfer) -> int:
    return format_number(dtype, cast=transfer.dtype != transfer.destination_dtype)


def _task(
    plan: Plan, transport: Transport, rank: int, sources: Mapping[str, Any], destinations: Mapping[str, Any]
) -> tuple[Program, Arrays, Arrays, tuple[list[ArrayView | None], list[ArrayView | None]]]:
    """One rank's program and arrays, checked."""
    if plan.world > transport.size:
        raise PlanError(
            f"expected a transport of {plan.world} ranks or more, for the plan has rank {plan.world - 1}, "
            f"got {transport.size}; start more processes or use lower ranks"
        )
    several = len(transport.local_ranks) > 1
    views = tuple(
        _side_views(plan.transfers, rank, side, given, several, transport.memory)
        for side, given in zip(SIDES, (sources, destinations), strict=True)
    )
    _refuse_overlaps(plan.transfers, *views)
    arrays = [_arrays(plan.transfers, side, found) for side, found in zip(SIDES, views, strict=True)]
    factors = [_factors(plan.transfers, rank, side, found) for side, found in zip(SIDES, views, strict=True)]
    item = np.array([t.wire_size for t in plan.transfers], np.int64)
    return split_factored(plan.program(rank), *factors, item), arrays[0], arrays[1], (views[0], views[1])


def _factors(
    transfers: Sequence[Transfer], rank: int, side: str, views: Sequence[ArrayView | None]
) -> dict[int, Factors]:
    """How arrays with more dimensions than their layout split these."""
    found = {}
    for number, (transfer, view) in enumerate(zip(transfers, views, strict=True)):
        layout = transfer.source if side == "source" else transfer.destination
        if view is not None and len(view.shape) != layout.ndim:
            factors = factor_shape(view.shape, layout.local_shape(rank))
            if factors is not None:
                found[number] = factors
    return found


def _arrays(transfers: Sequence[Transfer], side: str, views: Sequence[ArrayView | None]) -> Arrays:
    dtypes = [t.dtype if side == "source" else t.destination_dtype for t in transfers]
    items = np.array([item_size(d) for d in dtypes], np.int64)
    formats = np.array([_format(d, t) for d, t in zip(dtypes, transfers, strict=True)], np.int64)
    return Arrays.of(views, items, formats)


def _side_views(
    transfers: Sequence[Transfer], rank: int, side: str, given: Mapping[str, Any], several: bool, memory: str
) -> list[ArrayView | None]:
    """The view of each transfer's array on one side, None where the rank has none."""
    extra = set(given) - {t.name for t in transfers}
    if extra:
        raise LayoutError(
            f"expected {side} arrays of the plan's tensors, got {', '.join(map(repr, sorted(extra)[:4]))} too; "
            "leave them out or plan them"
        )
    views = []
    for transfer in transfers:
        array = given.get(transfer.name)
        if several and array is not None:
            if not isinstance(array, Mapping):
                raise LayoutError(
                    f"tensor {transfer.name!r}: expected a mapping from rank to {side} array, for this process "
                    f"drives several ranks, got {type(array).__name__}"
                )
            array = array.get(rank)
        views.append(_checked_view(transfer, rank, side, array, memory))
    return views


def _checked_view(transfer: Transfer, rank: int, side: str, array: Any, memory: str) -> ArrayView | None:
    layout = transfer.source if side == "source" else transfer.destination
    what = f"tensor {transfer.name!r}, {side} array"
    if rank not in layout.ranks:
        if array is not None:
            raise LayoutError(f"{what}: expected none on a rank outside {layout}, got one; leave it out here")
        return None
    shape = layout.local_shape(rank)
    if array is None:
        if 0 in shape:
            return None
        raise LayoutError(
            f"{what}: expected one of local shape {shape}, got none; pass it under the tensor's name"
        )
    view = view_array(array)
    dtype = transfer.dtype if side == "source" else transfer.destination_dtype
    if factor_shape(view.shape, shape) is None or len(view.shape) > MAX_NDIM:
        raise LayoutError(f"{what}: expected local shape {shape} as {layout} has it, got {view.shape}")
    if view.dtype != dtype:
        raise LayoutError(
            f"{what}: expected dtype {dtype}, got {view.dtype}; cast it, or plan a cast in flight"
        )
    if side == "destination" and not view.writable:
        raise LayoutError(f"{what}: expected a writable array, got a read-only one; pass a copy")
    if view.device != (memory == "device"):
        raise LayoutError(
            f"{what}: expected an array in {memory} memory, as the transport moves it, got one in "
            f"{'device' if view.device else 'host'} memory"
        )
    repeats = view.size and any(s == 0 and n > 1 for s, n in zip(view.strides, view.shape, strict=True))
    if side == "destination" and repeats:
        raise LayoutError(f"{what}: expected every element at a place of its own, got a broadcast array")
    return view


def _refuse_overlaps(
    transfers: Sequence[Transfer],
    sources: Sequence[ArrayView | None],
    destinations: Sequence[ArrayView | None],
) -> None:
    """Refuse a destination array that shares memory with a source array: it would be read half written."""
    spans = [
        (*view.span, side, transfer.name, view)
        for side, views in zip(SIDES, (sources, destinations), strict=True)
        for transfer, view in zip(transfers, views, strict=True)
        if view is not None and view.size
    ]
    spans.sort(key=lambda span: span[:2])
    reach: dict[str, Any] = {}
    for span in spans:
        other = reach.get("destination" if span[2] == "source" else "source")
        if other is not None and span[0] < other[1] and _share(span[4], other[4]):
            raise LayoutError(
                f"expected source and destination arrays apart in memory, got {span[2]} array {span[3]!r} over "
                f"{other[2]} array {other[3]!r}; receive into an array of its own"
            )
        kept = reach.get(span[2])
        if kept is None or span[1] > kept[1]:
            reach[span[2]] = span


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
