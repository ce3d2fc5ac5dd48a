# SPDX-License-Identifier: Apache-2.0
"""Plans are pure functions of values: equal on every rank, told by their digest, kept as JSON."""

from __future__ import annotations

import itertools
import json
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nccl_m2n import (
    Box,
    Layout,
    Mesh,
    Piece,
    Placement,
    Plan,
    PlanError,
    Replicate,
    Segment,
    Shard,
    StridedShard,
    Topology,
    Transfer,
    plan,
)
from nccl_m2n.planning.options import PlanOptions
from nccl_m2n.planning.planner import cached_plan
from tests import strategies

MESH = Mesh.arange((2, 2), names=("dp", "tp"))
SOURCE = Layout((8, 6), MESH, [Shard(0), Shard(1)])
DESTINATION = Layout((8, 6), Mesh([3, 5, 4]), [Shard(0)])
TOPOLOGY = Topology([[0, 1], [2, 3], [4, 5]])


def transfer(
    source: Layout = SOURCE, destination: Layout = DESTINATION, dtype: str = "int16", **more
) -> Transfer:
    return Transfer(source, destination, dtype, **{"name": "a", **more})


def on_three(placement: Placement, ranks: tuple[int, ...] = (3, 5, 4)) -> Transfer:
    return transfer(destination=Layout((8, 6), Mesh(ranks), [placement]))


def at_offset(**more) -> Transfer:
    piece = Piece(Box((0, 0), (8, 6)), (1, 0))
    return transfer(destination=Layout.from_pieces((8, 6), {3: [piece]}, **more))


def transposed() -> Transfer:
    return transfer(Layout((6, 8), MESH, [Shard(0), Shard(1)]), Layout((6, 8), Mesh([3, 5, 4]), [Shard(0)]))


# Each differs from all others in one thing that plans depend on.
PROBLEMS = {
    "plain": lambda: plan(transfer(), TOPOLOGY),
    "name": lambda: plan(transfer(name="b"), TOPOLOGY),
    "dtype": lambda: plan(transfer(dtype="uint16"), TOPOLOGY),
    "cast": lambda: plan(transfer(dtype="float32", destination_dtype="float16"), TOPOLOGY),
    "cast back": lambda: plan(transfer(dtype="float16", destination_dtype="float32"), TOPOLOGY),
    "turned around": lambda: plan(transfer(DESTINATION, SOURCE), TOPOLOGY),
    "shape": lambda: plan(transposed(), TOPOLOGY),
    "order of ranks": lambda: plan(on_three(Shard(0), (5, 3, 4)), TOPOLOGY),
    "placement": lambda: plan(on_three(Replicate()), TOPOLOGY),
    "segments": lambda: plan(on_three(Shard(0, segments=(4, 4))), TOPOLOGY),
    "parts": lambda: plan(on_three(Shard(0, segments=(4, Segment(4, 1)))), TOPOLOGY),
    "strided": lambda: plan(on_three(StridedShard(0, 2)), TOPOLOGY),
    "split factor": lambda: plan(on_three(StridedShard(0, 3)), TOPOLOGY),
    "pieces": lambda: plan(
        transfer(destination=Layout.from_pieces((8, 6), {r: DESTINATION.pieces(r) for r in (3, 4, 5)})),
        TOPOLOGY,
    ),
    "offsets": lambda: plan(at_offset(), TOPOLOGY),
    "local shape": lambda: plan(at_offset(local_shapes={3: (12, 6)}), TOPOLOGY),
    "topology": lambda: plan(transfer(), Topology([[0, 1, 2], [3, 4, 5]])),
    "rails": lambda: plan(transfer(), Topology([[1, 0], [2, 3], [4, 5]])),
    "no topology": lambda: plan(transfer()),
    "method": lambda: plan(transfer(), TOPOLOGY, method="direct"),
    "chunks": lambda: plan(transfer(), TOPOLOGY, chunk_bytes=16),
    "staging": lambda: plan(transfer(), TOPOLOGY, staging_bytes=1000),
    "two": lambda: plan([transfer(name=n) for n in "ab"], TOPOLOGY),
    "two, turned around": lambda: plan([transfer(name=n) for n in "ba"], TOPOLOGY),
    "none": lambda: plan([], TOPOLOGY),
}


def same_tables(one: Plan, two: Plan) -> bool:
    tables = ((p.flows, p.hops, p.bundles.table) for p in (one, two))
    return one.rounds == two.rounds and all(np.array_equal(a, b) for a, b in zip(*tables, strict=True))


def test_digests_differ_where_problems_do() -> None:
    digests = {name: make().digest for name, make in PROBLEMS.items()}
    for (a, one), (b, two) in itertools.combinations(digests.items(), 2):
        assert one != two, f"{a} and {b} have one digest"


