# SPDX-License-Identifier: Apache-2.0
"""Running a plan in host memory by sending only what changed since the last run.

Every sender keeps what it sent last, in wire form: its *baseline*, which is also what all destinations have. A run
first compares: each rank packs its blocks one by one and counts the units that differ. Then all ranks hear of all
counts, which give every size and the wide rounds. Then the entries travel the plan's routes, and destinations write
what changed.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Collection, Mapping

import numpy as np

from nccl_m2n.errors import TransportError
from nccl_m2n.execution.delta.changes import Changes
from nccl_m2n.execution.delta.entries import changed_units, decode, encode
from nccl_m2n.execution.delta.scatter import Scatter
from nccl_m2n.execution.delta.wide import WideProgram
from nccl_m2n.execution.host import launch_copies, launch_moves
from nccl_m2n.execution.lower import ArrayTable, Lowered, Task, Wire, arrange, launches, local_copies
from nccl_m2n.layout.intervals import offsets
from nccl_m2n.planning import Plan
from nccl_m2n.planning.delta import Chunks, WideRun
from nccl_m2n.planning.delta_sizes import DENSE, SECTION
from nccl_m2n.planning.program import Program
from nccl_m2n.transport.base import Message, Transport
from nccl_m2n.typing import Bools, Bytes, Ints, Stream

NOTHING = np.zeros(0, np.int64)


class DeltaHostExecutor:
    """The programs of this process's ranks, bound to host arrays, sending what changed.

    Args:
        transport: Moves the messages.
        plan: What is bound.
        tasks: For each local rank its program and its arrays.
        wire: What elements are on the wire.
    """

    def __init__(
        self,
        transport: Transport,
        plan: Plan,
        tasks: Mapping[int, Task],
        wire: Wire,
    ) -> None:
        self._transport = transport
        self._purpose = f"what changed, binding {transport.exchanges}"
        self._chunks = Chunks.of(plan)
        self._slots = self._chunks.dense_slots()
        self._ranks = [_Rank(self._chunks, self._slots, *task, wire) for task in tasks.values()]
        self._fresh = np.ones(len(self._chunks.sender), bool)  # what some destination does not have
        self._pending = False
        self.staging_bytes = sum(one.staging_bytes for one in self._ranks)
        self.baseline_bytes = sum(len(one.baseline) for one in self._ranks)
        self.changes: Changes | None = None

    @property
    def busy(self) -> bool:
        """Whether a started run has not been finished."""
        return self._pending

    def connect(self) -> None:
        """Nothing: host transports are connected when they are made."""

    def capture(self) -> None:
        """Nothing: sizes differ from run to run."""

    def start(self, stream: Stream = None) -> None:
        """End the last run; `finish` does all of this one."""
        if self._pending:
            self.finish(None)
        self._pending = True

    def forget(self, ranks: Collection[int] | None) -> None:
        """Take what some ranks have for lost: all of it goes there with the next run."""
        if ranks is None:
            self._fresh[:] = True
        else:
            self._fresh[self._chunks.reaching(ranks)] = True

    def finish(self, deadline: float | None) -> None:
        """Drive the started run to its end."""
        if not self._pending:
            return
        entries = self._count(deadline)
        run = WideRun.of(self._chunks, entries, self._slots)
        for one in self._ranks:
            one.prepare(run)
            one.copy_locally()
            one.pack(0)
        for x in range(run.rounds):
            under_way = self._transport.prepare([m for one in self._ranks for m in one.messages(x)])
            under_way.start()
            for one in self._ranks:
                one.unpack(x - 1)
                one.pack(x + 1)
            under_way.finish(deadline)
            under_way.close()
        for one in self._ranks:
            one.unpack(run.rounds - 1)
        self._fresh[:] = False
        self._pending = False
        self.changes = Changes.of(self._chunks, entries, run.sizes)

    def _count(self, deadline: float | None) -> Ints:
        """How many units of each chunk changed, told by the senders to all ranks."""
        counted = {one.program.rank: one.count(self._fresh).tobytes() for one in self._ranks}
        limit = None if deadline is None else max(0.0, deadline - time.monotonic())
        said = self._transport.exchange(counted, self._purpose, limit)
        entries = np.zeros(len(self._fresh), np.int64)
        for rank, counts in enumerate(said):
            entries[self._chunks.sender == rank] = np.frombuffer(counts, np.int64)
        return entries

    def close(self) -> None:
        """Release staging and baseline."""
        if self._pending:
            raise TransportError(
                "expected the run to be over before its program is closed; call wait() first"
            )
        self._ranks = []


class _Rank:
    """One local rank: its blocks in the plan's order of flows, its baseline and its staging."""

    def __init__(
        self,
        chunks: Chunks,
        slots: tuple[Ints, Ints],
        program: Program,
        sources: ArrayTable,
        destinations: ArrayTable,
        wire: Wire,
    ) -> None:
        self.program = program
        table = program.chunks
        self._number = chunks.first[table["flow"]] + table["chunk"]
        self._bytes, self._unit = table["bytes"], chunks.unit[self._number]
        outgoing = np.flatnonzero(~table["received"])
        self._outgoing = outgoing[np.argsort(self._number[outgoing])]  # as all ranks count them
        padded = -(-self._bytes[self._outgoing] // SECTION) * SECTION
        self._base = np.zeros(len(table), np.int64)
        self._base[self._outgoing] = offsets(padded)
        self.baseline: Bytes = np.zeros(int(padded.sum()), np.uint8)
        self._scratch: Bytes = np.empty(max(1, int(self._bytes.max(initial=0))), np.uint8)
        self._slots = [
            np.empty((2, int(slot[program.rank]) if program.rank < len(slot) else 0), np.uint8)
            for slot in slots
        ]
        self.staging_bytes = len(self._scratch) + sum(slot.size for slot in self._slots)
        low = _lowered(program, sources, destinations, wire, self._scratch.ctypes.data)
        self._copies = [(launch_copies(low, i), launch_moves(low, i)) for i in range(len(table) + 1)]
        self._scatter = Scatter(program, destinations, wire, self._unit)

    def count(self, fresh: Bools) -> Ints:
        """How many units of each of this rank's own chunks changed; all of them where that is not known."""
        counted = np.asarray(self._bytes[self._outgoing] // self._unit[self._outgoing])
        for i, chunk in enumerate(self._outgoing.tolist()):
            if not fresh[self._number[chunk]]:
                counted[i] = len(
                    changed_units(self._packed(chunk), self._kept(chunk), int(self._unit[chunk]))
                )
        return counted

    def _packed(self, chunk: int) -> Bytes:
        self._copy(chunk)
        return self._scratch[: self._bytes[chunk]]

    def _kept(self, chunk: int) -> Bytes:
        return np.asarray(self.baseline[self._base[chunk] : self._base[chunk] + self._bytes[chunk]])

    def _copy(self, launch: int) -> None:
        copies, moves = self._copies[launch]
        for destination, source, nbytes in moves:
            ctypes.memmove(destination, source, nbytes)
        for to, array in copies:
            np.copyto(to, array, casting="unsafe")

    def copy_locally(self) -> None:
        """Copy what the rank has and needs itself."""
        self._copy(len(self.program.chunks))

    def prepare(self, run: WideRun) -> None:
        """Lay out the wide rounds."""
        self._wide = WideProgram.of(self.program, run)

    def _slot(self, chunk: int, nbytes: int) -> Bytes:
        wide = self._wide
        slot = self._slots[int(wide.received[chunk])][wide.at[chunk] % 2]
        return np.asarray(slot[wide.offset[chunk] : wide.offset[chunk] + nbytes])

    def messages(self, x: int) -> list[Message]:
        """What the rank sends and receives in a wide round."""
        return [
            Message(self.program.rank, m.peer, m.send, self._slot(m.chunk, m.nbytes))
            for m in self._wide.messages.get(x, ())
        ]

    def pack(self, x: int) -> None:
        """Write the chunks of a wide round as they travel, and keep what is sent."""
        for chunk in self._wide.packed_in(x).tolist():
            packed, kept, unit = self._packed(chunk), self._kept(chunk), int(self._unit[chunk])
            form = int(self._wide.form[chunk])
            changed = NOTHING if form == DENSE else changed_units(packed, kept, unit)
            encode(packed, changed, unit, form, self._slot(chunk, int(self._wide.nbytes[chunk])))
            kept[:] = packed

    def unpack(self, x: int) -> None:
        """Write what arrived in a wide round to its place."""
        for chunk in self._wide.arriving_in(x).tolist():
            unit, form, nbytes = int(self._unit[chunk]), int(self._wide.form[chunk]), int(self._bytes[chunk])
            travelled = self._slot(chunk, int(self._wide.nbytes[chunk]))
            if form == DENSE:
                self._scratch[:nbytes] = travelled[:nbytes]
                self._copy(chunk)
            else:
                entries = int(self._wide.entries[chunk])
                self._scatter.write(chunk, *decode(travelled, nbytes // unit, entries, unit, form))


def _lowered(
    program: Program, sources: ArrayTable, destinations: ArrayTable, wire: Wire, scratch: int
) -> Lowered:
    """One launch a chunk, between the user's arrays and a chunk at `scratch`, and one for what stays on the rank."""
    arranged = arrange(program, sources, destinations, wire, alignment=1)
    copies = arranged.copies.copy()
    received = program.chunks["received"][arranged.chunk]
    copies["source"] += np.where(received, scratch, 0)
    copies["destination"] += np.where(received, 0, scratch)
    local = local_copies(program, sources, destinations)
    count = len(program.chunks)
    number = np.concatenate([arranged.chunk, np.full(len(local), count)])
    return Lowered(np.zeros(0, np.int64), launches(np.concatenate([copies, local]), number, count + 1))
