# SPDX-License-Identifier: Apache-2.0
"""Tapes: everything that one set of ranks must share out, laid end to end and cut evenly.

Cutting the whole tape, rather than each bundle on its own, balances the set to the byte with the
fewest cuts there can be: ``bundles + |set| - 1`` shares instead of ``bundles × |set|``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nccl_m2n.layout.intervals import expand, lengths, overlaps
from nccl_m2n.planning.ranksets import RankTable
from nccl_m2n.typing import Ints

ALIGN = 16  # bytes; no cut falls between, so 16-byte accesses stay possible
MIN_FLOW = 64 << 10  # bytes; less is not cut off, a message costs more than it carries


@dataclass(frozen=True)
class Shares:
    """Who takes which share of each row; the shares of a row follow each other and leave nothing out."""

    row: Ints
    start: Ints  # bytes from the row's start
    rank: Ints


def cut_tapes(table: RankTable, sets: Ints, sizes: Ints, order: Ints) -> Shares:
    """Share rows out among the members of their sets.

    Args:
        table: The rank sets.
        sets: Rank set of each row.
        sizes: Bytes of each row, more than none.
        order: Numbers that say in which order rows of one set lie on its tape.

    Returns:
        Shares sorted by row and start.
    """
    one = table.counts[sets] == 1
    alone, several = np.flatnonzero(one), np.flatnonzero(~one)
    row, start, rank = _cut_shared(table, sets[several], sizes[several], order[several])
    row = np.concatenate([alone, several[row]])
    start = np.concatenate([np.zeros(len(alone), np.int64), start])
    rank = np.concatenate([table.single[sets[alone]], rank])
    if len(several):
        sort = np.lexsort((start, row))
        row, start, rank = row[sort], start[sort], rank[sort]
    return Shares(row, start, rank)


def _cut_shared(table: RankTable, sets: Ints, sizes: Ints, order: Ints) -> tuple[Ints, Ints, Ints]:
    sort = np.lexsort((order, sets))
    stop = np.cumsum(sizes[sort])  # all tapes laid end to end
    start = stop - sizes[sort]
    used, first = np.unique(sets[sort], return_index=True)
    base = start[first]
    length = lengths(base, int(sizes.sum()))
    tape, member = expand(table.counts[used])
    count = table.counts[used]
    short = length < MIN_FLOW * count
    unit = np.where(short, MIN_FLOW, ALIGN)[tape]
    cut = _snap(base[tape] + _even(length[tape], count[tape], member), start, stop, unit)
    cut = np.where(member == 0, base[tape], cut)
    until = np.append(cut[1:], stop[-1:])
    until = np.where(member == count[tape] - 1, (base + length)[tape], until)
    # Tapes too short to be cut for everyone start at another member each, lest all fall on the first.
    turn = np.where(short, np.arange(len(used)) % np.maximum(count, 1), 0)
    rank = table.flat[table.first[used][tape] + (member + turn[tape]) % count[tape]]
    some = cut < until
    row, share, a, _ = overlaps(cut[some], until[some], start, stop)
    return sort[row], a - start[row], rank[some][share]


def _even(length: Ints, count: Ints, member: Ints) -> Ints:
    """``length * member // count`` without leaving 64 bits."""
    return length // count * member + length % count * member // count


def _snap(cut: Ints, start: Ints, stop: Ints, unit: Ints) -> Ints:
    """Move cuts to multiples of `unit` in their row, and onto row ends nearer than `MIN_FLOW`."""
    row = np.minimum(np.searchsorted(stop, cut, side="right"), len(stop) - 1)
    within = cut - start[row]
    near_start, near_stop = within < MIN_FLOW, stop[row] - cut < MIN_FLOW
    low = within <= stop[row] - cut
    snapped = start[row] + within // unit * unit
    snapped = np.where(near_stop & ~(near_start & low), stop[row], snapped)
    return np.where(near_start & (low | ~near_stop), start[row], snapped)
