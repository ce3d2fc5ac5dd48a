# SPDX-License-Identifier: Apache-2.0
"""Sets of ranks, each kept once and known by a number, so that tables can hold them."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt

from nccl_m2n.layout.intervals import expand, offsets
from nccl_m2n.typing import Ints


class RankSets:
    """A growing list of distinct rank sets; a set's number never changes."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._sets: list[Ints] = []
        self._table: RankTable | None = None

    def __len__(self) -> int:
        return len(self._sets)

    def __getitem__(self, number: int) -> Ints:
        return self._sets[number]

    def number(self, ranks: Ints) -> int:
        """The number of a set of sorted ranks, new if it has not been seen."""
        found = self._numbers.setdefault(ranks.tobytes(), len(self._sets))
        if found == len(self._sets):
            self._sets.append(ranks)
        return found

    def numbers(self, flat: Ints, counts: Ints) -> Ints:
        """The numbers of many sets, given end to end with as many ranks each as `counts` says."""
        stops = np.cumsum(counts)
        raw, width = flat.tobytes(), flat.itemsize
        found = []
        for start, stop in zip((stops - counts).tolist(), stops.tolist(), strict=True):
            number = self._numbers.setdefault(raw[start * width : stop * width], len(self._sets))
            if number == len(self._sets):
                self._sets.append(flat[start:stop])
            found.append(number)
        return np.array(found, np.int64)

    def table(self) -> RankTable:
        """All sets so far as arrays."""
        if self._table is None or len(self._table.counts) != len(self._sets):
            counts = np.array([len(s) for s in self._sets], np.int64)
            self._table = RankTable(counts, np.concatenate([np.zeros(0, np.int64), *self._sets]))
        return self._table


class RankTable:
    """Rank sets as one ragged array."""

    def __init__(self, counts: Ints, flat: Ints) -> None:
        self.counts = counts  # ranks in each set
        self.flat = flat  # all ranks, set after set
        self.first = offsets(counts)  # where each set starts in `flat`

    def members(self, sets: Ints) -> tuple[Ints, Ints]:
        """Row number and rank of every member of the sets numbered in `sets`, in order."""
        row, k = expand(self.counts[sets])
        return row, self.flat[self.first[sets][row] + k]

    def containing(self, rank: int) -> npt.NDArray[np.bool_]:
        """Which sets `rank` is in, shape (sets,)."""
        found = np.zeros(len(self.counts), bool)
        found[np.searchsorted(self.first + self.counts, np.flatnonzero(self.flat == rank), side="right")] = (
            True
        )
        return found

    def spread(self, sets: Ints, amounts: Ints, world: int) -> Ints:
        """What falls on each rank when each set shares its amount evenly (rounded up)."""
        total = np.zeros(len(self.counts), np.int64)
        np.add.at(total, sets, amounts)
        used = np.flatnonzero(total)
        row, rank = self.members(used)
        load = np.zeros(world, np.int64)
        np.add.at(load, rank, -(-total[used] // self.counts[used])[row])
        return load

    @cached_property
    def single(self) -> Ints:
        """The only member of each set of one; meaningless for larger sets."""
        return self.flat[np.minimum(self.first, len(self.flat) - 1)]
