# SPDX-License-Identifier: Apache-2.0
"""Refit: keep a destination's copy of a model in step with a source's, step after step."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nccl_m2n.errors import LayoutError
from nccl_m2n.execution.agree import raise_together
from nccl_m2n.execution.bound import DEFAULT_TIMEOUT, Bound
from nccl_m2n.planning import Plan, Topology, Transfer, plan
from nccl_m2n.planning.plan import DEFAULT_STAGING_BYTES
from nccl_m2n.planning.table import bytes_text
from nccl_m2n.refit.match import exchange_parameters, match_sides
from nccl_m2n.refit.parameter import Parameter
from nccl_m2n.refit.verify import differing
from nccl_m2n.transport.base import Transport

Declaration = Sequence[Parameter] | Mapping[int, Sequence[Parameter]]


@dataclass(frozen=True)
class Report:
    """What one run moved and how long it took on this rank."""

    seconds: float  # from `run` to the end of `wait`
    network_bytes: int  # between domains, all ranks together
    network_bytes_bound: int  # the least there can be
    nvlink_bytes: int
    local_bytes: int
    busiest_nic_bytes: int
    tensors: int

    @property
    def nic_gbytes(self) -> float:
        """Rate of the busiest NIC, in 1e9 bytes a second."""
        return self.busiest_nic_bytes / self.seconds / 1e9 if self.seconds else 0.0

    def __str__(self) -> str:
        return (
            f"{self.tensors} tensors in {self.seconds * 1e3:.1f} ms: network {bytes_text(self.network_bytes)} "
            f"(least {bytes_text(self.network_bytes_bound)}), NVLink {bytes_text(self.nvlink_bytes)}, "
            f"local {bytes_text(self.local_bytes)}, busiest NIC {self.nic_gbytes:.2f} GB/s"
        )


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
        staging_bytes: int = DEFAULT_STAGING_BYTES,
        chunk_bytes: int | None = None,
        method: str = "reshard",
    ) -> None:
        both = (source, destination)
        sides = exchange_parameters(transport, lambda rank: [_of(side, transport, rank) for side in both])
        self.transfers: tuple[Transfer, ...] = tuple(match_sides(*sides, cast=cast, missing=missing))
        self.topology = Topology(transport.discover_domains()) if topology is None else topology
        self._transport = transport
        self._options = {"staging_bytes": staging_bytes, "chunk_bytes": chunk_bytes, "method": method}
        self._arrays = [_arrays(transport, side) for side in both]
        self._bound: dict[frozenset[str] | None, Bound] = {}
        self._running: tuple[Bound, float, int | None] | None = None
        self._version: int | None = None
        self.report: Report | None = None
        self.prepare()

    @property
    def plan(self) -> Plan:
        """The plan over all tensors."""
        return self._bound[None].plan

    @property
    def version(self) -> int | None:
        """What the last complete run was stamped with; None before, during and after a broken one."""
        return self._version

    def prepare(self, only: Iterable[str] | None = None) -> None:
        """Plan and bind the tensors called `only`, once; all if None. Collective.

        Raises:
            LayoutError: If there is no such parameter.
        """
        key = None if only is None else frozenset(only)
        if key in self._bound:
            return
        unknown = sorted((key or frozenset()) - {t.name for t in self.transfers})
        if unknown:
            raise LayoutError(f"expected names of parameters of this refit, got {', '.join(unknown[:4])}")
        chosen = [t for t in self.transfers if key is None or t.name in key]
        made = plan(chosen, self.topology, **self._options)
        names = {t.name for t in chosen}
        arrays = [{n: a for n, a in side.items() if n in names} for side in self._arrays]
        self._bound[key] = made.bind(self._transport, *arrays)

    def run(
        self, *, only: Iterable[str] | None = None, version: int | None = None, stream: Any = None
    ) -> None:
        """Start moving what the source holds now. Collective.

        Args:
            only: Names of the parameters to move; all if None. The first run of a subset prepares it.
            version: Stamp of this step; `version` shows it once every rank has everything.
            stream: As for `Bound.run`.
        """
        key = None if only is None else frozenset(only)
        self.prepare(key)
        self._version = None  # torn from here on
        self._running = (self._bound[key], time.perf_counter(), version)
        self._bound[key].run(stream)

    def wait(self, timeout: float | None = DEFAULT_TIMEOUT) -> None:
        """Wait until the run is over. Collective where the run has a version: all ranks stamp it, or none.

        Raises:
            TransferTimeout: If the limit, in seconds, passes.
        """
        if self._running is None:
            return
        bound, began, version = self._running
        bound.wait(timeout)
        self._running = None
        self.report = _report(bound.plan, time.perf_counter() - began)
        if version is not None:
            raise_together(self._transport, {}, {"the version": version})
            self._version = version

    def capture(self, only: Iterable[str] | None = None) -> None:
        """On GPUs, record the run in a CUDA graph: later runs are one launch. Collective."""
        key = None if only is None else frozenset(only)
        self.prepare(key)
        self._bound[key].capture()

    def verify(self) -> list[str]:
        """Names of the tensors whose bytes differ at any destination rank, the same list on every rank.

        Compares checksums that depend on every element's value and place; no tensor is moved again. Collective.
        """
        return differing(self._transport, self.plan, *self._arrays)

    def close(self) -> None:
        """Release everything. May be called twice."""
        for bound in self._bound.values():
            bound.close()
        self._bound = {}

    def __enter__(self) -> Refit:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for bound in self._bound.values():
            bound.__exit__(kind, error, trace)
        self._bound = {}

    def __repr__(self) -> str:
        return f"<Refit of {len(self.transfers)} tensors over {self._transport!r}, version {self.version}>"


def _of(declaration: Declaration, transport: Transport, rank: int) -> Sequence[Parameter]:
    if isinstance(declaration, Mapping):
        return declaration.get(rank, ())
    if len(transport.local_ranks) > 1 and declaration:
        raise LayoutError("expected a mapping from rank to parameters, for this process drives several ranks")
    return declaration


def _arrays(transport: Transport, declaration: Declaration) -> dict[str, Any]:
    """Arrays by name, as `Plan.bind` takes them."""
    several = len(transport.local_ranks) > 1
    arrays: dict[str, Any] = {}
    for rank in transport.local_ranks:
        for p in _of(declaration, transport, rank):
            if p.array is not None:
                view = p.view()
                if several:
                    arrays.setdefault(p.name, {})[rank] = view
                else:
                    arrays[p.name] = view
    return arrays


def _report(plan: Plan, seconds: float) -> Report:
    traffic = plan.traffic()
    return Report(
        seconds,
        traffic.network_bytes,
        traffic.network_bytes_bound,
        traffic.nvlink_bytes,
        traffic.local_bytes,
        traffic.busiest,
        len(plan.transfers),
    )
