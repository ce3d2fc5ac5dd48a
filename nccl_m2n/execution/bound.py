# SPDX-License-Identifier: Apache-2.0
"""A bound plan: ready to run, again and again."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from nccl_m2n.checks import limit_seconds, shown
from nccl_m2n.errors import PlanError, TransportError
from nccl_m2n.execution.delta.changes import Changes
from nccl_m2n.execution.given import GivenArrays
from nccl_m2n.execution.staging import Staging
from nccl_m2n.transport.base import Transport
from nccl_m2n.typing import Stream

if TYPE_CHECKING:
    from nccl_m2n.planning import Plan

DEFAULT_TIMEOUT = 600.0  # seconds


class Executor(Protocol):
    """What runs the programs of this process's ranks."""

    staging_bytes: int
    baseline_bytes: int
    changes: Changes | None

    @property
    def busy(self) -> bool:
        """Whether a run has been started and is not known to be over."""

    def connect(self) -> None:
        """Make connections, once all ranks have agreed. Collective."""

    def start(self, stream: Stream = None) -> None:
        """Start a run, after the last one; on a device, enqueue all of it and return at once."""

    def capture(self) -> None:
        """Record what a run does, so that later runs replay it by a single launch."""

    def finish(self, deadline: float | None) -> None:
        """End the started run, before the deadline (seconds, as `time.monotonic` counts)."""

    def forget(self, ranks: Collection[int] | None) -> None:
        """Take what some ranks have for lost, all if None."""

    def close(self) -> None:
        """Release everything."""


# Makes what runs a plan on some source and destination arrays, and what keeps these alive. Collective.
Prepare: TypeAlias = Callable[[GivenArrays, GivenArrays, Staging], tuple[Executor, Sequence[object]]]


def checked_delta(delta: object) -> bool | str:
    """Whether only changes are sent, and ``"host"`` where what was sent last is kept in host memory.

    Raises:
        PlanError: For anything else.
    """
    if delta is True or delta is False or (isinstance(delta, str) and delta == "host"):
        return delta
    raise PlanError(f"expected delta to be True, False or 'host', got {shown(delta)}")


class Bound:
    """A plan bound to a transport and to arrays; made by `Plan.bind`, a context manager.

    Nothing is planned, allocated or sliced any more: `run` starts a transfer of what the source arrays then
    hold, and `wait` ends it.
    """

    def __init__(
        self, plan: Plan, transport: Transport, prepare: Prepare, staging: Staging | None = None
    ) -> None:
        self.plan, self.transport = plan, transport
        self._prepare, self._shared_staging = prepare, staging
        self._executor: Executor | None = None
        self._arrays: tuple[GivenArrays, GivenArrays] = ({}, {})
        self._owners: Sequence[object] = ()  # keeps the arrays alive

    @property
    def staging_bytes(self) -> int:
        """Bytes of staging that this process allocated."""
        return self._open().staging_bytes

    @property
    def baseline_bytes(self) -> int:
        """Bytes that this process keeps of what it sent last; none without ``delta``."""
        return self._open().baseline_bytes

    @property
    def changes(self) -> Changes | None:
        """With ``delta``, how much changed in the last run, and what it sent; the same on every rank."""
        return self._open().changes

    def forget(self, ranks: Collection[int] | None = None) -> None:
        """With ``delta``, have the next run send everything that goes to some ranks. Every rank must call it alike.

        For destinations whose arrays were written by others, or made anew. Without ``delta`` it does nothing.

        Args:
            ranks: Destination ranks; all if None.
        """
        if self._executor is not None:
            self._executor.forget(ranks)

    def rebind(self, sources: GivenArrays | None = None, destinations: GivenArrays | None = None) -> None:
        """Go on with other arrays of the same plan, as an engine has them that slept and gave its memory away.

        Collective, like `Plan.bind`: ranks whose arrays stay call it without any. If an array does not fit, every
        rank raises, and the arrays are those of before.

        Args:
            sources: As for `Plan.bind`; None: as before.
            destinations: Likewise.

        Raises:
            LayoutError: For an array that does not fit, is missing, left over, read-only, or overlaps another.
            TransportError: If this is closed.
        """
        self.wait()
        self.take(
            self._arrays[0] if sources is None else sources,
            self._arrays[1] if destinations is None else destinations,
        )

    def take(self, sources: GivenArrays, destinations: GivenArrays) -> None:
        """Prepare to run on some arrays, in place of those of before. Collective, and part of `Plan.bind`."""
        staging = self._shared_staging or Staging(self.transport)
        executor, self._owners = self._prepare(sources, destinations, staging)
        if self._executor is not None:
            self._executor.close()
        self._executor, self._arrays = executor, (dict(sources), dict(destinations))

    def run(self, stream: Stream = None) -> None:
        """Start moving what the source arrays hold. Collective: every rank must call it.

        In host memory the bytes move while `wait` waits; until then neither side's arrays may be touched. On
        a device everything is enqueued on a stream, and whatever is enqueued there later sees the result.

        Args:
            stream: The CUDA stream that orders the run after what it holds now and before what comes
                later; None takes CuPy's current one. Ignored in host memory.

        Raises:
            TransportError: If an earlier run failed or this was closed.
        """
        executor = self._open()
        self._guard(lambda: executor.start(stream))

    def capture(self) -> None:
        """Capture the whole program in a CUDA graph: later runs are one launch, with next to no host time.

        Close the binding before its transport: the graph holds on to the communicators. In host memory
        there is nothing to capture, and this does nothing.
        """
        executor = self._open()
        self._guard(executor.capture)

    def wait(self, timeout: float | None = DEFAULT_TIMEOUT) -> None:
        """Wait until the last run is over and the destination arrays are complete.

        Args:
            timeout: Limit in seconds; None waits forever.

        Raises:
            TransferTimeout: If the limit passes. The transport is then aborted on this rank: a peer may be
                gone, and nothing more can be sent over it.
        """
        limit = limit_seconds(timeout)
        deadline = None if limit is None else time.monotonic() + limit
        executor = self._open()
        self._guard(lambda: executor.finish(deadline))

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self.transport.abort(f"broke in a run: {error or type(error).__name__}")
            raise

    def _open(self) -> Executor:
        self.transport.require_usable()
        if self._executor is None:
            raise TransportError("expected an open binding, got a closed one; bind the plan again")
        return self._executor

    def forget_arrays(self) -> None:
        """Stop keeping the arrays alive: from now on the caller has to, whenever this runs."""
        self._owners, self._arrays = (), ({}, {})

    def close(self) -> None:
        """Wait for the last run and release staging and messages. May be called twice."""
        executor = self._executor
        if executor is not None and executor.busy and self.transport.broken is not None:
            self.transport.keep((executor, self._owners))  # peers may still write into this memory
        elif executor is not None:
            if executor.busy:
                self.wait()
            executor.close()
        self._executor, self._owners, self._arrays, self._shared_staging = None, (), ({}, {}), None

    def __del__(self) -> None:
        executor = self._executor
        if executor is not None and executor.busy:  # dropped in a run: its memory is not free yet
            self.transport.keep((executor, self._owners))

    def __enter__(self) -> Bound:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self._executor is not None and self._executor.busy:
            # The peers may be anywhere: an orderly end would wait for them.
            self.transport.abort(f"was left in a run by {type(error).__name__}")
        self.close()

    def __repr__(self) -> str:
        state = "broken" if self.transport.broken else "closed" if self._executor is None else "open"
        return f"<Bound {self.plan!r}, {state}>"
