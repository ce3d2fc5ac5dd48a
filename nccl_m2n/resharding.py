# SPDX-License-Identifier: Apache-2.0
"""Reshard in one call: plan, bind and run, remembered for the next call with the same arrays."""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from nccl_m2n.checks import made_by, several
from nccl_m2n.dtypes import dtype_name, is_float, keeps_range
from nccl_m2n.errors import LayoutError, M2nError, TransportError
from nccl_m2n.execution.bound import Bound
from nccl_m2n.execution.given import by_rank
from nccl_m2n.execution.remembered import Bindings
from nccl_m2n.execution.views import ArrayView, view_array
from nccl_m2n.interop import as_mesh, as_transport
from nccl_m2n.layout import Layout, Mesh
from nccl_m2n.layout.placement import as_placement
from nccl_m2n.layout.shape import as_shape
from nccl_m2n.planning import Plan, Topology, Transfer
from nccl_m2n.planning.options import PlanOptions
from nccl_m2n.planning.planner import cached_plan
from nccl_m2n.planning.topology import as_topology
from nccl_m2n.transport.agree import together
from nccl_m2n.transport.base import Transport
from nccl_m2n.typing import Array, Communicator, DType, Stream

NAME = "tensor"


def reshard(
    src: Array,
    dst: Array,
    comm: Communicator,
    stream: Stream = None,
    *,
    src_mesh: object,
    src_placements: Sequence[object],
    dst_mesh: object,
    dst_placements: Sequence[object],
    src_local_shape: Sequence[int] | None = None,
    src_dtype: DType = None,
    dst_local_shape: Sequence[int] | None = None,
    dst_dtype: DType = None,
    global_shape: Sequence[int] | None = None,
    topology: Topology | None = None,
) -> None:
    """Move one tensor from a source layout to a destination layout. Collective over `comm`.

    In host memory the destination is complete on return. On a device everything is enqueued on `stream`, and
    what is enqueued there later sees the result; the arrays are kept until the next call. Plans are remembered
    by value, bindings by the arrays' places in memory: a call that repeats another on every rank plans and
    binds nothing. At every call the ranks agree on which binding they mean.

    Args:
        src: This rank's local source array, of the layout's local shape; None on ranks outside `src_mesh`.
            With a transport that drives several ranks, a mapping from rank to array.
        dst: Likewise the destination array, which is written.
        comm: A `Transport`, an mpi4py communicator, or an nccl4py one or its pointer.
        stream: CUDA stream; None takes CuPy's current one.
        src_mesh: A `Mesh`, anything that makes one, a PyTorch DeviceMesh, or an ``nccl.m2n.Mesh``.
        src_placements: One placement for each axis of `src_mesh`.
        dst_mesh: As `src_mesh`.
        dst_placements: One placement for each axis of `dst_mesh`.
        src_local_shape: What `nccl.m2n.reshard` wants to be told where a rank has no array. Not needed here, for
            the ranks tell each other; what is given must agree. So with the next three.
        src_dtype: Element type of the source arrays.
        dst_local_shape: Local shape at the destination.
        dst_dtype: Element type of the destination arrays. A cast to a narrower range has to be asked for by it.
        global_shape: The whole tensor's shape, in elements. May be left out where all shards are equal in
            size; it is then inferred from the local shapes.
        topology: NVLink domains; None asks the transport.

    Raises:
        LayoutError: For arrays that do not fit the layouts.
        DisagreementError: If the ranks describe different problems.
    """
    transport = as_transport(comm, (src, dst))
    memory = _memory_of(transport)
    sides = (
        _Side("source", src, src_mesh, src_placements, src_local_shape, src_dtype),
        _Side("destination", dst, dst_mesh, dst_placements, dst_local_shape, dst_dtype),
    )
    call = _Call(transport, memory, sides, global_shape, topology)
    bound = call.known() or call.bind()
    bound.run(stream)
    memory.arrays = (src, dst)
    if transport.memory == "host":
        bound.wait(transport.timeout)


