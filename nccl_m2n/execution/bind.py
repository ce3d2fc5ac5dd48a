# SPDX-License-Identifier: Apache-2.0
"""Binding: a plan, a transport and arrays become something that runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING

import numpy as np

from nccl_m2n.dtypes import cast_number, item_size
from nccl_m2n.errors import PlanError, TransportError
from nccl_m2n.execution.bound import Bound, Executor, checked_delta
from nccl_m2n.execution.delta.host import DeltaHostExecutor
from nccl_m2n.execution.factored import align_factors, split_factored
from nccl_m2n.execution.given import SIDES, Given, GivenArrays, by_rank, refuse_overlaps
from nccl_m2n.execution.host import HostExecutor
from nccl_m2n.execution.lower import ArrayTable, Task, Wire
from nccl_m2n.execution.memory import gpu_of
from nccl_m2n.execution.staging import Staging
from nccl_m2n.execution.views import ArrayView
from nccl_m2n.planning import Transfer
from nccl_m2n.transport.agree import together
from nccl_m2n.transport.base import DeviceTransport, Transport
from nccl_m2n.typing import Array, Ints, JsonObject

if TYPE_CHECKING:
    from nccl_m2n.planning import Plan


def bind(
    plan: Plan,
    transport: Transport,
    sources: GivenArrays,
    destinations: GivenArrays,
    staging: Staging | None = None,
    delta: bool | str = False,
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
            order, or ones of extent 1 more or less) and dtype, with any strides. A rank whose shard is empty may
            leave it out. Instead of an array a mapping from rank to array, which a process that drives several
            ranks needs; or all of it the other way round, by rank and then by name.
        destinations: Likewise, what is written. May not overlap any other array in memory, nor itself.
        staging: Where to take staging from, to share it with bindings that never run at the same time. Not
            together with `delta`.
        delta: True sends only what changed since the last run, bit for bit; the first run sends all. Every sender
            then keeps what it sent last, in memory of its own of that size; ``"host"`` keeps it in pinned host
            memory where the arrays are on a device. Destinations must not be written by others in between; see
            `Bound.forget`.

    Returns:
        Something to run as often as wanted. The arrays are read and written in place at every run.

    Raises:
        LayoutError: For an array that does not fit, is missing, left over, read-only, or overlaps another.
        DisagreementError: If the ranks' plans differ; names the tensor, the ranks and what each was told.
    """
    if not isinstance(transport, Transport):
        raise TransportError(
            f"expected a transport to bind to, got {type(transport).__name__}; make a LocalTransport, an MpiTransport "
            "or an NcclTransport"
        )
    bound = Bound(plan, transport, partial(_prepare, plan, transport, delta), staging)
    bound.take(sources, destinations)
    return bound


def _prepare(
    plan: Plan,
    transport: Transport,
    delta: bool | str,
    sources: GivenArrays,
    destinations: GivenArrays,
    staging: Staging,
) -> tuple[Executor, list[ArrayView]]:
    """What runs the plan, and what keeps the arrays alive. Collective."""
    ranks, facts = transport.local_ranks, {"the plan": plan.digest, "delta": bool(delta)}
    kinds = _Kinds(plan.transfers)
    given = cache(
        lambda: [
            by_rank(each, ranks, side) for each, side in zip((sources, destinations), SIDES, strict=True)
        ]
    )
    tasks: dict[int, Task] = {}
    owners: list[ArrayView] = []
    executors: list[Executor] = []

    def share(rank: int) -> None:
        checked_delta(delta)
        _check_world(plan, transport)
        task, views = _task(plan, kinds, rank, [side[rank] for side in given()], gpu_of(transport, rank))
        refuse_overlaps(plan.transfers, {rank: task})
        tasks[rank] = task
        owners.extend(views)
        if len(tasks) == len(ranks):  # all of this process's
            if len(ranks) > 1:
                refuse_overlaps(plan.transfers, tasks)
            executors.append(_executor(plan, transport, tasks, kinds, staging, delta))

    try:
        together(transport, "bind", share, facts=lambda _: facts, details=partial(_facts, plan))
    except Exception:
        for executor in executors:
            executor.close()
        raise
    (executor,) = executors
    executor.connect()
    return executor, owners


