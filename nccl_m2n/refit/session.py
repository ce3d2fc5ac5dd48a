# SPDX-License-Identifier: Apache-2.0
"""Refit: keep a destination's copy of a model in step with a source's, step after step."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nccl_m2n.errors import LayoutError
from nccl_m2n.execution.bound import DEFAULT_TIMEOUT, Bound
from nccl_m2n.execution.views import ArrayView
from nccl_m2n.planning import Plan, Topology, Transfer, plan
from nccl_m2n.planning.options import DEFAULT_STAGING_BYTES
from nccl_m2n.refit.broadcast import DEFAULT_BUCKET_BYTES, Broadcast
from nccl_m2n.refit.deliver import Delivery, Load
from nccl_m2n.refit.exchange import exchange_parameters
from nccl_m2n.refit.match import match_sides
from nccl_m2n.refit.parameter import Parameter
from nccl_m2n.refit.report import Report, report_of
from nccl_m2n.refit.verify import differing
from nccl_m2n.transport.agree import attempt, raise_together
from nccl_m2n.transport.base import Transport

Declaration = Sequence[Parameter] | Mapping[int, Sequence[Parameter]]


@dataclass(frozen=True)
class _Prepared:
    """What moves some of the parameters."""

    bound: Bound  # those that go from shard to shard
    broadcast: Broadcast | None  # those that go as full tensors
    report: Report  # but for the time it takes

    @property
    def bounds(self) -> list[Bound]:
        return [self.bound, *(self.broadcast.bounds if self.broadcast else ())]


class Refit:
    """A source and a destination of one model, joined for as many steps as wanted.

    Each rank declares the parameters that it holds on the side or sides it is on. Construction is collective: the
    descriptions are exchanged through the transport, matched by name, checked, planned as one plan over all tensors
    and bound; whatever is wrong is raised on every rank. A context manager.

    Args:
        transport: Joins all ranks of both sides.
        source: This rank's parameters as a source; empty on ranks that are none. With a transport that drives
            several ranks, a mapping from rank to parameters.
        destination: Likewise, what is written.
        topology: NVLink domains; None asks the transport.
        cast: Whether element types of the two sides may differ (float types; the narrower one crosses).
        missing: ``"error"``, or ``"skip"`` for parameters that only one side declares.
        load: Called as ``load(name, tensor)`` with the full tensor of each parameter that this rank declares
            without a layout, as `wait` goes on. The tensor is a view of a buffer that is used again: NumPy's in
            host memory, CuPy's on a device. A mapping from rank where the transport drives several.
        whole: Patterns of names that go as full tensors though they have a layout; ``["*"]`` for a comparison.
        bucket_bytes: Bytes of full tensors that arrive at once, where there are any.
        staging_bytes: Staging that a rank may need, in bytes.
        chunk_bytes: Upper bound of a chunk, in bytes; None chooses.
        method: As for `plan`; ``"gather_broadcast"`` for a comparison.

    Raises:
        LayoutError: For a parameter that does not fit its layout or the other side.
        DisagreementError: If ranks of one side describe a parameter differently.

    Example:
        >>> import numpy as np
        >>> import nccl_m2n as m2n
        >>> rows = m2n.Layout((4, 2), m2n.Mesh([0, 1]), [m2n.Shard(0)])
        >>> whole = m2n.Layout((4, 2), m2n.Mesh([2]), [m2n.Replicate()])
        >>> source = {r: [m2n.Parameter("w", rows, np.full((2, 2), r))] for r in (0, 1)}
        >>> array = np.zeros((4, 2), int)
        >>> with m2n.Refit(m2n.LocalTransport(3), source, {2: [m2n.Parameter("w", whole, array)]}) as refit:
        ...     refit.run()
        ...     refit.wait()
        >>> array.tolist()
        [[0, 0], [0, 0], [1, 1], [1, 1]]
    """

    def __init__(
        self,
        transport: Transport,
        source: Declaration = (),
        destination: Declaration = (),
        topology: Topology | None = None,
        *,
        cast: bool = False,
        missing: str = "error",
        load: Load | Mapping[int, Load] | None = None,
        whole: Sequence[str] = (),
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        staging_bytes: int = DEFAULT_STAGING_BYTES,
        chunk_bytes: int | None = None,
        method: str = "reshard",
    ) -> None:
        both = (source, destination)
        sides = exchange_parameters(transport, lambda rank: [_of(side, transport, rank) for side in both])
        self._matched = match_sides(*sides, cast=cast, missing=missing, whole=whole)
        self.topology = Topology(transport.discover_domains()) if topology is None else topology
        self._transport = transport
        self._options = {"staging_bytes": staging_bytes, "chunk_bytes": chunk_bytes, "method": method}
        self._bucket_bytes = bucket_bytes
        self._arrays = [_arrays(transport, side, self._matched.names) for side in both]
        self._delivery = self._make_delivery(load)
        self._prepared: dict[frozenset[str] | None, _Prepared] = {}
        self._running: tuple[_Prepared, float, int | None, Any] | None = None
        self._version: int | None = None
        self._checked: Plan | None = None
        self.report: Report | None = None
        self.prepare()

    def _make_delivery(self, load: Load | Mapping[int, Load] | None) -> Delivery:
        """Collective: all ranks hear of one that would get full tensors and has no loader."""
        failures: dict[int, Exception] = {}
        ranks = self._transport.local_ranks

        def make() -> Delivery:
            made = Delivery(self._transport, load, self._matched.laid_out, self._arrays[1])
            made.require(self._matched.whole, ranks)
            return made

        made = attempt(make, failures, ranks[0])
        if self._matched.whole or load is not None:
            raise_together(self._transport, failures, {})
        return made

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """What is moved: from shard to shard, and then the full tensors."""
        return self._matched.sharded + self._matched.whole

    @property
    def plan(self) -> Plan:
        """The plan over all tensors that go from shard to shard."""
        return self._prepared[None].bound.plan

    @property
    def version(self) -> int | None:
        """What the last complete run was stamped with; None before, during and after a broken one."""
        return self._version

    def prepare(self, only: Iterable[str] | None = None) -> None:
        """Plan and bind the tensors called `only`, once; all if None. Collective.

        Raises:
            LayoutError: If there is no such parameter.
        """
        key = _key(only)
        if key in self._prepared:
            return
        unknown = sorted((key or frozenset()) - self._matched.names)
        if unknown:
            raise LayoutError(f"expected names of parameters of this refit, got {', '.join(unknown[:4])}")
        sharded, whole = (
            [t for t in transfers if key is None or t.name in key]
            for transfers in (self._matched.sharded, self._matched.whole)
        )
        names = {t.name for t in sharded}
        arrays = [_by_name(self._transport, side, names) for side in self._arrays]
        bound = plan(sharded, self.topology, **self._options).bind(self._transport, *arrays)
        broadcast = self._broadcast(whole) if whole else None
        plans = [bound.plan, *(broadcast.plans if broadcast else ())]
        resharded = sharded if self._options["method"] == "reshard" else []
        self._prepared[key] = _Prepared(bound, broadcast, report_of(plans, resharded, sharded + whole))

    def _broadcast(self, transfers: Sequence[Transfer]) -> Broadcast:
        arrays = _by_name(self._transport, self._arrays[0], {t.name for t in transfers})
        return Broadcast(
            self._transport,
            transfers,
            arrays,
            self._delivery,
            self.topology,
            self._bucket_bytes,
            self._options,
        )

    def run(
        self, *, only: Iterable[str] | None = None, version: int | None = None, stream: Any = None
    ) -> None:
        """Start moving what the source holds now. Collective.

        Args:
            only: Names of the parameters to move; all if None. The first run of a subset prepares it.
            version: Stamp of this step; `version` shows it once every rank has everything that the run moves.
            stream: As for `Bound.run`.
        """
        key = _key(only)
        self.prepare(key)
        if self._running is not None and self._running[0].broadcast is not None:
            self.wait()  # its full tensors are still to come
        self._version = None  # torn from here on
        self._running = (self._prepared[key], time.perf_counter(), version, stream)
        self._prepared[key].bound.run(stream)

    def wait(self, timeout: float | None = DEFAULT_TIMEOUT) -> None:
        """Wait until the run is over. Full tensors move and are delivered now, after the others.

        Collective where there are full tensors or the run has a version: all ranks stamp it, or none.

        Args:
            timeout: Limit in seconds; None waits for ever.

        Raises:
            TransferTimeout: If the limit passes.
            M2nError: On every rank, if `load` failed on one.
        """
        if self._running is None:
            return
        prepared, began, version, stream = self._running
        deadline = None if timeout is None else time.monotonic() + timeout
        prepared.bound.wait(timeout)
        failures = {} if prepared.broadcast is None else prepared.broadcast.run(stream, deadline)
        self._running = None
        if prepared.broadcast is not None or version is not None:
            raise_together(self._transport, failures, {"the version": version})
        self._version = version
        self.report = replace(prepared.report, seconds=time.perf_counter() - began)

    def capture(self, only: Iterable[str] | None = None) -> None:
        """On GPUs, record the run in a CUDA graph: later runs are one launch. Full tensors stay outside. Collective."""
        key = _key(only)
        self.prepare(key)
        self._prepared[key].bound.capture()

    def verify(self, only: Iterable[str] | None = None) -> list[str]:
        """Names of the tensors whose bytes differ at any destination rank, the same list on every rank.

        Compares checksums that depend on every element's value and place; no tensor is moved again. What was
        handed to `load` is not looked at: only the user knows where it is. Collective.

        Args:
            only: Names of the parameters to look at; all if None.
        """
        if self._checked is None:
            laid_out = self._matched.laid_out
            self._checked = plan(self._matched.sharded + laid_out, self.topology) if laid_out else self.plan
        names = self._matched.names if only is None else _key(only)
        arrays = [_by_name(self._transport, side, self._matched.names) for side in self._arrays]
        return differing(self._transport, self._checked, *arrays, names)

    def close(self) -> None:
        """Release everything. May be called twice."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Refit:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for prepared in self._prepared.values():
            for bound in prepared.bounds:
                bound.__exit__(kind, error, trace)
        self._prepared = {}

    def __repr__(self) -> str:
        return f"<Refit of {len(self.transfers)} tensors over {self._transport!r}, version {self.version}>"


