# SPDX-License-Identifier: Apache-2.0
"""Refit: keep a destination's copy of a model in step with a source's, step after step."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from nccl_m2n.checks import limit_seconds, made_by
from nccl_m2n.dtypes import Cast
from nccl_m2n.errors import M2nError, TransportError
from nccl_m2n.execution.bound import DEFAULT_TIMEOUT
from nccl_m2n.planning import Plan, Topology, Transfer, plan
from nccl_m2n.planning.options import DEFAULT_STAGING_BYTES, PlanOptions
from nccl_m2n.refit.agreed import agreed_names, agreed_ranks, agreed_version
from nccl_m2n.refit.broadcast import DEFAULT_BUCKET_BYTES
from nccl_m2n.refit.deliver import Loader
from nccl_m2n.refit.join import join_sides, rejoined
from nccl_m2n.refit.match import Matched
from nccl_m2n.refit.names import Names
from nccl_m2n.refit.options import RefitOptions
from nccl_m2n.refit.parameter import Parameters
from nccl_m2n.refit.report import Report
from nccl_m2n.refit.subset import Moving, Subset, Subsets
from nccl_m2n.refit.verify import differing
from nccl_m2n.transport.agree import together
from nccl_m2n.transport.base import Transport
from nccl_m2n.typing import Stream


@dataclass(frozen=True)
class _Running:
    """A run that has been started."""

    subset: Subset
    moving: Moving
    began: float  # on the clock of time.perf_counter
    version: object
    stream: Stream


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
        cast: Whether element types of the two sides may differ; the narrower one crosses. True: float types, where
            the destination's range holds the source's. Others, such as ``"float8_e4m3fn"``, have to be named besides,
            for all parameters or in a mapping from pattern of names to type: values may leave their range.
        missing: ``"error"``, or ``"skip"`` for parameters that only one side declares; `skipped` tells them.
        names: What the source's names become: a mapping, a function, or pairs of an old and a new beginning, such
            as ``[("model.", "language_model.model.")]``.
        load: Called as ``load(name, tensor)`` with the full tensor of each parameter that this rank declares
            without a layout, as `wait` goes on. The tensor is a view of a buffer that is used again: NumPy's in
            host memory, CuPy's on a device. A mapping from rank where the transport drives several.
        whole: Patterns of names that go as full tensors though they have a layout; ``["*"]`` for a comparison.
        bucket_bytes: Bytes of full tensors that arrive at once, where there are any.
        staging_bytes: Staging that a rank may need, in bytes.
        chunk_bytes: Upper bound of a chunk, in bytes; None chooses.
        method: As for `plan`; ``"gather_broadcast"`` for a comparison.
        delta: True sends from shard to shard only what changed since the last run, bit for bit, for which every
            source keeps what it sent last (``"host"``: in pinned host memory). The first run, and the first one
            of another subset, sends everything. See `forget`.

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
        source: Parameters = (),
        destination: Parameters = (),
        topology: Topology | None = None,
        *,
        cast: Cast = False,
        missing: str = "error",
        names: Names | None = None,
        load: Loader | Mapping[int, Loader] | None = None,
        whole: Sequence[str] = (),
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        staging_bytes: int = DEFAULT_STAGING_BYTES,
        chunk_bytes: int | None = None,
        method: str = "reshard",
        delta: bool | str = False,
    ) -> None:
        def options() -> RefitOptions:
            made = PlanOptions(method, chunk_bytes, staging_bytes)
            return RefitOptions.of(topology, cast, missing, whole, bucket_bytes, made, delta)

        self._transport = made_by(transport, Transport, "the transport of a refit", error=TransportError)  # type: ignore[type-abstract]
        self._joined = join_sides(transport, (source, destination), options, names, load)
        self._subsets = Subsets(transport, self._joined)
        self._running: _Running | None = None
        self._version: int | None = None
        self._checked: Plan | None = None
        self.report: Report | None = None
        self._closed = False

    @property
    def _matched(self) -> Matched:
        return self._joined.matched

    @property
    def topology(self) -> Topology:
        """NVLink domains."""
        return self._joined.topology

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """What is moved: from shard to shard, and then the full tensors."""
        return self._matched.sharded + self._matched.whole

    @property
    def skipped(self) -> Mapping[str, tuple[str, ...]]:
        """Names that one side alone declares and that do not move, by side: ``"source"`` and ``"destination"``."""
        return self._matched.skipped

    @property
    def plan(self) -> Plan:
        """The plan over all tensors that go from shard to shard."""
        return self._subsets.all.plan

    @property
    def version(self) -> int | None:
        """What the last complete run was stamped with; None before, during and after a broken one."""
        return self._version

    def prepare(self, only: Iterable[str] | None = None) -> None:
        """Plan and bind the tensors that `only` names, once; the last few subsets are kept. Collective.

        Args:
            only: Names and patterns of names; None: all, which construction has prepared.

        Raises:
            LayoutError: On every rank, if one of them means no parameter.
            DisagreementError: If the ranks name different ones.
        """
        self._prepared(only, "prepare")

    def _prepared(self, only: Iterable[str] | None, purpose: str) -> tuple[Subset, Moving]:
        """Some parameters, bound; all ranks agree which, unless these are all. Collective."""
        self._require_open()
        names = agreed_names(self._transport, only, self._matched.names, purpose)
        if self._running is not None and self._running.subset is not self._subsets.known(names):
            self.wait()  # it is in the staging
        subset = self._subsets.of(names)
        return subset, self._subsets.bind(subset)

    def run(
        self, *, only: Iterable[str] | None = None, version: int | None = None, stream: Stream = None
    ) -> None:
        """Start moving what the source holds now. Collective.

        Args:
            only: Names and patterns of names of the parameters to move; all if None. All ranks first agree on
                them, and the first run of a subset prepares it.
            version: Stamp of this step, on all ranks or on none; `version` shows it once every rank has everything.
            stream: As for `Bound.run`.
        """
        subset, moving = self._prepared(only, "run")
        if self._running is not None and moving.broadcast is not None:
            self.wait()  # its full tensors are still to come
        self._version = None  # torn from here on
        self._running = _Running(subset, moving, time.perf_counter(), version, stream)
        self._subsets.begin(subset, stream)

    def wait(self, timeout: float | None = DEFAULT_TIMEOUT) -> None:
        """Wait until the run is over. Full tensors move and are delivered now, after the others.

        Collective where there are full tensors or the run has a version: all ranks stamp it, or none.

        Args:
            timeout: Limit of all that in seconds; None waits for ever.

        Raises:
            TransferTimeout: If the limit passes.
            M2nError: On every rank, if `load` failed on one.
            DisagreementError: If the ranks give different versions; none is stamped.
        """
        self._require_open()
        limit = limit_seconds(timeout)
        if self._running is None:
            return
        now = self._running
        deadline = None if limit is None else time.monotonic() + limit
        now.moving.bound.wait(limit)
        broadcast = now.moving.broadcast
        failures = {} if broadcast is None else broadcast.run(now.stream, deadline)
        self._running = None
        version = None
        if broadcast is not None or now.version is not None:
            try:
                version = agreed_version(self._transport, now.version, failures, deadline)
            except M2nError:
                now.moving.bound.forget()  # not every rank has this version
                raise
        self._version = version
        report = now.subset.report.with_changes(now.moving.bound.changes)
        self.report = replace(report, seconds=time.perf_counter() - now.began)

    def capture(self, only: Iterable[str] | None = None) -> None:
        """On GPUs, record the run in a CUDA graph: later runs are one launch. Full tensors stay outside. Collective."""
        self._prepared(only, "capture")[1].bound.capture()

    def verify(self, only: Iterable[str] | None = None) -> list[str]:
        """Names of the tensors whose bytes differ at any destination rank, the same list on every rank.

        Compares checksums that depend on every element's value and place; no tensor is moved again. What was
        handed to `load` is not looked at: only the user knows where it is. Collective.

        Args:
            only: Names and patterns of names of the parameters to look at; all if None.
        """
        self._require_open()
        if self._checked is None:
            laid_out = self._matched.laid_out
            every = self._matched.sharded + laid_out
            self._checked = plan(every, self.topology) if laid_out else self.plan
        names = agreed_names(self._transport, only, self._matched.names, "verify")
        return differing(self._transport, self._checked, self._joined.arrays, names)

    def rebind(self, source: Parameters | None = None, destination: Parameters | None = None) -> None:
        """Go on with other arrays of the same parameters, as an engine has them that slept. Collective.

        Ranks whose arrays stay call it without any. What was captured has to be captured again. If something does not
        fit on one rank, every rank raises, and the arrays stay those of before.

        Args:
            source: This rank's parameters as a source, declared as at construction but for their arrays; None: as
                before.
            destination: Likewise, what is written.

        Raises:
            LayoutError: If other parameters are declared, or an array does not fit.
        """
        self._require_open()
        if self._running is not None:
            self.wait()
        joined = rejoined(self._transport, self._joined, (source, destination))
        self._subsets.rebind(joined)
        self._joined = joined

    def forget(self, ranks: Iterable[int] | None = None) -> None:
        """With ``delta``, have the next run send everything that goes to some ranks. Collective.

        For destinations whose weights were lost or changed by others.

        Args:
            ranks: Destination ranks; all if None.

        Raises:
            DisagreementError: If the ranks name different ones.
        """
        self._require_open()
        self._subsets.forget(agreed_ranks(self._transport, ranks))

    def release(self) -> None:
        """Let go of staging, buffers and messages until the next run (GPU memory: to CuPy's pool). Collective."""
        self._require_open()
        if self._running is not None:
            self.wait()
        together(self._transport, "refit: release", lambda rank: None)
        self._subsets.release()

    def close(self) -> None:
        """Release everything, and let go of the arrays. May be called twice; nothing else may be called then."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Refit:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._closed:
            return
        self._closed, self._running = True, None
        self._joined = self._joined.without_arrays()
        self._subsets.close(kind, error, trace)

    def _require_open(self) -> None:
        if self._closed:
            raise TransportError("expected an open refit, got a closed one; make a new Refit of the arrays")

    def __repr__(self) -> str:
        skipped = f" ({self._matched.left_out} skipped)" if self._matched.left_out else ""
        state = "closed" if self._closed else f"version {self.version}"
        return f"<Refit of {len(self.transfers)} tensors{skipped} over {self._transport!r}, {state}>"
