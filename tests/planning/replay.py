# SPDX-License-Identifier: Apache-2.0
"""Carry out a plan byte by byte, on tables of tokens, in the order most likely to go wrong.

Every byte of every global tensor is one distinct number, a *token*; what has not been written is
`NOTHING`. Memory of each rank: its source arrays, its destination arrays, and two halves of staging of
each kind, which are wiped before they are used again. Packing for round x + 1 is done before the
messages of round x are sent, and what arrived in round x - 1 is unpacked after them, as on a device.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from nccl_m2n import Layout, Plan, Transfer

NOTHING = -1


def tokens(plan: Plan) -> list[np.ndarray]:
    """The global tensors as tokens, the bytes of an element along the last axis."""
    made, first = [], 0
    for transfer in plan.transfers:
        shape = (*transfer.shape, transfer.wire_size)
        count = int(np.prod(shape, dtype=np.int64))
        made.append(np.arange(first, first + count).reshape(shape))
        first += count
    return made


def local_tokens(layout: Layout, array: np.ndarray, rank: int) -> np.ndarray:
    """What a rank's local array holds of a table of tokens; `NOTHING` where no piece lies."""
    local = np.full((*layout.local_shape(rank), array.shape[-1]), NOTHING)
    for piece in layout.pieces(rank):
        local[piece.local_slices] = array[piece.box.slices]
    return local


@dataclass
class Rank:
    """The memory of one rank."""

    sources: dict[int, np.ndarray] = field(default_factory=dict)  # by transfer
    destinations: dict[int, np.ndarray] = field(default_factory=dict)
    send: list[np.ndarray] = field(default_factory=list)  # by parity of the round
    receive: list[np.ndarray] = field(default_factory=list)