def _facts(plan: Plan) -> JsonObject:
    """What ranks compare, one by one, once they know that their plans differ."""
    options = plan.options
    facts: JsonObject = {
        "the number of transfers": len(plan.transfers),
        "the order of the tensors": [t.name for t in plan.transfers],
    }
    facts |= {f"tensor {t.name!r}": str(t) for t in plan.transfers}
    facts["the topology"] = repr(plan.topology)
    facts["the options"] = repr(options)
    facts |= {f"the details of tensor {t.name!r}": repr(t) for t in plan.transfers}
    return facts


def _executor(
    plan: Plan,
    transport: Transport,
    tasks: Mapping[int, Task],
    kinds: _Kinds,
    staging: Staging,
    delta: bool | str,
) -> Executor:
    wire = Wire(kinds.table("wire_size"), kinds.formats("wire_dtype"))
    if not isinstance(transport, DeviceTransport):
        if delta:
            return DeltaHostExecutor(transport, plan, tasks, wire)
        return HostExecutor(transport, tasks, wire, staging)
    if delta:
        from nccl_m2n.execution.delta.device import DeltaDeviceExecutor

        return DeltaDeviceExecutor(transport, plan, tasks, wire, host_baseline=delta == "host")
    from nccl_m2n.execution.device import DeviceExecutor

    return DeviceExecutor(transport, tasks, wire, staging)


class _Kinds:
    """The transfers by their pair of element types, of which even large models have few."""

    def __init__(self, transfers: Sequence[Transfer]) -> None:
        found: dict[tuple[str, str], int] = {}
        pairs = [found.setdefault((t.dtype, t.destination_dtype), len(found)) for t in transfers]
        self._kind = np.array(pairs, np.int64)
        first = np.unique(self._kind, return_index=True)[1]
        self._examples = [transfers[i] for i in first.tolist()]

    def _spread(self, values: Sequence[int]) -> Ints:
        return np.array(values, np.int64)[self._kind] if values else np.zeros(0, np.int64)

    def table(self, attribute: str) -> Ints:
        """A number for each transfer, shape (transfers,)."""
        return self._spread([getattr(t, attribute) for t in self._examples])

    def sizes(self, attribute: str) -> Ints:
        """Bytes of an element of the type that an attribute names, for each transfer."""
        return self._spread([item_size(getattr(t, attribute)) for t in self._examples])

    def formats(self, attribute: str) -> Ints:
        """The kernel's number of that type."""
        return self._spread([cast_number(getattr(t, attribute)) for t in self._examples])


def _check_world(plan: Plan, transport: Transport) -> None:
    if plan.world > transport.size:
        raise PlanError(
            f"expected a transport of {plan.world} ranks or more, for the plan has rank {plan.world - 1}, "
            f"got {transport.size}; start more processes or use lower ranks"
        )


def _task(
    plan: Plan, kinds: _Kinds, rank: int, arrays: Sequence[Mapping[str, Array]], gpu: int | None
) -> tuple[Task, list[ArrayView]]:
    """One rank's program and arrays, checked, and what keeps these alive."""
    given = [Given(plan, rank, side, own, gpu) for side, own in zip(SIDES, arrays, strict=True)]
    align_factors((given[0].views, given[1].views), (given[0].factors, given[1].factors))
    tables = [
        ArrayTable.of(one.views, kinds.sizes(dtype), kinds.formats(dtype))
        for one, dtype in zip(given, ("dtype", "destination_dtype"), strict=True)
    ]
    program = split_factored(plan.program(rank), given[0].factors, given[1].factors, kinds.table("wire_size"))
    return (program, tables[0], tables[1]), [view for one in given for view in one.views.values()]
