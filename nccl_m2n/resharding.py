# SPDX-License-Identifier: Apache-2.0
"""Reshard in one call: plan, bind and run, remembered for the next call with the same arrays."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from nccl_m2n.dtypes import dtype_name
from nccl_m2n.errors import LayoutError
from nccl_m2n.execution.bound import Bound
from nccl_m2n.execution.views import ArrayView, view_array
from nccl_m2n.interop import as_mesh, as_transport
from nccl_m2n.layout import Layout, Mesh
from nccl_m2n.layout.placement import Shard, StridedShard, as_placement
from nccl_m2n.planning import Plan, Topology, Transfer
from nccl_m2n.planning.plan import DEFAULT_STAGING_BYTES, cached_plan
from nccl_m2n.transport.agree import attempt, raise_together
from nccl_m2n.transport.base import Transport

MAX_BOUND = 32  # bindings remembered for each transport, as far as their staging stays below this many bytes
MAX_STAGING_BYTES = 512 << 20
NAME = "tensor"


def reshard(
    src: Any,
    dst: Any,
    comm: Any,
    stream: Any = None,
    *,
    src_mesh: Any,
    src_placements: Sequence[Any],
    dst_mesh: Any,
    dst_placements: Sequence[Any],
    src_local_shape: Sequence[int] | None = None,
    src_dtype: Any = None,
    dst_local_shape: Sequence[int] | None = None,
    dst_dtype: Any = None,
    global_shape: Sequence[int] | None = None,
    topology: Topology | None = None,
) -> None:
    """Move one tensor from a source layout to a destination layout. Collective over `comm`.

    In host memory the destination is complete on return. On a device everything is enqueued on `stream`, and
    what is enqueued there later sees the result; the arrays are kept until the next call. Plans are remembered
    by value, bindings by the arrays' places in memory: a call that repeats another on every rank plans and
    binds nothing.

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
        dst_dtype: Element type of the destination arrays.
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
    problem = _agree(transport, memory, sides, global_shape, topology)
    bound = memory.bound.get(problem.key) if problem.remembered else None
    if bound is None:
        bound = _bind(transport, memory, problem, sides)
    bound.run(stream)
    memory.arrays = (src, dst)
    if transport.memory == "host":
        bound.wait()


@dataclass
class _Memory:
    """What is remembered along with a transport."""

    topology: Topology | None = None
    bound: OrderedDict[Any, Bound] = field(default_factory=OrderedDict)
    arrays: Any = None  # of the last call: a device may still be at work on them


def _memory_of(transport: Transport) -> _Memory:
    made: _Memory = transport.__dict__.setdefault("_reshard_memory", _Memory())
    return made


@dataclass(frozen=True)
class _Side:
    name: str
    given: Any
    mesh_like: Any
    placements: Sequence[Any]
    local_shape: Sequence[int] | None
    dtype: Any

    @property
    def mesh(self) -> Mesh:
        """The mesh, made of what the caller passed for one."""
        return as_mesh(self.mesh_like)

    def array(self, transport: Transport, rank: int) -> Any:
        """The array that `rank` was given on this side."""
        if len(transport.local_ranks) > 1 and self.given is not None:
            if not isinstance(self.given, Mapping):
                raise LayoutError(
                    f"expected a mapping from rank to {self.name} array, for this process drives several ranks, got "
                    f"{type(self.given).__name__}"
                )
            return self.given.get(rank)
        return self.given

    def seen(self, transport: Transport, rank: int) -> ArrayView | None:
        """A view of that array."""
        array = self.array(transport, rank)
        return None if array is None else view_array(array)

    def told_shapes(self, view: ArrayView | None) -> list[list[int]]:
        """The global shapes that the array and the caller tell of."""
        local = [] if view is None else [view.shape]
        local += [] if self.local_shape is None else [tuple(map(int, self.local_shape))]
        return [self.inferred_shape(shape) for shape in local]

    def told_dtypes(self, view: ArrayView | None) -> list[str]:
        """The dtypes that the array and the caller tell of."""
        told = [] if view is None else [view.dtype]
        return told + ([] if self.dtype is None else [dtype_name(self.dtype)])

    def inferred_shape(self, local: Sequence[int]) -> list[int]:
        """The global shape, if all shards are as large as `local`."""
        shape = list(local)
        for size, given in zip(self.mesh.shape, self.placements, strict=True):
            placement = as_placement(given, len(shape))
            if isinstance(placement, Shard | StridedShard):
                shape[placement.dim] *= size
        return shape