class Replay:
    """One run of a plan on all ranks; raises AssertionError at the first thing that is wrong."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.programs = {rank: plan.program(rank) for rank in plan.ranks}
        self.ranks = {rank: Rank() for rank in plan.ranks}
        self.sent = defaultdict(int)  # bytes by (source, destination)
        self.most_messages = 0  # of a rank in a round
        for number, (transfer, array) in enumerate(zip(plan.transfers, tokens(plan), strict=True)):
            for rank in transfer.source.ranks:
                self.ranks[rank].sources[number] = local_tokens(transfer.source, array, rank)
            for rank in transfer.destination.ranks:
                shape = (*transfer.destination.local_shape(rank), transfer.wire_size)
                self.ranks[rank].destinations[number] = np.full(shape, NOTHING)
        for rank, program in self.programs.items():
            memory = self.ranks[rank]
            memory.send = [np.full(program.send_half_bytes, NOTHING) for _ in range(2)]
            memory.receive = [np.full(program.receive_half_bytes, NOTHING) for _ in range(2)]
            self._check_tables(rank)

    def run(self) -> None:
        self._copy_locally()
        self._pack(0)
        for number in range(self.plan.rounds):
            self._pack(number + 1)
            self._exchange(number)
            self._unpack(number - 1)
        self._unpack(self.plan.rounds - 1)
        self._check_arrival()

    # The steps of a round.

    def _copy_locally(self) -> None:
        for rank, program in self.programs.items():
            for pair in program.local:
                source = program.source_cells[pair["source"]]
                destination = program.destination_cells[pair["destination"]]
                assert (source["extent"] == destination["extent"]).all()
                values = self._cell(self.ranks[rank].sources, source)
                self._write(self._cell(self.ranks[rank].destinations, destination), ..., values)

    def _pack(self, number: int) -> None:
        for rank, program in self.programs.items():
            half = self.ranks[rank].send[number % 2]
            half[:] = NOTHING
            for i in np.flatnonzero((program.chunks["round"] == number) & ~program.chunks["received"]):
                chunk = program.chunks[i]
                memory = half[chunk["offset"] : chunk["offset"] + chunk["bytes"]]
                for span in self._spans(program, i):
                    cell = self._cell(self.ranks[rank].sources, program.source_cells[span["cell"]])
                    values = cell.reshape(-1)[span["start"] : span["stop"]]
                    self._write(memory, slice(span["offset"], span["offset"] + len(values)), values)
                assert NOTHING not in memory, f"rank {rank} leaves bytes of chunk {i} unpacked"

    def _exchange(self, number: int) -> None:
        sends, receives = defaultdict(list), defaultdict(list)
        for rank, program in self.programs.items():
            messages = program.messages[program.messages["round"] == number]
            self.most_messages = max(self.most_messages, len(messages))
            for message in messages:
                chunk = program.chunks[message["chunk"]]
                end = slice(chunk["offset"], chunk["offset"] + chunk["bytes"])
                if message["send"]:
                    assert chunk["round"] == (number - 1 if chunk["received"] else number)
                    side = self.ranks[rank].receive if chunk["received"] else self.ranks[rank].send
                    sends[rank, int(message["peer"])].append(side[chunk["round"] % 2][end].copy())
                else:
                    assert chunk["received"]
                    assert chunk["round"] == number
                    receives[int(message["peer"]), rank].append((self.ranks[rank].receive[number % 2], end))
        for memory in self.ranks.values():
            memory.receive[number % 2][:] = NOTHING
        assert sends.keys() == receives.keys()
        for (source, destination), messages in sends.items():
            assert source != destination, f"rank {source} sends to itself"
            for data, (half, end) in zip(messages, receives[source, destination], strict=True):
                assert len(data) == end.stop - end.start
                assert NOTHING not in data, f"rank {source} sends in round {number} what it does not have"
                self._write(half, end, data)
                self.sent[source, destination] += len(data)

    def _unpack(self, number: int) -> None:
        for rank, program in self.programs.items():
            half = self.ranks[rank].receive[number % 2]
            for i in np.flatnonzero((program.chunks["round"] == number) & program.chunks["received"]):
                chunk = program.chunks[i]
                memory = half[chunk["offset"] : chunk["offset"] + chunk["bytes"]]
                for span in self._spans(program, i):
                    cell = self._cell(self.ranks[rank].destinations, program.destination_cells[span["cell"]])
                    flat = cell.reshape(-1).copy()  # the cell may be strided
                    values = memory[span["offset"] : span["offset"] + span["stop"] - span["start"]]
                    self._write(flat, slice(span["start"], span["stop"]), values)
                    cell[...] = flat.reshape(cell.shape)

    # What they stand on.

    def _cell(self, arrays: dict[int, np.ndarray], cell: np.void) -> np.ndarray:
        array = arrays[int(cell["transfer"])]
        ndim = array.ndim - 1
        assert (cell["extent"][: 8 - ndim] == 1).all()
        assert (cell["offset"][: 8 - ndim] == 0).all()
        box = tuple(slice(o, o + n) for o, n in zip(cell["offset"], cell["extent"], strict=True))[8 - ndim :]
        found = array[box]
        assert found.shape[:-1] == tuple(cell["extent"][8 - ndim :]), "a cell lies outside the local array"
        return found

    @staticmethod
    def _write(memory: np.ndarray, where: object, values: np.ndarray) -> None:
        assert (memory[where] == NOTHING).all(), "written twice"
        assert NOTHING not in values, "read before it was written"
        memory[where] = values

    @staticmethod
    def _spans(program: object, chunk: int) -> np.ndarray:
        first, count = program.chunks[chunk]["first_span"], program.chunks[chunk]["spans"]
        spans = program.spans[first : first + count]
        assert (spans["chunk"] == chunk).all()
        return spans

    def _check_tables(self, rank: int) -> None:
        """Chunks lie apart in their halves; all are sorted; every chunk has its messages."""
        program = self.programs[rank]
        chunks, messages = program.chunks, program.messages
        assert (program.rank, program.rounds) == (rank, self.plan.rounds)
        assert (np.diff(chunks["round"]) >= 0).all()
        assert (np.diff(messages["round"]) >= 0).all()
        assert (chunks["offset"] % 16 == 0).all()
        assert (chunks["bytes"] > 0).all()
        assert chunks["spans"].sum() == len(program.spans)
        for received in (False, True):
            size = program.receive_half_bytes if received else program.send_half_bytes
            for number in np.unique(chunks["round"]):
                mine = chunks[(chunks["round"] == number) & (chunks["received"] == received)]
                mine = mine[np.argsort(mine["offset"])]
                ends = mine["offset"] + mine["bytes"]
                assert (ends[:-1] <= mine["offset"][1:]).all(), "chunks overlap in their half"
                assert (ends <= size).all(), "a chunk lies outside its half"
        arriving = messages["chunk"][~messages["send"]]
        assert sorted(arriving.tolist()) == np.flatnonzero(chunks["received"]).tolist()
        leaving = set(messages["chunk"][messages["send"]].tolist())
        assert set(np.flatnonzero(~chunks["received"]).tolist()) <= leaving
        idle = np.flatnonzero(chunks["received"] & (chunks["spans"] == 0)).tolist()
        if self.plan.options.method == "reshard":
            assert set(idle) <= leaving, "a chunk arrives for nothing"

    def _check_arrival(self) -> None:
        for number, (transfer, array) in enumerate(zip(self.plan.transfers, tokens(self.plan), strict=True)):
            for rank in transfer.destination.ranks:
                expected = local_tokens(transfer.destination, array, rank)
                np.testing.assert_array_equal(
                    self.ranks[rank].destinations[number], expected, f"{transfer} on rank {rank}", strict=True
                )


def least_network_bytes(plan: Plan) -> int:
    """For each byte: one crossing into each domain that needs it and has it nowhere."""

    def who(layout: Layout, domain: set[int]) -> np.ndarray:
        found = np.zeros(layout.shape, bool)
        for rank in domain.intersection(layout.ranks):
            for piece in layout.pieces(rank):
                found[piece.box.slices] = True
        return found

    def crossings(transfer: Transfer, domain: set[int]) -> int:
        needed, held = who(transfer.destination, domain), who(transfer.source, domain)
        return int((needed & ~held).sum()) * transfer.wire_size

    domains = [set(domain) for domain in plan.topology.domains]
    return sum(crossings(transfer, domain) for transfer in plan.transfers for domain in domains)


def check(plan: Plan) -> Replay:
    """Prove a plan by carrying it out, and hold what it says about itself against what happened."""
    plan.check()
    replay = Replay(plan)
    replay.run()
    sent, received = np.zeros((2, plan.world), np.int64)
    within = 0
    for (source, destination), size in replay.sent.items():
        if plan.topology.domain_of(source) != plan.topology.domain_of(destination):
            sent[source] += size
            received[destination] += size
        else:
            within += size
    traffic = plan.traffic()
    np.testing.assert_array_equal(traffic.sent, sent)
    np.testing.assert_array_equal(traffic.received, received)
    assert (traffic.network_bytes, traffic.nvlink_bytes) == (sent.sum(), within)
    assert traffic.network_bytes_bound == least_network_bytes(plan)
    if plan.options.method == "reshard":
        assert traffic.network_bytes == traffic.network_bytes_bound
    for rank, program in replay.programs.items():
        assert program.staging_bytes <= plan.staging[rank]
    return replay