@pytest.mark.parametrize("name", PROBLEMS)
def test_equal_problems_make_equal_plans(name: str) -> None:
    one, two = PROBLEMS[name](), PROBLEMS[name]()
    assert one.digest == two.digest
    assert same_tables(one, two)
    assert str(one) == str(two)


@pytest.mark.parametrize("name", PROBLEMS)
def test_json(name: str) -> None:
    one = PROBLEMS[name]()
    two = Plan.from_json(one.to_json())
    assert two.transfers == one.transfers
    assert two.topology == one.topology
    assert two.options == one.options
    assert two.digest == one.digest
    assert same_tables(one, two)


@given(st.data())
@settings(max_examples=50)
def test_json_of_any(data: st.DataObject) -> None:
    shape = data.draw(strategies.shapes(max_ndim=3, elements=200))
    one = plan(Transfer(*(data.draw(strategies.layouts(shape)) for _ in range(2)), "V3", "ж"))
    two = Plan.from_json(one.to_json())
    assert two.digest == one.digest
    assert two.transfers == one.transfers


def test_names_of_mesh_axes_are_kept_but_do_not_count() -> None:
    one = PROBLEMS["plain"]()
    assert Plan.from_json(one.to_json()).transfers[0].source.mesh.names == ("dp", "tp")
    bare = Layout((8, 6), Mesh.arange((2, 2)), [Shard(0), Shard(1)])
    assert plan(Transfer(bare, DESTINATION, "int16", "a"), TOPOLOGY).digest == one.digest


@pytest.mark.parametrize("dtype", ["<i2", "int16", np.int16, np.dtype("int16")])
def test_spelling_of_a_dtype_does_not_count(dtype: object) -> None:
    assert plan(Transfer(SOURCE, DESTINATION, dtype, "a"), TOPOLOGY).digest == PROBLEMS["plain"]().digest


def test_another_process_makes_the_same_plans() -> None:
    """With another seed for the hashes of texts."""
    script = """if True:
        import json
        from tests.planning.test_values import PROBLEMS
        made = {name: make() for name, make in PROBLEMS.items()}
        print(json.dumps({n: [p.digest, p.flows.tolist(), p.hops.tolist(), str(p)] for n, p in made.items()}))
    """
    environment = {"PYTHONHASHSEED": "12345"}
    run = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
        timeout=60,
    )
    for name, (digest, flows, hops, text) in json.loads(run.stdout).items():
        made = PROBLEMS[name]()
        assert (digest, text) == (made.digest, str(made))
        assert [tuple(row) for row in flows] == made.flows.tolist()
        assert [tuple(row) for row in hops] == made.hops.tolist()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"expected a text as a plan's JSON, got ''"),
        ("[]", r"expected the JSON text of a plan, got '\[\]'"),
        ("{}", r"expected the JSON text of a plan, got '\{\}'.*to_json writes it"),
        ('{"layouts": [], "transfers": [["a", 0, 0, "int8", "int8"]]}', r"expected the JSON text of a plan"),
    ],
)
def test_what_is_no_plan(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan.from_json(text)


def test_a_text_that_was_changed() -> None:
    data = json.loads(PROBLEMS["plain"]().to_json())
    data["digest"] = "0" * 64
    with pytest.raises(PlanError, match=r"expected the plan of digest 000000000000…, got .*; plan it anew"):
        Plan.from_json(json.dumps(data))
    data["layouts"][0]["mesh"] = [[2, 1], [1, 1]]
    with pytest.raises(ValueError, match="expected distinct ranks"):
        Plan.from_json(json.dumps(data))


def test_plans_are_remembered_by_value() -> None:
    transfers = (Transfer(SOURCE, DESTINATION, "int16", "a"),)
    one = cached_plan(transfers, TOPOLOGY, PlanOptions(staging_bytes=1 << 20))
    assert (
        cached_plan(pickle.loads(pickle.dumps(transfers)), TOPOLOGY, PlanOptions(staging_bytes=1 << 20))
        is one
    )
    assert cached_plan(transfers, TOPOLOGY, PlanOptions(chunk_bytes=16, staging_bytes=1 << 20)) is not one


def test_what_people_see() -> None:
    made = PROBLEMS["plain"]()
    assert repr(made).startswith("<Plan of 1 transfers over 6 ranks: ")
    assert made.digest[:12] in repr(made)
    assert "<svg" in made._repr_html_() or "<table" in made._repr_html_()
    assert str(made.transfers[0]).startswith(
        "a: int16 8 × 6, 8 × 6 on dp 2 × tp 2 over ranks 0-3 (dp: S(0), tp: S(1))"
    )