@dataclass(frozen=True)
class _Look:
    """All that one rank says of a problem by itself; equal where it says the same once more.

    The arrays are told by their places, dtypes and shapes, which is all that a binding knows of them.
    """

    layouts: tuple[
        tuple[Mesh, tuple[str, ...], tuple[int, ...] | None], ...
    ]  # of both sides, as they were given
    shapes: tuple[tuple[int, ...], ...]  # global ones, as the arrays and the caller tell them
    dtypes: tuple[tuple[str, ...], ...]  # of both sides, likewise
    topology: Topology
    places: tuple[ArrayView | None, ...]  # of both sides


def _memory_of(transport: Transport) -> Bindings:
    made = transport.__dict__.setdefault("_reshard_memory", Bindings())
    return made_by(made, Bindings, "what reshard() keeps with a transport")


@dataclass(frozen=True)
class _Side:
    name: str
    given: Array
    mesh_like: object
    placements: Sequence[object]
    local_shape: Sequence[int] | None
    dtype: DType

    def look(self, transport: Transport, rank: int, wanted: tuple[int, ...] | None) -> tuple[Any, ...]:
        """What `rank` says of this side: layout, global shapes, dtypes and where its array is."""
        mesh = as_mesh(self.mesh_like)
        placements = several(self.placements, f"{self.name} placements", hint="such as [Shard(0)]")
        if len(placements) != mesh.ndim:
            raise LayoutError(
                f"expected {mesh.ndim} {self.name} placements, one for each axis of {mesh!r}, got {list(placements)}"
            )
        array = by_rank({NAME: self.given}, transport.local_ranks, self.name)[rank].get(NAME)
        view = None if array is None else self._seen(array)
        told = None if self.local_shape is None else as_shape(self.local_shape)
        local = [shape for shape in (None if view is None else view.shape, told) if shape is not None]
        shapes = [_inferred(shape, mesh, placements) for shape in local] if wanted is None else []
        dtypes = [] if view is None else [view.dtype]
        dtypes += [] if self.dtype is None else [dtype_name(self.dtype)]
        return (mesh, tuple(map(repr, placements)), told), shapes, tuple(dtypes), view

    def _seen(self, array: Array) -> ArrayView:
        try:
            return replace(view_array(array), owner=None)
        except M2nError as error:
            raise LayoutError(f"{self.name} array: {error}") from None

    def layout(self, shape: tuple[int, ...]) -> Layout:
        """The side's layout, once the global shape is known."""
        made = Layout(shape, as_mesh(self.mesh_like), self.placements)
        if self.local_shape is not None:
            local = as_shape(self.local_shape)
            if local not in {made.local_shape(rank) for rank in made.ranks}:
                raise LayoutError(f"expected a {self.name} local shape of {made}, got {local}")
        return made


def _inferred(local: Sequence[int], mesh: Mesh, placements: Sequence[object]) -> tuple[int, ...]:
    """The global shape, if all shards are as large as `local`."""
    shape = list(local)
    for size, given in zip(mesh.shape, placements, strict=True):
        placement = as_placement(given, len(shape))
        if placement.dim is not None:
            shape[placement.dim] *= size
    return tuple(shape)


