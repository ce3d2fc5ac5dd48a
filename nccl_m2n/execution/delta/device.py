# SPDX-License-Identifier: Apache-2.0
"""Running a plan on GPUs by sending only what changed since the last run; see `delta_host` for the same on a host.

A run first packs and compares everything, one launch each a round, and gathers all counts over the communicators. The
host waits for these once. Then wide rounds run as `device` runs rounds: while one is on the wire, the side stream
writes into place what the one before brought, and packs and compacts what the next one sends.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

import numpy as np

from nccl_m2n.execution.bound import DEFAULT_TIMEOUT
from nccl_m2n.execution.delta.changes import Changes
from nccl_m2n.execution.delta.device_rank import DeviceRank
from nccl_m2n.execution.device import callers_streams, device_kept
from nccl_m2n.execution.lower import Task, Wire
from nccl_m2n.planning import Plan
from nccl_m2n.planning.delta import Chunks, WideRun
from nccl_m2n.transport.base import DeviceTransport
from nccl_m2n.typing import Ints, Stream


class DeltaDeviceExecutor:
    """The programs of this process's ranks, bound to device arrays, sending what changed.

    Args:
        transport: Moves the messages.
        plan: What is bound.
        tasks: For each local rank its program and its arrays.
        wire: What elements are on the wire.
        host_baseline: Whether what was sent last is kept in pinned host memory.
    """

    def __init__(
        self,
        transport: DeviceTransport,
        plan: Plan,
        tasks: Mapping[int, Task],
        wire: Wire,
        host_baseline: bool = False,
    ) -> None:
        self._transport, self._chunks = transport, Chunks.of(plan)
        self._slots = self._chunks.dense_slots()
        counts = np.bincount(self._chunks.sender, minlength=transport.size)
        self._most = max(1, int(counts.max(initial=0)))
        self._ranks = [
            DeviceRank(transport, self._chunks, self._slots, self._most, *task, wire, host_baseline)
            for _, task in sorted(tasks.items())
        ]
        self._fresh = np.ones(len(self._chunks.sender), bool)
        self._ran = False
        self.staging_bytes = sum(one.staging_bytes for one in self._ranks)
        self.baseline_bytes = sum(one.baseline_bytes for one in self._ranks)
        self.changes: Changes | None = None

    @property
    def busy(self) -> bool:
        """Whether the device still works on the last run."""
        return self._ran and not all(one.finished.done for one in self._ranks)

    def connect(self) -> None:
        """Make the connections that the program uses. Collective: only after all ranks have agreed."""
        self._transport.connect(
            (one.program.rank, peer, send)
            for one in self._ranks
            for peer, send in zip(
                one.program.messages["peer"].tolist(), one.program.messages["send"].tolist(), strict=True
            )
        )

    def capture(self) -> None:
        """Nothing: sizes differ from run to run."""

    def forget(self, ranks: Collection[int] | None) -> None:
        """Take what some ranks have for lost: all of it goes there with the next run."""
        self._fresh |= True if ranks is None else self._chunks.reaching(ranks)

    def start(self, stream: Stream = None) -> None:
        """Compare, hear of all ranks' counts, which takes the host along, and enqueue the rest."""
        callers = callers_streams(stream, [(one.program.rank, one.device) for one in self._ranks])
        with device_kept():
            for one, caller in zip(self._ranks, callers, strict=True):
                if self._ran:
                    caller.wait_event(one.finished)
                one.open(caller, alone=len(self._ranks) == 1)
                one.count(self._fresh)
            entries = self._gathered()
            run = WideRun.of(self._chunks, entries, self._slots)
            self._enqueue(run)
            for one, caller in zip(self._ranks, callers, strict=True):
                one.leave(caller)
        self._ran = True
        self._fresh[:] = False
        self.changes = Changes.of(self._chunks, entries, run.sizes)

    def _gathered(self) -> Ints:
        """How many units of each chunk changed, told by the senders to all ranks."""
        self._transport.gather(
            {one.program.rank: (one.entries.data.ptr, one.every.data.ptr) for one in self._ranks},
            4 * self._most,
            {one.program.rank: one.main.ptr for one in self._ranks},
        )
        first = self._ranks[0]
        first.fetch()
        deadline = time.monotonic() + DEFAULT_TIMEOUT
        self._transport.wait(lambda: bool(first.fetched.done), deadline, "comparing with what was sent last")
        entries = np.zeros(len(self._fresh), np.int64)
        for rank, counted in enumerate(first.heard.reshape(-1, self._most)):
            mine = np.flatnonzero(self._chunks.sender == rank)
            entries[mine] = counted[: len(mine)]
        return entries

    def _enqueue(self, run: WideRun) -> None:
        for one in self._ranks:
            one.prepare(run)
            one.pack(0, one.main)
        streams = {one.program.rank: one.main.ptr for one in self._ranks}
        for x in range(run.rounds):
            messages = [message for one in self._ranks for message in one.messages(x)]
            for one in self._ranks:
                one.main.wait_event(one.copies_done)
            if messages:
                self._transport.prepare(messages).start(streams)
            for one in self._ranks:
                one.beside(x)
        for one in self._ranks:
            one.main.wait_event(one.copies_done)
            if run.rounds:
                one.unpack(run.rounds - 1, one.main)
            else:
                one.copy_locally()

    def finish(self, deadline: float | None) -> None:
        """Wait until the last run is complete."""
        if self._ran:
            self._transport.wait(
                lambda: all(one.finished.done for one in self._ranks), deadline, "the transfer"
            )

    def close(self) -> None:
        """Release staging, baseline and tables, once the last run is over. May be called twice."""
        for one in self._ranks:
            if self._ran:
                one.finished.synchronize()
        self._ranks = []
