# SPDX-License-Identifier: Apache-2.0
"""One rank's part in runs on a GPU that send only what changed: memory, tables, launches and streams."""

from __future__ import annotations

import numpy as np

from nccl_m2n.execution.delta.kernels import ArrivalTables, OutgoingTables
from nccl_m2n.execution.delta.wide import WideProgram
from nccl_m2n.execution.kernels import CopyTables
from nccl_m2n.execution.lower import ArrayTable, Wire, arrange, launches, local_copies
from nccl_m2n.layout.intervals import offsets
from nccl_m2n.planning.delta import Chunks, WideRun
from nccl_m2n.planning.delta_sizes import SECTION
from nccl_m2n.planning.program import Program
from nccl_m2n.transport.base import DeviceBuffer, DeviceTransport, Message
from nccl_m2n.transport.gpu import import_cupy
from nccl_m2n.typing import Bools, Bytes, Ints, Stream

SLOT_ALIGNMENT = 256  # bytes


class DeviceRank:
    """One local rank: its baseline, its staging, its tables, its two streams."""

    def __init__(
        self,
        transport: DeviceTransport,
        chunks: Chunks,
        slots: tuple[Ints, Ints],
        most: int,
        program: Program,
        sources: ArrayTable,
        destinations: ArrayTable,
        wire: Wire,
        host_baseline: bool,
    ) -> None:
        cupy = import_cupy()
        self.program, self.device = program, transport.devices[program.rank]
        table = program.chunks
        self._number = chunks.first[table["flow"]] + table["chunk"]
        unit = chunks.unit[self._number]
        self._outgoing = np.flatnonzero(~table["received"])  # by round
        self._told = np.argsort(self._number[self._outgoing])  # as all ranks count a sender's chunks
        with cupy.cuda.Device(self.device):
            self._own_main, self._side = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
            self._forked, self._group_done, self.copies_done, self.finished, self.fetched = (
                cupy.cuda.Event(disable_timing=True) for _ in range(5)
            )
            self._sums = cupy.zeros(max(1, len(self._outgoing)), np.uint32)
            self._order = cupy.asarray(self._told)
            self.entries = cupy.zeros(most, np.uint32)
            self.every = cupy.zeros(transport.size * most, np.uint32)
            self.heard = _pinned(self.every.nbytes).view(np.uint32)
            self._place(slots, host_baseline)
        self.main = self._own_main
        units = table["bytes"] // unit
        some = self._outgoing
        self._tables = OutgoingTables(
            self.device,
            self._scratch + table["offset"][some],
            self._baseline + self._base,
            units[some],
            unit[some],
            some,
            np.searchsorted(table["round"][some], np.arange(program.rounds + 1)),
        )
        self._arrivals = ArrivalTables(self.device, program, destinations, wire, unit)
        self._copies = PackLaunches(program, sources, destinations, wire, self._scratch, self.device)

    def _place(self, slots: tuple[Ints, Ints], host_baseline: bool) -> None:
        """Take memory: a slot to pack in, two to send from, two to receive in, and the baseline."""
        cupy, rank = import_cupy(), self.program.rank
        size = [int(slot[rank]) if rank < len(slot) else 0 for slot in slots]
        self._slot_bytes = [-(-each // SLOT_ALIGNMENT) * SLOT_ALIGNMENT for each in size]
        pack = -(-self.program.send_half_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        self.staging_bytes = pack + 2 * sum(self._slot_bytes)
        self._staging = cupy.cuda.alloc(max(1, self.staging_bytes))
        self._scratch = self._staging.ptr
        send = self._scratch + pack
        self._slot_at = [send, send + 2 * self._slot_bytes[0]]
        nbytes = -(-self.program.chunks["bytes"][self._outgoing] // SECTION) * SECTION
        self._base = offsets(nbytes)
        self.baseline_bytes = int(nbytes.sum())
        take = cupy.cuda.alloc_pinned_memory if host_baseline else cupy.cuda.alloc
        self._kept = take(max(1, self.baseline_bytes))
        self._baseline = self._kept.ptr

    def open(self, caller: Stream, *, alone: bool) -> None:
        """Start after the caller's work, on the caller's stream unless ranks would meet there."""
        self.main = caller if alone else self._own_main
        if not alone:
            caller.record(self._forked)
            self.main.wait_event(self._forked)

    def count(self, fresh: Bools) -> None:
        """Pack and compare all chunks, and count what changed of each."""
        mine = fresh[self._number[self._outgoing]]
        self._tables.mark(mine, self.main)
        for x in range(self._copies.packs):
            self._copies.pack(x, self.main)
            self._tables.count_changed(x, self.main)
        self._tables.sum_counts(self._sums, self.main)
        with import_cupy().cuda.Device(self.device), self.main:
            self.entries[: len(self._told)] = self._sums[self._order]

    def fetch(self) -> None:
        """Bring the gathered counts to the host."""
        runtime = import_cupy().cuda.runtime
        kind = runtime.memcpyDeviceToHost
        runtime.memcpyAsync(
            self.heard.ctypes.data, self.every.data.ptr, self.every.nbytes, kind, self.main.ptr
        )
        self.main.record(self.fetched)

    def prepare(self, run: WideRun) -> None:
        """Lay out the wide rounds, and tell the kernels."""
        self._run, self._wide = run, WideProgram.of(self.program, run)
        wide = self._wide
        address = self._address(np.arange(len(wide.at)))
        tables = [np.stack([address, wide.form, wide.entries], axis=1).astype(np.int64)]
        self._arriving = []
        for x in range(run.rounds):
            chunks = wide.arriving_in(x)
            rows, tiles = self._arrivals.rows(chunks)
            self._arriving.append((chunks, len(tables), tiles))
            tables.append(rows)
        flat = np.concatenate([table.reshape(-1) for table in tables]) if tables else np.zeros(1, np.int64)
        with import_cupy().cuda.Device(self.device), self.main:
            self._uploaded = import_cupy().asarray(flat)
        at = np.cumsum([0] + [table.size for table in tables])
        self._table_at = (self._uploaded.data.ptr + 8 * at).tolist()
        changed = np.zeros(self._copies.packs, bool)
        changed[self.program.chunks["round"][self._outgoing[wide.nbytes[self._outgoing] > 0]]] = True
        self._changed = changed

    def _address(self, chunk: Ints) -> Ints:
        wide = self._wide
        received = wide.received[chunk].astype(np.int64)
        slot = np.array(self._slot_at)[received] + wide.at[chunk] % 2 * np.array(self._slot_bytes)[received]
        return np.asarray(slot + wide.offset[chunk])

    def messages(self, x: int) -> list[Message]:
        """What the rank sends and receives in a wide round."""
        messages = self._wide.messages.get(x, [])
        addresses = self._address(np.array([m.chunk for m in messages], np.int64))
        return [
            Message(self.program.rank, m.peer, m.send, DeviceBuffer(address, m.nbytes))
            for m, address in zip(messages, addresses.tolist(), strict=True)
        ]

    def pack(self, x: int, stream: Stream) -> None:
        """Write what leaves in a wide round as it travels, round by round of the plan."""
        for r in np.flatnonzero((self._run.wide == x) & self._changed[: len(self._run.wide)]).tolist():
            self._copies.pack(r, stream)
            self._tables.encode(r, self._table_at[0], stream)
        stream.record(self.copies_done)

    def unpack(self, x: int, stream: Stream) -> None:
        """Write what arrived in a wide round into place."""
        if x < 0 or not len(self._arriving[x][0]):
            return
        chunks, table, tiles = self._arriving[x]
        self._arrivals.apply(self._table_at[table], len(chunks), tiles, self._table_at[0], stream)

    def beside(self, x: int) -> None:
        """While wide round x is on the wire: what round x - 1 brought, and what round x + 1 sends."""
        if x == 0:
            self._side.wait_event(self.copies_done)  # all is packed in one slot
            self._copies.copy_locally(self._side)
        else:
            self._side.wait_event(self._group_done)  # of round x - 1
            self.unpack(x - 1, self._side)
        self.pack(x + 1, self._side)
        self.main.record(self._group_done)

    def copy_locally(self) -> None:
        """Copy what the rank has and needs itself, where nothing is on the wire."""
        self._copies.copy_locally(self.main)

    def leave(self, caller: Stream) -> None:
        """Let the caller's stream go on after the run."""
        self._tables.mark(None, self.main)
        if self.main is not caller:
            self.main.record(self._forked)
            caller.wait_event(self._forked)
        caller.record(self.finished)


class PackLaunches:
    """The launches that pack a rank's chunks, round by round, and the one that copies what stays on it."""

    def __init__(
        self,
        program: Program,
        sources: ArrayTable,
        destinations: ArrayTable,
        wire: Wire,
        scratch: int,
        device: int,
    ) -> None:
        arranged = arrange(program, sources, destinations, wire)
        packed = ~program.chunks["received"][arranged.chunk]
        copies, chunk = arranged.copies[packed], arranged.chunk[packed]
        copies["destination"] += scratch + program.chunks["offset"][chunk]
        local = local_copies(program, sources, destinations)
        self.packs = program.rounds
        number = np.concatenate([program.chunks["round"][chunk], np.full(len(local), self.packs)])
        tables = CopyTables(
            launches(np.concatenate([copies, local]), number.astype(np.int64), self.packs + 1), device
        )
        self._launches = tables.launches
        self.nbytes = tables.nbytes
        self._tables = tables  # the launches point into its memory

    def pack(self, x: int, stream: Stream) -> None:
        """Pack what leaves in a round of the plan."""
        self._start(x, stream)

    def copy_locally(self, stream: Stream) -> None:
        """Copy what the rank has and needs itself."""
        self._start(self.packs, stream)

    def _start(self, x: int, stream: Stream) -> None:
        launch = self._launches[x]
        if launch is not None:
            launch.start(stream)


def _pinned(nbytes: int) -> Bytes:
    memory = import_cupy().cuda.alloc_pinned_memory(max(1, nbytes))
    return np.frombuffer(memory, np.uint8, nbytes)
