# SPDX-License-Identifier: Apache-2.0
"""Descriptions are values: equal, hashable, picklable, and their repr is the code that makes them."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import nccl_m2n
from nccl_m2n import Box, Layout, Mesh, Piece, Replicate, Segment, Shard, StridedShard
from tests import strategies

VALUES = [
    Box((0, 1), (2, 3)),
    Box((), ()),
    Piece(Box((1,), (3,)), (0,)),
    Replicate(),
    Shard(1),
    Shard(-1),
    Shard(0, segments=(3, 5)),
    Shard(0, segments=(8,)),
    Shard(0, segments=(Segment(3), Segment(5, parts=1))),
    Segment(3),
    Segment(3, parts=2),
    StridedShard(0, split_factor=2),
    Mesh([0, 1]),
    Mesh([1, 0]),
    Mesh([7]),
    Mesh(7),
    Mesh([[0, 1], [2, 3]], names=("dp", "tp")),
    Mesh.arange((2, 3), start=4),
    Layout((8, 8), Mesh([[0, 1], [2, 3]]), [Replicate(), Shard(0)]),
    Layout((), Mesh(3), []),
    Layout((8,), Mesh([0, 1]), [Shard(0, segments=(4, Segment(4, parts=1)))]),
    Layout.from_pieces((8, 8), {0: [Box((0, 0), (3, 8))], 1: [Box((3, 0), (8, 8))]}),
    Layout.from_pieces((4,), {0: [Piece(Box((0,), (4,)), (2,))], 1: []}, local_shapes={0: (9,)}),
    Layout.from_pieces((), {1: [Box((), ())]}),
]


def evaluated(value: Any) -> Any:
    return eval(repr(value), {name: getattr(nccl_m2n, name) for name in nccl_m2n.__all__})


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_repr_is_code(value: Any) -> None:
    made = evaluated(value)
    assert made == value
    assert repr(made) == repr(value)
    assert hash(made) == hash(value)


@given(st.one_of(strategies.mesh_layouts(), strategies.piece_layouts()))
def test_repr_of_any_layout_is_code(layout: Layout) -> None:
    made = evaluated(layout)
    assert made == layout
    assert hash(made) == hash(layout)
    assert [made.pieces(r) for r in made.ranks] == [layout.pieces(r) for r in layout.ranks]
    assert [made.local_shape(r) for r in made.ranks] == [layout.local_shape(r) for r in layout.ranks]
    assert str(made) == str(layout)


def test_values_differ() -> None:
    assert len(set(VALUES)) == len(VALUES)
    for i, a in enumerate(VALUES):
        for b in VALUES[i + 1 :]:
            assert a != b
        assert a != "a"


def test_names_are_for_people() -> None:
    plain, named = Mesh([[0, 1]]), Mesh([[0, 1]], names=("dp", "tp"))
    assert plain == named
    assert hash(plain) == hash(named)
    assert (plain.names, named.names) == (None, ("dp", "tp"))


def test_numpy_integers_are_integers() -> None:
    """What a shape or a mesh is counted with does not show: plans are compared by their text."""
    a, b, four = np.int64(0), np.int32(1), np.int64(4)
    one = Layout(
        np.array([4, 4]), Mesh(np.array([[0, 1]])), [Shard(a, segments=(four,)), StridedShard(b, four)]
    )
    assert one == Layout((4, 4), Mesh([[0, 1]]), [Shard(0, segments=(4,)), StridedShard(1, 4)])
    assert evaluated(one) == one
    two = Layout.from_pieces(np.array([4]), {a: [Box(np.array([0]), [four])]}, {a: np.array([5])})
    assert two == Layout.from_pieces((4,), {0: [Box((0,), (4,))]}, {0: (5,)})
    assert evaluated(two) == two
    assert "np." not in repr(one) + repr(two) + repr(Segment(four, b)) + repr(Piece(Box([a], [b]), [a]))


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_pickling(value: Any) -> None:
    hash(value)
    made = pickle.loads(pickle.dumps(value))
    assert made == value
    assert hash(made) == hash(value)
    assert repr(made) == repr(value)


def test_a_pickle_is_found_in_another_process() -> None:
    """A hash need not be the same in the next process, so it must not travel with the value."""
    for value in VALUES:
        hash(value)
    script = """if True:
        import pickle, sys
        from tests.layout.test_values import VALUES
        table = {value: i for i, value in enumerate(VALUES)}
        assert [table[value] for value in pickle.load(sys.stdin.buffer)] == list(range(len(VALUES)))
    """
    subprocess.run([sys.executable, "-c", script], input=pickle.dumps(VALUES), check=True, timeout=60)


def test_values_do_not_change() -> None:
    with pytest.raises(AttributeError):
        Shard(0).dim = 1
    with pytest.raises(AttributeError):
        VALUES[-1].shape = (3,)
    with pytest.raises(ValueError, match="read-only"):
        Mesh([0, 1]).array[0] = 5


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Box((0, 2), (4, 6)), "[0:4, 2:6]"),
        (Piece(Box((2,), (4,)), (0,)), "[2:4] at (0,)"),
        (Replicate(), "R"),
        (Shard(1), "S(1)"),
        (Shard(0, segments=(3, Segment(5, parts=2))), "S(0: 3+5/2)"),
        (StridedShard(0, split_factor=2), "SS(0, 2)"),
        (Mesh.arange((2, 4)), "2 × 4 over ranks 0-7"),
        (Mesh([[0, 1], [2, 5]], names=("dp", "tp")), "dp 2 × tp 2 over ranks 0-2, 5"),
        (Mesh(4), "1 over ranks 4"),
        (Mesh(range(0, 40, 2)), "20 over ranks 0, 2, 4, 6, 8, 10, 12, …, 38"),
        (Layout((8, 6), Mesh.arange((2, 2)), [Replicate(), Shard(0)]), "8 × 6 on 2 × 2 over ranks 0-3"),
        (Layout((), Mesh([1]), [Replicate()]), "scalar on 1 over ranks 1"),
        (Layout.from_pieces((8,), {0: [Box((0,), (8,))]}), "8 in 1 pieces on 1 over ranks 0"),
    ],
    ids=str,
)
def test_str_is_for_people(value: Any, text: str) -> None:
    assert str(value).startswith(text)
