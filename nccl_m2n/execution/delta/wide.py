# SPDX-License-Identifier: Apache-2.0
"""One rank's part of the wide rounds of one run: what lies where, and which messages go."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from nccl_m2n.layout.intervals import offsets, opens
from nccl_m2n.planning.delta import WideRun
from nccl_m2n.planning.program import Program
from nccl_m2n.typing import Bools, Ints


@dataclass(frozen=True)
class WideMessage:
    """All chunks of one flow that one rank sends to another in one wide round: they lie end to end."""

    peer: int
    send: bool
    chunk: int  # the first one's number in the rank's program
    nbytes: int


@dataclass(frozen=True)
class WideProgram:
    """One rank's chunks in one run; all arrays are (chunks,), in the program's order."""

    program: Program
    number: Ints  # among all chunks of the plan
    at: Ints  # the wide round in which it leaves or arrives
    offset: Ints  # bytes, in the side's staging slot of parity `at` % 2
    nbytes: Ints
    form: Ints
    entries: Ints
    flow: Ints

    @classmethod
    def of(cls, program: Program, run: WideRun) -> WideProgram:
        """Lay every wide round's chunks end to end, those of a flow beside each other."""
        table = program.chunks
        number = run.chunks.first[table["flow"]] + table["chunk"]
        start = run.chunks.start[number]
        at = run.wide[start] + table["round"] - start if len(start) else start
        nbytes = run.sizes.nbytes[number]
        order = np.lexsort((number, table["received"], at))
        key = 2 * at[order] + table["received"][order]
        size = nbytes[order]
        before, first = offsets(size), opens(key)
        offset = np.empty(len(table), np.int64)
        offset[order] = before - before[first][np.cumsum(first) - 1]
        form, entries = run.sizes.form[number], run.entries[number]
        return cls(program, number, at, offset, nbytes, form, entries, table["flow"])

    @property
    def received(self) -> Bools:
        """Which chunks come from another rank."""
        return np.asarray(self.program.chunks["received"])

    def packed_in(self, x: int) -> Ints:
        """The chunks that leave in a wide round, and of which something changed."""
        return np.flatnonzero((self.at == x) & ~self.received & (self.nbytes > 0))

    def arriving_in(self, x: int) -> Ints:
        """The chunks that arrive in a wide round with something for this rank."""
        wanted = self.program.chunks["spans"] > 0
        return np.flatnonzero((self.at == x) & self.received & (self.nbytes > 0) & wanted)

    @cached_property
    def messages(self) -> dict[int, list[WideMessage]]:
        """By wide round, in an order that both ends agree on; without those of no bytes."""
        rows = self.program.messages
        chunk = rows["chunk"]
        at = self.at[chunk] + rows["round"] - self.program.chunks["round"][chunk]
        order = np.lexsort((self.number[chunk], self.flow[chunk], rows["send"], rows["peer"], at))
        rows, at, chunk = rows[order], at[order], chunk[order]
        made: dict[int, list[WideMessage]] = {}
        if not len(rows):
            return made
        first = np.flatnonzero(opens(at, rows["peer"], rows["send"], self.flow[chunk]))
        total = np.add.reduceat(self.nbytes[chunk], first)
        for row, nbytes in zip(first.tolist(), total.tolist(), strict=True):
            if nbytes:
                message = WideMessage(
                    int(rows["peer"][row]), bool(rows["send"][row]), int(chunk[row]), nbytes
                )
                made.setdefault(int(at[row]), []).append(message)
        return made
