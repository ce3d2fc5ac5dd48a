# SPDX-License-Identifier: Apache-2.0
"""Cells, tapes and chunks, each against something simpler."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nccl_m2n import Layout, Mesh, Shard
from nccl_m2n.planning.overlap import overlap
from nccl_m2n.planning.ranksets import RankSets
from nccl_m2n.planning.rounds import chunk_table
from nccl_m2n.planning.routes import FLOW
from nccl_m2n.planning.tapes import ALIGN, MIN_FLOW, cut_tapes
from tests import strategies


def who(layout: Layout) -> np.ndarray:
    """One bit a rank that holds the element."""
    found = np.zeros(layout.shape, object)
    for rank in layout.ranks:
        for piece in layout.pieces(rank):
            found[piece.box.slices] |= 1 << rank
    return found


@settings(max_examples=200)
@given(st.data())
def test_cells(data: st.DataObject) -> None:
    """Every element that is needed is in one cell, with its holders and its needers."""
    shape = data.draw(strategies.shapes(max_ndim=4, elements=500))
    source, destination = (data.draw(strategies.layouts(shape)) for _ in range(2))
    cells = overlap(source, destination)
    times, holders, needers = np.zeros(shape, np.int64), np.zeros(shape, object), np.zeros(shape, object)
    for lo, hi, holder, needer in zip(cells.start, cells.stop, cells.holder, cells.needer, strict=True):
        box = tuple(map(slice, lo, hi))
        assert (lo < hi).all()
        times[box] += 1
        holders[box] = sum(1 << r for r in cells.holders[holder].tolist())
        needers[box] = sum(1 << r for r in cells.needers[needer].tolist())
    wanted = who(destination) != 0
    assert (times == wanted).all()
    assert (needers == who(destination)).all()
    assert (holders == np.where(wanted, who(source), 0)).all()


def test_equal_layouts_are_overlapped_once() -> None:
    source, destination = (Layout((10,), Mesh.arange((n,)), [Shard(0)]) for n in (3, 4))
    again = Layout((10,), Mesh.arange((4,)), [Shard(0)])
    assert overlap(source, destination) is overlap(source, again)


@st.composite
def tapes(draw: st.DrawFn) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """Rank sets, and rows of (set, bytes)."""
    sets = draw(st.lists(st.sets(st.integers(0, 9), min_size=1, max_size=6), min_size=1, max_size=4))
    size = st.one_of(st.integers(1, 200), st.integers(1, 20 * MIN_FLOW))
    rows = draw(st.lists(st.tuples(st.integers(0, len(sets) - 1), size), min_size=1, max_size=8))
    return [sorted(s) for s in sets], rows


@settings(max_examples=300)
@given(tapes())
def test_tapes(case: tuple[list[list[int]], list[tuple[int, int]]]) -> None:
    """Rows are covered by members of their set, in order; a set's members carry nearly the same."""
    given_sets, rows = case
    sets = RankSets()
    numbers = [sets.number(np.array(s, np.int64)) for s in given_sets]
    row_sets = np.array([numbers[s] for s, _ in rows])
    sizes = np.array([n for _, n in rows])
    cut = cut_tapes(sets.table(), row_sets, sizes, np.arange(len(rows)))
    load: dict[int, dict[int, int]] = {n: dict.fromkeys(sets[n].tolist(), 0) for n in numbers}
    for i, (number, size) in enumerate(zip(row_sets.tolist(), sizes.tolist(), strict=True)):
        mine = cut.row == i
        start, rank = cut.start[mine], cut.rank[mine]
        stop = np.append(start[1:], size)
        assert start[0] == 0
        assert (start < stop).all()
        assert (start % ALIGN == 0).all()
        assert ((stop - start >= MIN_FLOW) | (stop - start == size)).all(), "a flow too small was cut off"
        assert (rank[1:] != rank[:-1]).all()
        for r, n in zip(rank.tolist(), (stop - start).tolist(), strict=True):
            load[number][r] += n
    assert (np.diff(cut.row) >= 0).all()
    for number, loads in load.items():
        total = int(sizes[row_sets == number].sum())
        largest = int(sizes[row_sets == number].max(initial=0))
        assert sum(loads.values()) == total
        # A cut moves by less than MIN_FLOW, or to the nearer end of a row too small to be cut.
        assert max(loads.values()) <= math.ceil(total / len(loads)) + 2 * max(min(largest, MIN_FLOW), ALIGN)


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 2000), st.integers(1, 30), st.integers(0, 1000)),
        max_size=6,
    )
)
def test_chunks(given_flows: list[tuple[int, int, int, int]]) -> None:
    """The chunks of a flow follow each other, of nearly one size, each in a later round than the last."""
    rounds = 31
    flows = np.zeros(len(given_flows), FLOW)
    for flow, (start, size, chunks, phase) in zip(flows, given_flows, strict=True):
        flow["start"], flow["stop"] = 16 * start, 16 * start + size
        flow["chunks"], flow["phase"] = min(chunks, -(-size // 16)), phase % rounds
    row, lo, hi, at = chunk_table(flows, rounds)
    for i, flow in enumerate(flows):
        mine = row == i
        assert mine.sum() == flow["chunks"]
        assert lo[mine][0] == flow["start"]
        assert hi[mine][-1] == flow["stop"]
        assert (lo[mine][1:] == hi[mine][:-1]).all()
        assert (lo < hi).all()
        assert np.ptp((hi - lo)[mine]) <= 2 * ALIGN
        assert (np.diff(at[mine]) >= 1).all()
    assert (at >= 0).all()
    assert (at < rounds).all()


def test_rank_sets() -> None:
    sets = RankSets()
    numbers = [sets.number(np.array(s, np.int64)) for s in ([1, 2], [], [0], [1, 2], [2, 5])]
    assert numbers == [0, 1, 2, 0, 3]
    table = sets.table()
    assert table.containing(2).tolist() == [True, False, False, True]
    assert table.containing(7).tolist() == [False] * 4
    row, rank = table.members(np.array([3, 1, 0]))
    assert (row.tolist(), rank.tolist()) == ([0, 0, 2, 2], [2, 5, 1, 2])
    assert table.spread(np.array([0, 2, 0]), np.array([3, 4, 4]), 6).tolist() == [4, 4, 4, 0, 0, 0]
    assert sets.table() is table