class _Call:
    """One call of `reshard`, as this process's ranks see it and as all ranks come to see it. Collective.

    Every rank tells the others what it knows of the shape and the dtypes, and the numbers of the bindings that it
    made for just the same call. A number that all ranks name is a binding that all of them mean.
    """

    def __init__(
        self,
        transport: Transport,
        memory: Bindings,
        sides: Sequence[_Side],
        global_shape: Sequence[int] | None,
        topology: Topology | None,
    ) -> None:
        self._transport, self._memory, self._sides = transport, memory, sides
        domains = memory.domains(
            transport
        )  # even if one was given: this is collective, and others may have none
        look = partial(_look, transport, sides, global_shape, domains if topology is None else topology)
        self._looks: dict[int, _Look] = {}
        try:
            self._looks = {rank: look(rank) for rank in transport.local_ranks}
        except Exception:  # whatever it is, the peers must hear of it
            mine = dict.fromkeys(transport.local_ranks, b"null")
        else:
            mine = {rank: self._told(one) for rank, one in self._looks.items()}
        self._said = [json.loads(text) for text in transport.exchange(mine, "reshard")]
        if None in self._said:
            together(transport, "what is wrong with a reshard", look)
            raise TransportError(
                "expected arrays and arguments that stay as they are during a call, got others"
            )

    @property
    def _key(self) -> Hashable:
        return tuple(self._looks.values())

    def _told(self, look: _Look) -> bytes:
        numbers = self._memory.numbers(self._key)
        named = self._sides[1].dtype is not None
        return json.dumps([look.shapes, look.dtypes, named, numbers, self._memory.made]).encode()

    def known(self) -> Bound | None:
        """The binding that every rank made for this very call."""
        counts = {made for *_, made in self._said}
        if len(counts) > 1:
            self._memory.forget_all(max(counts))
        common = set.intersection(*(set(numbers) for *_, numbers, _ in self._said))
        return self._memory.recall(max(common)) if common and len(counts) == 1 else None

    def bind(self) -> Bound:
        """Plan it and bind it, on all ranks."""
        plans = together(self._transport, "plan a reshard", lambda rank: self._plan())
        bound = plans[self._transport.local_ranks[0]].bind(self._transport, self._arrays(0), self._arrays(1))
        bound.forget_arrays()  # they are told by their places, and may go when the caller is done with them
        self._memory.keep(self._key, bound)
        return bound

    def _plan(self) -> Plan:
        shape = _only("global shape", [s for shapes, *_ in self._said for s in shapes])
        names = [
            _only(f"{side.name} dtype", [n for _, dtypes, *_ in self._said for n in dtypes[i]])
            for i, side in enumerate(self._sides)
        ]
        first = names[0] or names[1]
        if shape is None or first is None:
            raise LayoutError(
                "expected a source or destination array on some rank, got none; pass src= and dst="
            )
        second = names[1] or first
        if is_float(first) and is_float(second) and not keeps_range(first, second):
            self._require_named(first, second)
        source, destination = (side.layout(tuple(shape)) for side in self._sides)
        transfer = Transfer(source, destination, first, NAME, second)
        topology = next(iter(self._looks.values())).topology
        return cached_plan((transfer,), topology, PlanOptions())

    def _require_named(self, source: str, destination: str) -> None:
        if not any(named for _, _, named, *_ in self._said):
            raise LayoutError(
                f"expected a destination dtype that holds {source}'s range, got {destination}: values would be lost; "
                f"pass dst_dtype={destination!r} if that is meant"
            )

    def _arrays(self, side: int) -> dict[str, dict[int, ArrayView]]:
        views = {rank: look.places[side] for rank, look in self._looks.items()}
        return {NAME: {rank: view for rank, view in views.items() if view is not None}}


def _look(
    transport: Transport,
    sides: Sequence[_Side],
    global_shape: Sequence[int] | None,
    topology: Topology | None,
    rank: int,
) -> _Look:
    """What one rank knows of the problem, checked as far as one rank can."""
    wanted = None if global_shape is None else as_shape(global_shape)
    told = [side.look(transport, rank, wanted) for side in sides]
    layouts, shapes, dtypes, places = zip(*told, strict=True)
    every = tuple(s for some in shapes for s in some) if wanted is None else (wanted,)
    return _Look(layouts, every, dtypes, as_topology(topology), places)


def _only(what: str, values: Sequence[Any]) -> Any:
    """The one value that all ranks tell of; every rank has the same list, so all raise alike."""
    distinct = [v for i, v in enumerate(values) if v not in values[:i]]
    if len(distinct) > 1:
        raise LayoutError(
            f"expected one {what}, got {' and '.join(map(str, distinct))} from different arrays"
            + ("; pass global_shape= where shards differ in size" if what == "global shape" else "")
        )
    return distinct[0] if distinct else None
