# SPDX-License-Identifier: Apache-2.0
"""The life of a bound plan, and that the result depends on nothing but the problem."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nccl_m2n import (
    Layout,
    LayoutError,
    LocalTransport,
    Mesh,
    MpiTransport,
    Replicate,
    Shard,
    Topology,
    Transfer,
    TransportError,
    plan,
)
from nccl_m2n.transport.base import Message
from tests import scenarios, strategies
from tests.scenarios import BY_NAME, ORDERS, RANKS, Scenario, Tensor

SOURCE = Layout((6, 4), Mesh([0, 1]), [Shard(0)])
DESTINATION = Layout((6, 4), Mesh([1, 2]), [Shard(1)])
PLAN = plan(Transfer(SOURCE, DESTINATION, "int32", "w"))
VALUES = np.arange(24, dtype="int32").reshape(6, 4)


def bound_arrays() -> tuple[dict, dict]:
    sources = {"w": {rank: SOURCE.slice_global(VALUES, rank) for rank in SOURCE.ranks}}
    return sources, {"w": {rank: np.zeros((6, 2), "int32") for rank in DESTINATION.ranks}}


def arrived(destinations: dict) -> bool:
    return all(np.array_equal(a, DESTINATION.slice_global(VALUES, r)) for r, a in destinations["w"].items())


def test_run_and_wait() -> None:
    sources, destinations = bound_arrays()
    with PLAN.bind(LocalTransport(3), sources, destinations) as bound:
        bound.wait()  # nothing is under way
        assert not destinations["w"][1].any()
        bound.run()
        bound.wait(timeout=10)
        assert arrived(destinations)
        bound.wait()
        for array in destinations["w"].values():
            array[...] = 0
        bound.run()
        bound.run()  # ends the last one first
        bound.wait(timeout=None)
        assert arrived(destinations)
        bound.capture()  # nothing to capture in host memory
        assert 0 < bound.staging_bytes <= PLAN.staging.sum() + 12 * 256  # four slots a rank, rounded up
        assert repr(bound).endswith("open>")
    assert repr(bound).endswith("closed>")


def test_other_arrays_of_the_same_plan() -> None:
    sources, destinations = bound_arrays()
    with PLAN.bind(LocalTransport(3), sources, destinations) as bound:
        bound.run()  # ends before anything changes hands
        other, there = bound_arrays()
        bound.rebind(destinations=there)
        assert arrived(destinations)
        for array in other["w"].values():
            array += 100
        bound.run()
        bound.wait()
        assert arrived(there)
        bound.rebind({rank: {"w": array} for rank, array in other["w"].items()})
        bound.run()
        bound.wait()
        assert np.array_equal(there["w"][2], DESTINATION.slice_global(VALUES, 2) + 100)
        bound.rebind()  # the same once more
        bound.run()
        bound.wait()
    with pytest.raises(TransportError, match="expected an open binding, got a closed one"):
        bound.rebind()


def test_arrays_that_do_not_fit_leave_those_of_before() -> None:
    sources, destinations = bound_arrays()
    with PLAN.bind(LocalTransport(3), sources, destinations) as bound:
        wrong = {"w": dict(destinations["w"]) | {2: np.zeros((6, 3), "int32")}}
        for given in (wrong, {}, 5, {"w": {1: destinations["w"][1]}}, sources):
            with pytest.raises(LayoutError):
                bound.rebind(destinations=given)  # type: ignore[arg-type]
            bound.run()
            bound.wait()
            assert arrived(destinations)
            for array in destinations["w"].values():
                array[...] = 0


def test_arrays_of_before_are_let_go() -> None:
    sources, destinations = bound_arrays()
    with PLAN.bind(LocalTransport(3), sources, destinations) as bound:
        gone = [weakref.ref(array) for array in destinations["w"].values()]
        del destinations
        gc.collect()
        assert all(ref() is not None for ref in gone)
        bound.rebind(destinations=bound_arrays()[1])
        gc.collect()
        assert [ref() for ref in gone] == [None, None]


def test_leaving_waits_for_the_last_run() -> None:
    sources, destinations = bound_arrays()
    with PLAN.bind(LocalTransport(3), sources, destinations) as bound:
        bound.run()
    assert arrived(destinations)


def test_a_closed_binding_does_not_run() -> None:
    bound = PLAN.bind(LocalTransport(3), *bound_arrays())
    bound.close()
    bound.close()
    for call in (bound.run, bound.wait, bound.capture):
        with pytest.raises(TransportError, match="closed"):
            call()


def test_an_error_inside_does_not_wait() -> None:
    bound = PLAN.bind(LocalTransport(3), *bound_arrays())
    bound.run()
    bound.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    assert repr(bound).endswith("broken>")
    with pytest.raises(TransportError, match=r"expected a transport in order.*form a new one"):
        bound.run()


def test_arrays_live_as_long_as_the_binding() -> None:
    sources, destinations = bound_arrays()
    kept = destinations["w"][2].base if destinations["w"][2].base is not None else destinations["w"][2]
    bound = PLAN.bind(LocalTransport(3), sources, destinations)
    del sources
    gc.collect()
    junk = [np.full(12, -1, "int32") for _ in range(50)]  # would take the place of what was freed
    bound.run()
    bound.close()
    assert len(junk) == 50
    assert kept.any()
    assert arrived(destinations)


ROW = Layout((4,), Mesh([0]), [Replicate()])
FORMS = {
    "by name": lambda array: {"w": array},
    "by name and rank": lambda array: {"w": {0: array}},
    "by rank and name": lambda array: {0: {"w": array}},
    "by a NumPy rank": lambda array: {np.int64(0): {"w": array}},
}


@pytest.mark.parametrize("source", FORMS)
@pytest.mark.parametrize("destination", FORMS)
def test_arrays_by_name_and_by_rank(source: str, destination: str) -> None:
    """On one rank as on several, in whichever order."""
    arrays = [np.arange(4), np.zeros(4, int)]
    given_ = [FORMS[form](array) for form, array in zip((source, destination), arrays, strict=True)]
    with plan(Transfer(ROW, ROW, "int64", "w")).bind(LocalTransport(1), *given_) as bound:
        bound.run()
    assert arrays[1].tolist() == [0, 1, 2, 3]


def test_several_ranks_by_rank_and_name() -> None:
    sources, destinations = bound_arrays()
    turned = [{r: {"w": a} for r, a in side["w"].items()} for side in (sources, destinations)]
    with PLAN.bind(LocalTransport(3), *turned) as bound:
        bound.run()
    assert arrived(destinations)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (None, "expected source arrays as a mapping from tensor's name to array, got NoneType"),
        ([VALUES], "expected source arrays as a mapping from tensor's name to array, got list"),
        (
            {"w": {0: VALUES[:3], 7: VALUES}},
            r"tensor 'w', source arrays: expected those of .*0, 1, 2, got one of 7",
        ),
        ({"w": {0: VALUES[:3], -1: VALUES}}, r"expected those of .*, got one of -1; leave it out here"),
        ({"w": {"0": VALUES[:3]}}, r"expected those of .*, got one of '0'"),
        ({0: {"w": VALUES[:3]}, 3: {"w": VALUES[:3]}}, r"source arrays: expected those of .*, got one of 3"),
        (
            {0: VALUES[:3], 1: VALUES[3:]},
            "rank 0: expected a mapping from tensor's name to array, got ndarray",
        ),
        (
            {0: {"w": VALUES[:3]}, "w": {1: VALUES[3:]}},
            "tensor 0, source arrays: expected those of the ranks that this process drives",
        ),
    ],
)
def test_arrays_that_are_none(arrays: object, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        PLAN.bind(LocalTransport(3), arrays, bound_arrays()[1])


@pytest.mark.parametrize("transport", [None, 3, "local", object()])
def test_no_transport(transport: object) -> None:
    with pytest.raises(
        TransportError, match=r"expected a transport to bind to, got \w+; make a LocalTransport"
    ):
        PLAN.bind(transport, *bound_arrays())


@pytest.mark.parametrize("columns", [slice(None), slice(None, None, 2)], ids=["contiguous", "strided"])
def test_a_cast_that_overflows_is_as_numpy_has_it(columns: slice) -> None:
    """And no warning, which as an error would stop one rank between its peers."""
    there = Layout((4,), Mesh([1]), [Replicate()])
    arrays = np.array([1.5, 1e6, -1e300, np.nan] * 2)[columns][:4], np.zeros(8, "float16")[columns][:4]
    made = plan(Transfer(ROW, there, "float64", "w", "float16"))
    with made.bind(LocalTransport(2), {0: {"w": arrays[0]}}, {1: {"w": arrays[1]}}) as bound:
        bound.run()
    with np.errstate(over="ignore"):
        assert arrays[1].tobytes() == arrays[0].astype("float16").tobytes()


def test_several_ranks_want_mappings() -> None:
    _, destinations = bound_arrays()
    with pytest.raises(
        LayoutError, match=r"tensor 'w': expected a mapping from rank to source array.*got ndarray"
    ):
        PLAN.bind(LocalTransport(3), {"w": VALUES}, destinations)


def test_a_single_rank_needs_no_mapping() -> None:
    layout = Layout((3,), Mesh([0]), [Replicate()])
    source, destination = np.arange(3), np.zeros(3, int)
    with plan(Transfer(layout, layout, "int64", "w")).bind(
        LocalTransport(1), {"w": source}, {"w": destination}
    ) as bound:
        bound.run()
    assert destination.tolist() == [0, 1, 2]


def test_an_empty_shard_may_be_left_out() -> None:
    source = Layout((3, 2), Mesh([0, 1]), [Shard(0)])
    destination = Layout((3, 2), Mesh.arange((4,)), [Shard(0)])
    arrays = {r: np.zeros((1, 2), "int8") for r in range(3)}
    held = {r: source.slice_global(np.ones((3, 2), "int8"), r) for r in (0, 1)}
    with plan(Transfer(source, destination, "int8", "w")).bind(
        LocalTransport(4), {"w": held}, {"w": arrays}
    ) as bound:
        bound.run()
    assert all(array.all() for array in arrays.values())


@pytest.mark.parametrize("chunk_bytes", [1, 64, 1000, None])
@pytest.mark.parametrize("staging_bytes", [1, 4096, 256 << 20])
@pytest.mark.parametrize(
    "name",
    ["40 tensors of all kinds", "odd bytes before bfloat16", "columns to every second", "chain of hosts"],
)
def test_the_result_does_not_depend_on_chunks(name: str, chunk_bytes: int | None, staging_bytes: int) -> None:
    options = {"chunk_bytes": chunk_bytes, "staging_bytes": staging_bytes}
    assert scenarios.run(BY_NAME[name], LocalTransport(RANKS), turns=1, **options) == []


@pytest.mark.parametrize("method", ["direct", "gather_broadcast"])
def test_the_other_methods_arrive_too(method: str) -> None:
    for name in ("40 tensors of all kinds", "chain of hosts", "2 KV heads at TP8", "a box twice on one rank"):
        assert scenarios.run(BY_NAME[name], LocalTransport(RANKS), turns=1, method=method) == []


@pytest.mark.parametrize("size", [1, 3, 40])
def test_the_result_does_not_depend_on_batches(size: int) -> None:
    tensors = BY_NAME["40 tensors of all kinds"].tensors
    for first in range(0, 40, size):
        batch = Scenario("batch", tensors[first : first + size], per_domain=3)
        assert scenarios.run(batch, LocalTransport(RANKS), turns=1) == []


@st.composite
def any_scenario(draw: st.DrawFn) -> Scenario:
    dtypes = ("uint8", "bool", "int16", "bfloat16", "float32", "complex64", "complex128", "float8_e5m2")
    tensors = []
    for _ in range(draw(st.integers(1, 3))):
        shape = draw(strategies.shapes(max_ndim=5, elements=400))
        source, destination = (draw(strategies.layouts(shape, universe=RANKS)) for _ in range(2))
        orders = (draw(st.sampled_from(list(ORDERS))) for _ in range(2))
        tensors.append(Tensor(source, destination, draw(st.sampled_from(dtypes)), None, *orders))
    return Scenario("any", tuple(tensors), draw(st.integers(1, 8)))


@settings(max_examples=150)
@given(any_scenario(), st.sampled_from([None, 16, 200]))
def test_any(scenario: Scenario, chunk_bytes: int | None) -> None:
    assert scenarios.run(scenario, LocalTransport(RANKS), chunk_bytes=chunk_bytes) == []


def test_the_harness_sees_a_wrong_byte() -> None:
    """A check that cannot fail checks nothing."""
    side = scenarios.SideOfRank(BY_NAME["inside to inside"], 4, "destination")
    side.fill(0)
    assert side.wrong(0) == ["t0 on rank 4"]
    layout = BY_NAME["inside to inside"].tensors[0].destination
    side.storage["t0"].array[...] = layout.slice_global(BY_NAME["inside to inside"].tensors[0].values(0), 4)
    assert side.wrong(0) == []
    side.storage["t0"].base[0, 0] = 0  # outside the array
    assert side.wrong(0) == ["t0 on rank 4"]
    assert side.wrong(1) == ["t0 on rank 4"]


def test_a_local_transport() -> None:
    with LocalTransport(ranks=2) as transport:
        assert repr(transport) == "LocalTransport(ranks=2)"
        assert transport.exchange({1: b"b", 0: b"a"}) == [b"a", b"b"]
        assert Topology(transport.discover_domains()) == Topology([[0, 1]])
        one, two, three = (np.full(n, n, np.uint8) for n in (3, 3, 4))
        with pytest.raises(
            TransportError, match="expected rank 1 to receive what rank 0 sends, got other sizes"
        ):
            transport.prepare([Message(0, 1, True, one), Message(1, 0, False, three)])
        two[...] = 0
        transport.prepare([Message(0, 1, True, one), Message(1, 0, False, two)]).start()
        assert two.tolist() == [3, 3, 3]
    with pytest.raises(
        TransportError, match="expected a whole number from 1 to .* as the number of ranks, got 0"
    ):
        LocalTransport(0)


def test_what_is_no_communicator() -> None:
    pytest.importorskip("mpi4py")
    with pytest.raises(
        TransportError, match=r"expected an mpi4py intracommunicator, got 7; pass MPI.COMM_WORLD"
    ):
        MpiTransport(7)