def _key(only: Iterable[str] | None) -> frozenset[str] | None:
    return None if only is None else frozenset([only] if isinstance(only, str) else only)


def _of(declaration: Declaration, transport: Transport, rank: int) -> Sequence[Parameter]:
    if isinstance(declaration, Mapping):
        return declaration.get(rank, ())
    if len(transport.local_ranks) > 1 and declaration:
        raise LayoutError("expected a mapping from rank to parameters, for this process drives several ranks")
    return declaration


def _arrays(
    transport: Transport, declaration: Declaration, names: frozenset[str]
) -> dict[int, dict[str, ArrayView]]:
    """One side's arrays by rank and name."""
    arrays: dict[int, dict[str, ArrayView]] = {}
    for rank in transport.local_ranks:
        views = [(p.name, p.view()) for p in _of(declaration, transport, rank) if p.name in names]
        arrays[rank] = {name: view for name, view in views if view is not None}
    return arrays


def _by_name(
    transport: Transport, arrays: Mapping[int, Mapping[str, ArrayView]], names: Collection[str]
) -> dict[str, Any]:
    """Those with some names, as `Plan.bind` takes them."""
    if len(transport.local_ranks) == 1:
        return {name: view for name, view in arrays[transport.local_ranks[0]].items() if name in names}
    found: dict[str, Any] = {}
    for rank, views in arrays.items():
        for name, view in views.items():
            if name in names:
                found.setdefault(name, {})[rank] = view
    return found