@dataclass(frozen=True)
class _Problem:
    shape: tuple[int, ...]
    dtypes: tuple[str, str]
    topology: Topology
    key: Any
    remembered: bool  # by every rank


def _agree(
    transport: Transport,
    memory: _Memory,
    sides: Sequence[_Side],
    global_shape: Sequence[int] | None,
    topology: Topology | None,
) -> _Problem:
    """Find the shape and the dtypes together, and whether every rank remembers this very call."""
    if memory.topology is None:  # even if one was given: this is collective, and others may have none
        memory.topology = Topology(transport.discover_domains())
    domains = topology or memory.topology
    failures: dict[int, Exception] = {}
    facts = {
        rank: attempt(partial(_facts, transport, sides, rank, global_shape), failures, rank)
        for rank in transport.local_ranks
    }
    raise_together(transport, failures, {})
    placed = tuple((side.mesh, tuple(map(repr, side.placements))) for side in sides)
    wanted = None if global_shape is None else tuple(global_shape)
    key = (wanted, placed, domains, tuple((rank, f[2]) for rank, f in facts.items()))
    mine = {r: json.dumps([*f[:2], key in memory.bound]).encode() for r, f in facts.items()}
    said = [json.loads(text) for text in transport.exchange(mine)]
    shape = _only("global shape", [s for shapes, _, _ in said for s in shapes])
    dtypes = [_only(f"{s.name} dtype", [n for _, d, _ in said for n in d[i]]) for i, s in enumerate(sides)]
    first = dtypes[0] or dtypes[1]
    if shape is None or first is None:
        raise LayoutError("expected a source or destination array on some rank, got none; pass src= and dst=")
    return _Problem(
        tuple(shape), (first, dtypes[1] or first), domains, key, all(remembered for _, _, remembered in said)
    )


def _facts(
    transport: Transport, sides: Sequence[_Side], rank: int, global_shape: Sequence[int] | None
) -> tuple[list[Any], list[list[str]], Any]:
    """The global shapes that a rank's arrays tell of, their dtypes, and the arrays' places."""
    for side in sides:
        if len(side.placements) != side.mesh.ndim:
            raise LayoutError(
                f"expected {side.mesh.ndim} {side.name} placements, one for each axis of {side.mesh!r}, got "
                f"{list(side.placements)}"
            )
    views = [side.seen(transport, rank) for side in sides]
    if global_shape is not None:
        shapes = [list(map(int, global_shape))]
    else:
        shapes = [shape for s, v in zip(sides, views, strict=True) for shape in s.told_shapes(v)]
    places = tuple(None if v is None else (v.pointer, v.shape, v.strides, v.dtype, v.writable) for v in views)
    return shapes, [s.told_dtypes(v) for s, v in zip(sides, views, strict=True)], places


def _only(what: str, values: Sequence[Any]) -> Any:
    """The one value that all ranks tell of; every rank has the same list, so all raise alike."""
    distinct = [v for i, v in enumerate(values) if v is not None and v not in values[:i]]
    if len(distinct) > 1:
        raise LayoutError(
            f"expected one {what}, got {' and '.join(map(str, distinct))} from different arrays"
            + ("; pass global_shape= where shards differ in size" if what == "global shape" else "")
        )
    return distinct[0] if distinct else None


def _plan(problem: _Problem, sides: Sequence[_Side]) -> Plan:
    layouts = [Layout(problem.shape, side.mesh, side.placements) for side in sides]
    transfer = Transfer(*layouts, problem.dtypes[0], NAME, problem.dtypes[1])
    return cached_plan((transfer,), problem.topology, None, DEFAULT_STAGING_BYTES)


def _bind(transport: Transport, memory: _Memory, problem: _Problem, sides: Sequence[_Side]) -> Bound:
    failures: dict[int, Exception] = {}
    made = attempt(partial(_plan, problem, sides), failures, transport.local_ranks[0])
    raise_together(transport, failures, {})
    arrays = [{} if side.given is None else {NAME: side.given} for side in sides]
    bound = made.bind(transport, *arrays)
    if problem.key in memory.bound:  # other ranks did not remember theirs
        memory.bound.pop(problem.key).close()
    bound.forget_arrays()  # they are told by their places, and may go when the caller is done with them
    memory.bound[problem.key] = bound
    while len(memory.bound) > MAX_BOUND or (
        len(memory.bound) > 1 and sum(b.staging_bytes for b in memory.bound.values()) > MAX_STAGING_BYTES
    ):
        memory.bound.popitem(last=False)[1].close()
    return bound
