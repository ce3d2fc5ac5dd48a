# SPDX-License-Identifier: Apache-2.0
"""Memory that is shared: what is written lies apart from everything else, and only that is refused."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nccl_m2n import Box, Layout, LayoutError, LocalTransport, Mesh, Piece, Replicate, Shard, Transfer, plan
from nccl_m2n.execution.descriptors import DIMENSIONS, Boxes
from nccl_m2n.execution.lower import ArrayTable
from nccl_m2n.execution.overlaps import clashes, repeated
from nccl_m2n.execution.views import ArrayView

Place = tuple[int, tuple[int, ...], tuple[int, ...], int]  # address, extent, stride, item


def boxes(places: list[Place]) -> Boxes:
    views = {i: ArrayView(a, e, s, f"V{item}") for i, (a, e, s, item) in enumerate(places)}
    item = np.array([p[3] for p in places], np.int64)
    return ArrayTable.of(views, item, item).whole()


def touched(place: Place) -> list[int]:
    """The naive twin: every byte of every element."""
    address, extent, stride, item = place
    elements = itertools.product(*map(range, extent))
    return [
        address + sum(i * s for i, s in zip(e, stride, strict=True)) + b
        for e in elements
        for b in range(item)
    ]


@st.composite
def any_place(draw: st.DrawFn) -> Place:
    ndim = draw(st.integers(0, 3))
    extent = draw(st.tuples(*[st.integers(0, 4)] * ndim))
    stride = draw(st.tuples(*[st.integers(-12, 12)] * ndim))
    return draw(st.integers(4096, 4130)), extent, stride, draw(st.sampled_from([1, 2, 3, 4]))


@given(st.lists(st.tuples(any_place(), st.booleans()), min_size=1, max_size=6))
def test_pairs_as_the_naive_twin_has_them(given_: list[tuple[Place, bool]]) -> None:
    places = [place for place, _ in given_]
    written = np.array([write for _, write in given_])
    found = {tuple(sorted(pair)) for pair in clashes(boxes(places), written)}
    bytes_of = [set(touched(place)) for place in places]
    wanted = {
        (i, j)
        for i, j in itertools.combinations(range(len(places)), 2)
        if bytes_of[i] & bytes_of[j] and (written[i] or written[j])
    }
    assert found == wanted
    folded = {i for i, place in enumerate(places) if len(set(touched(place))) < len(touched(place))}
    assert set(repeated(boxes(places)).tolist()) == folded


@given(st.integers(1, 5), st.lists(st.tuples(st.integers(0, 20), st.integers(1, 8)), min_size=2, max_size=5))
def test_columns_of_one_array(rows: int, columns: list[tuple[int, int]]) -> None:
    """Side by side in rows of 24 bytes, some of them running into the next row."""
    places: list[Place] = [(4096 + start, (rows, width), (24, 1), 1) for start, width in columns]
    found = {tuple(sorted(pair)) for pair in clashes(boxes(places), np.ones(len(places), bool))}
    of = [set(touched(place)) for place in places]
    assert found == {(i, j) for i, j in itertools.combinations(range(len(of)), 2) if of[i] & of[j]}


def test_thousands_of_tensors_take_milliseconds() -> None:
    rows, pitch = 10_000, 4096
    apart: list[Place] = [((1 << 30) + (i << 20), (64, 64), (pitch, 4), 4) for i in range(rows)]
    columns: list[Place] = [
        ((1 << 29) + i * 4, (64, 1), (pitch, 4), 4) for i in range(pitch // 4)
    ]  # of one array
    table = boxes(apart + columns)
    best = float("inf")
    for _ in range(5):
        start = time.process_time()
        assert not list(clashes(table, np.ones(len(table.address), bool)))
        assert not len(repeated(table))
        best = min(best, time.process_time() - start)
    assert best < 0.05  # measured: 0.01 on one busy core; comparing every pair would take minutes
    assert table.extent.shape[1] == DIMENSIONS


ROWS = Layout((6, 4), Mesh([0, 1]), [Shard(0)])
COLUMNS = Layout((6, 4), Mesh([2, 3]), [Shard(1)])
TWO = [Transfer(ROWS, COLUMNS, "int32", name) for name in "ab"]
VALUES = np.arange(24, dtype="int32").reshape(6, 4)


def sources() -> dict[int, dict[str, Any]]:
    return {r: {n: ROWS.slice_global(VALUES, r) + k for k, n in enumerate("ab")} for r in ROWS.ranks}


def bind_and_run(destinations: dict[int, dict[str, Any]], given_: Any = None, ranks: int = 4) -> None:
    with plan(TWO).bind(
        LocalTransport(ranks), sources() if given_ is None else given_, destinations
    ) as bound:
        bound.run()


def windows(shape: tuple[int, int], strides: tuple[int, int]) -> Any:
    return np.lib.stride_tricks.as_strided(np.zeros(64, "int32"), shape, strides)


def one_buffer_for_two_names() -> Any:
    return {r: dict.fromkeys("ab", np.zeros((6, 2), "int32")) for r in COLUMNS.ranks}


def one_array_for_two_ranks() -> Any:
    a, b = np.zeros((6, 2), "int32"), [np.zeros((6, 2), "int32") for _ in range(2)]
    return {r: {"a": a, "b": b[r - 2]} for r in COLUMNS.ranks}


def a_row_in_common() -> Any:
    base = np.zeros((11, 2), "int32")
    return {
        r: {"a": base[:6] if r == 2 else base[:6] + 0, "b": base[5:] if r == 2 else base[:6] + 0}
        for r in (2, 3)
    }


@pytest.mark.parametrize(
    ("destinations", "message"),
    [
        (
            one_buffer_for_two_names,
            r"rank 2-3: .*got destination array 'b' over destination array 'a'; receive",
        ),
        (a_row_in_common, r"rank 2: .*got destination array 'b' over destination array 'a'; receive"),
        (one_array_for_two_ranks, r"destination array 'a' of rank 3 over destination array 'a' of rank 2"),
    ],
)
def test_what_is_written_twice(destinations: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        bind_and_run(destinations())


@pytest.mark.parametrize("strides", [(8, 0), (4, 4), (0, 4), (8, 4)[::-1], (6, 4)])
def test_strides_that_overlap(strides: tuple[int, int]) -> None:
    given_ = {r: {n: np.zeros((6, 2), "int32") for n in "ab"} for r in COLUMNS.ranks}
    given_[3]["b"] = windows((6, 2), strides)
    with pytest.raises(
        LayoutError, match=r"rank 3: tensor 'b', destination array: expected every element at a place"
    ):
        bind_and_run(given_)


def test_another_ranks_source_as_a_destination() -> None:
    held = sources()
    given_ = {r: {n: np.zeros((6, 2), "int32") for n in "ab"} for r in COLUMNS.ranks}
    held[0]["a"] = given_[3]["b"][:3].reshape(-1)[:6].repeat(2).reshape(3, 4)
    bind_and_run(given_, held)  # a copy: apart
    base = np.zeros((6, 4), "int32")
    held[0]["a"], given_[3]["b"] = base[:3], base[:, :2]
    with pytest.raises(LayoutError, match=r"destination array 'b' of rank 3 over source array 'a' of rank 0"):
        bind_and_run(given_, held)


def test_a_source_stays_as_it_is() -> None:
    """Rank 1 sends nothing of its copy, and may not lose it all the same."""
    copies = Layout((6, 4), Mesh([0, 1]), [Replicate()])
    transfer = Transfer(copies, Layout((6, 4), Mesh([1]), [Replicate()]), "int32", "w")
    base = VALUES.copy()
    with pytest.raises(
        LayoutError, match="destination array 'w'.* over source array 'w'|source array 'w'.* over"
    ):
        plan(transfer).bind(LocalTransport(2), {0: {"w": VALUES}, 1: {"w": base}}, {1: {"w": base}})


def test_views_side_by_side_in_one_buffer_are_taken() -> None:
    """Fused storage: spans that cross, elements that do not; sources may share what they like."""
    fused = np.zeros((6, 4, 2), "int32")
    given_ = {
        2: {"a": fused[:, ::2, 0], "b": fused[:, 1::2, 0]},
        3: {"a": fused[:, :2, 1], "b": fused[:, 2:, 1]},
    }
    same = np.full((3, 4), 7, "int32")
    bind_and_run(given_, {r: dict.fromkeys("ab", same) for r in ROWS.ranks})
    assert (fused == 7).all()


def test_views_that_span_what_others_write() -> None:
    """Two experts with two slots each, in turn: each view spans from its first slot to its last one."""
    stack = np.zeros((4, 3), "int32")
    source = Layout((1, 3), Mesh([0]), [Replicate()])
    transfers, given_ = [], {}
    for name, first in (("even", 0), ("odd", 1)):
        slots = {1: [Piece(Box((0, 0), (1, 3)), at) for at in ((0, 0), (2, 0))]}
        destination = Layout.from_pieces((1, 3), slots, {1: (3, 3)})
        transfers.append(Transfer(source, destination, "int32", name))
        given_[name] = stack[first : first + 3]
    held = {0: {"even": np.full((1, 3), 2, "int32"), "odd": np.full((1, 3), 1, "int32")}}
    with plan(transfers).bind(LocalTransport(2), held, {1: given_}) as bound:
        bound.run()
    assert stack[:, 0].tolist() == [2, 1, 2, 1]
    given_["odd"] = stack[:3]
    with pytest.raises(LayoutError, match="destination array 'odd' over destination array 'even'"):
        plan(transfers).bind(LocalTransport(2), held, {1: given_})
