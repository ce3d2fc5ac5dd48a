# SPDX-License-Identifier: Apache-2.0
"""What `Refit` takes and what it refuses: options, names, subsets, and calls after it is closed."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nccl_m2n import (
    LayoutError,
    LocalTransport,
    M2nError,
    Parameter,
    PlanError,
    Refit,
    TransferTimeout,
    TransportError,
)

from .sessions import Side, assert_holds, copies, holds, moved, needs, refit, sharded, together, values

FOUR, EIGHT = range(4), range(4, 8)
FULL, SOURCE, DESTINATION = values((8, 3)), sharded((8, 3), FOUR), sharded((8, 3), EIGHT)


def have(*names: str) -> Side:
    return together(*[holds(SOURCE, FULL + i, name) for i, name in enumerate(names)])


def want(*names: str) -> Side:
    return together(*[needs(DESTINATION, name=name) for name in names])


# --- Casts ---

BF16, F16, F8 = ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn


def floats(dtype: Any, *names: str) -> Side:
    return together(*[holds(SOURCE, FULL.astype(dtype), name) for name in names])


def room(dtype: Any, *names: str) -> Side:
    return together(*[needs(DESTINATION, dtype, name) for name in names])


def test_a_narrower_range_has_to_be_named() -> None:
    for cast in (True, "bfloat16", ["float16", "float8_e5m2"], {"v": "float8_e4m3fn"}):
        with pytest.raises(
            LayoutError, match="'w'.*bfloat16.*float8_e4m3fn.*range is narrower.*cast='float8_e4m3fn'"
        ):
            refit(floats(BF16, "w"), room(F8, "w"), cast=cast)
    for cast in ("float8_e4m3fn", ["float16", "float8_e4m3fn"], {"w*": "float8_e4m3fn"}):
        wanted = room(F8, "w")
        moved(floats(BF16, "w"), wanted, cast=cast)
        assert_holds(wanted, DESTINATION, FULL.astype(BF16).astype(F8))


def test_patterns_say_which_parameters_are_cast() -> None:
    have, names = floats(np.float32, "a.w", "b.w"), ("a.w", "b.w")
    wanted = together(room(F16, "a.w"), room(BF16, "b.w"))
    moved(have, wanted, cast={"a.*": "float16"})
    for name, dtype in zip(names, (F16, BF16), strict=True):
        assert_holds(wanted, DESTINATION, FULL.astype(dtype), name)
    with pytest.raises(LayoutError, match="'b.w'.*float16"):
        refit(have, room(F16, *names), cast={"a.*": "float16"})


@pytest.mark.parametrize("cast", [1, 2.5, None, "yes", "int32", ["int8"], [None], object(), {"*": 1}])
def test_what_is_no_cast(cast: Any) -> None:
    with pytest.raises(LayoutError, match="expected (cast|an element type)"):
        refit(have("w"), want("w"), cast=cast)


# --- Nothing to move, and what is left out ---


def test_a_refit_of_nothing_is_refused() -> None:
    with pytest.raises(LayoutError, match="'a' not on the destination side and 'b' not on the source side"):
        refit(have("a"), want("b"), missing="skip")
    for sides in (({}, {}), ({0: []}, {})):
        with pytest.raises(LayoutError, match="expected parameters on both sides, got none at all"):
            Refit(LocalTransport(8), *sides)
    with pytest.raises(LayoutError, match="'a' not on the destination side"):
        Refit(LocalTransport(8), have("a"), {}, missing="skip")


def test_what_is_skipped_is_told() -> None:
    made = moved(have("w", "a", "b"), want("w", "c"), missing="skip")
    assert made.skipped == {"source": ("a", "b"), "destination": ("c",)}
    assert made.report is not None and made.report.skipped == 3
    assert "1 tensors (3 skipped)" in str(made.report)
    assert "1 tensors (3 skipped)" in repr(made)
    assert moved(have("w"), want("w")).skipped == {"source": (), "destination": ()}


def test_an_error_tells_which_names_stayed_alone() -> None:
    with pytest.raises(
        LayoutError,
        match="'a', 'b', 'c', 'd' and 1 more not on the destination side and 'x' not on the source side.*names=.*skip",
    ):
        refit(have("w", *"abcde"), want("w", "x"))


# --- Names ---

PAIRS = [("model.visual.", "visual."), ("model.", "language_model.model.")]


@pytest.mark.parametrize(
    "names",
    [
        PAIRS,
        {"model.w": "language_model.model.w", "model.visual.w": "visual.w"},
        lambda name: name.replace("model.visual", "visual").replace("model.w", "language_model.model.w"),
    ],
)
def test_names_become_the_other_sides(names: Any) -> None:
    wanted = want("language_model.model.w", "visual.w", "lm_head")
    made = moved(have("model.w", "model.visual.w", "lm_head"), wanted, names=names)
    assert [t.name for t in made.transfers] == ["language_model.model.w", "visual.w", "lm_head"]
    for number, transfer in enumerate(made.transfers):
        assert_holds(wanted, DESTINATION, FULL + number, transfer.name)


def test_names_that_cannot_be() -> None:
    for names in ("model.", 5, [("a", "b", "c")], ["model."], {"w": 3}, lambda name: 7, lambda name: None):
        with pytest.raises(LayoutError, match="names"):
            refit(have("w"), want("w"), names=names)
    with pytest.raises(LayoutError, match="'w' from both 'a.w' and 'b.w'"):
        refit(have("a.w", "b.w"), want("w"), names=[("a.", ""), ("b.", "")])
    with pytest.raises(LayoutError, match="'w' not on the destination side and 'x.w' not on the source side"):
        refit(have("w"), want("x.w"), names={"v": "x.v"})


# --- Subsets ---


def test_patterns_name_subsets() -> None:
    wanted = want("a.w", "a.v", "b.w", "b[0]")
    with refit(have("a.w", "a.v", "b.w", "b[0]"), wanted) as made:
        made.run(only="a.*")
        made.wait()
        assert made.report is not None and made.report.tensors == 2
        assert made.verify() == ["b.w", "b[0]"]
        assert made.verify(only=["a.*"]) == []
        assert made.verify(only="*") == ["b.w", "b[0]"]
        made.run(only=["b[0]", "*.v"])  # a name that is there, before it is a pattern
        made.wait()
        assert made.verify() == ["b.w"]
        made.run(only=["*"])
        made.wait()
        assert made.verify() == []
        assert len(made._subsets._kept) == 2  # all of them are no subset


@pytest.mark.parametrize("only", [[], (), ["w", "nothing"], "no*", 5, [5], [None], [["w"]]])
@pytest.mark.parametrize("method", ["run", "prepare", "capture", "verify"])
def test_a_subset_of_nothing_is_refused(method: str, only: Any) -> None:
    with refit(have("w"), want("w")) as made:
        with pytest.raises(LayoutError, match="names of parameters"):
            getattr(made, method)(only=only)
        made.run()
        made.wait()
        assert made.verify() == []


def test_subsets_take_turns_and_are_forgotten() -> None:
    """All share one staging: a run that is under way ends before another one begins."""
    names = [f"t{i}" for i in range(12)]
    wanted = want(*names)
    with refit(have(*names), wanted) as made:
        for turn in (1, 2):
            for side in wanted.values():
                for p in side:
                    p.array[...] = -turn
            for name in names:
                made.run(only=name, version=turn)  # none of them is waited for
            made.wait()
            assert made.version == turn
            assert made.verify() == []
        kept = list(made._subsets)
        assert len(kept) == 9
        assert len({id(subset.moving.bound._executor._staging) for subset in kept}) == 1


def staged(made: Refit) -> int:
    """Bytes of staging that this process holds."""
    return sum(size for blocks in made._subsets._staging._blocks.values() for _, size, _ in blocks)


def test_staging_does_not_grow_with_the_subsets() -> None:
    """It is that of the subset that needs most, however many there are and in whatever order they come."""
    names, source = [f"t{i}" for i in range(9)], sharded((64, 64), FOUR, 1)
    have = together(*[holds(source, values((64, 64)) + i, name) for i, name in enumerate(names)])
    wanted = together(*[needs(sharded((64, 64), EIGHT), name=name) for name in names])
    with refit(have, wanted, staging_bytes=16 << 10) as made:
        held = [staged(made)]
        for turn in range(3):
            for count in (1, 3, 9, 5, 2, 7):
                made.run(only=[f"t{i}" for i in range(turn, turn + count) if i < 9])
                made.wait()
                held.append(staged(made))
        assert made.verify() == []
        assert 0 < max(held) <= 8 * (16 << 10)
        assert all(len(blocks) <= 1 for blocks in made._subsets._staging._blocks.values())


def test_a_larger_subset_takes_all_to_its_staging() -> None:
    """The whole refit goes as full tensors; a subset that needs more staging than all: the old one is let go."""
    have_, wanted = have("a", "b"), want("a", "b")
    with refit(have_, wanted) as made:
        made._subsets._staging_bytes = 0  # as if everything had needed none
        before = made._subsets._staging
        made.run(only="a")
        made.wait()
        assert made._subsets._staging is not before
        assert made._subsets.all.moving is None
        made.run()
        made.wait()
        assert made.verify() == []


# --- Other arrays ---


def test_release_lets_go_of_staging_until_the_next_run() -> None:
    source, destination = sharded((64, 64), FOUR, 1), sharded((64, 64), EIGHT)
    loaded: list[float] = []
    wanted = together(needs(destination), {4: [Parameter("odd")]})
    sides = together(holds(source, values((64, 64))), holds(source, values((64, 64)), "odd"))
    with refit(sides, wanted, load={4: lambda name, tensor: loaded.append(tensor.sum())}) as made:
        made.prepare("w")
        blocks = [weakref.ref(b) for held in made._subsets._staging._blocks.values() for *_, b in held]
        blocks += [weakref.ref(b) for held in _buffers(made) for *_, b in held]
        assert len(blocks) > 8
        made.release()
        made.release()
        assert {ref() for ref in blocks} == {None}
        for turn in (1, 2):
            made.run(version=turn)
            made.wait()
            assert made.version == turn and made.verify() == []
        made.run(only="w")
        made.release()  # ends the run
        assert made.verify() == []
    assert loaded == [values((64, 64)).sum()] * 2


def _buffers(made: Refit) -> Any:
    """The blocks that full tensors arrive in."""
    moving = made._subsets.all.moving
    assert moving is not None and moving.broadcast is not None
    view = next(view for views in moving.broadcast._tensors[0].values() for view in views.values())
    return view.owner._blocks.values()


def test_an_engine_wakes_with_other_arrays() -> None:
    first, second, sources = want("w", "v"), want("w", "v"), have("w", "v")
    with refit(sources, first) as made:
        made.run()
        made.wait()
        made.prepare("w")
        gone = weakref.ref(first[4][0].array)
        first.clear()
        made.release()
        made.rebind(destination=second)
        gc.collect()
        assert gone() is None
        for only in (None, "w"):
            made.run(only=only)
            made.wait()
        assert made.verify() == []
        assert_holds(second, DESTINATION, FULL)
        other = together(holds(SOURCE, FULL - 7, "w"), holds(SOURCE, FULL - 6, "v"))
        made.rebind(other)
        made.run()
        made.wait()
        assert_holds(second, DESTINATION, FULL - 7)
        assert_holds(second, DESTINATION, FULL - 6, "v")


def test_full_tensors_come_from_the_new_arrays() -> None:
    loader: dict[str, Any] = {}
    wanted, second = want("w"), want("w")
    with refit(
        have("w", "odd"),
        together(wanted, {4: [Parameter("odd")]}),
        load={4: lambda name, tensor: loader.update({name: tensor.copy()})},
        whole=["w"],
    ) as made:
        made.rebind(have("odd", "w"), together(second, {4: [Parameter("odd")]}))
        made.run()
        made.wait()
    assert np.array_equal(loader["odd"], FULL)
    assert_holds(second, DESTINATION, FULL + 1)
    assert not any(p.array.any() for side in wanted.values() for p in side)


def test_what_cannot_be_rebound_leaves_everything_as_it_was() -> None:
    wanted = want("w", "v")
    flat = {
        r: [Parameter("w", sharded((24,), EIGHT), np.zeros(6, int)), p[1]] for r, p in want("w", "v").items()
    }
    short = {r: [Parameter("w", DESTINATION, np.zeros((3, 2), int)), p[1]] for r, p in want("w", "v").items()}
    with refit(have("w", "v"), wanted) as made:
        for side, said in (
            (
                want("w"),
                "'v', destination side: expected it as it was declared at construction, .*got nothing",
            ),
            (want("w", "v", "x"), "'x', destination side: .*not at all"),
            (room(np.float32, "w", "v"), "'w', destination side: .*int64.*got float32"),
            (flat, "'w', destination side: "),
            (short, r"expected local shape \(2, 3\)"),
            ({0: 5}, "parameters"),
        ):
            with pytest.raises(LayoutError, match=said):
                made.rebind(destination=side)  # type: ignore[arg-type]
            made.run()
            made.wait()
            assert made.verify() == []
        assert_holds(wanted, DESTINATION, FULL)


# --- After close ---

CALLS: dict[str, Callable[[Refit], Any]] = {
    "run": lambda made: made.run(),
    "run a subset": lambda made: made.run(only="w"),
    "wait": lambda made: made.wait(),
    "prepare": lambda made: made.prepare(),
    "prepare a subset": lambda made: made.prepare(["w"]),
    "capture": lambda made: made.capture(),
    "verify": lambda made: made.verify(),
    "rebind": lambda made: made.rebind(),
    "release": lambda made: made.release(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_closed_refit_refuses(call: Callable[[Refit], Any]) -> None:
    made = moved(have("w"), want("w"))
    made.close()
    made.close()
    with pytest.raises(TransportError, match="expected an open refit, got a closed one"):
        call(made)
    assert "closed" in repr(made)
    assert made.report is not None and made.plan.transfers and made.transfers


def test_closing_lets_go_of_the_arrays() -> None:
    def loader(name: str, tensor: Any) -> None: ...

    sides = have("w", "odd"), together(want("w"), {4: [Parameter("odd")]})
    made = refit(*sides, load={4: loader})
    made.prepare("w")
    arrays = [
        weakref.ref(p.array) for side in sides for held in side.values() for p in held if p.array is not None
    ]
    arrays.append(weakref.ref(loader))
    assert len(arrays) == 13
    sides[0].clear()
    sides[1].clear()
    del loader
    gc.collect()
    assert all(ref() is not None for ref in arrays)
    made.close()
    gc.collect()
    assert [ref() for ref in arrays] == [None] * 13


# --- Other options ---

REFUSED: list[tuple[str, Any]] = [
    ("whole", "*"),
    ("whole", 5),
    ("whole", [5]),
    ("bucket_bytes", -5),
    ("bucket_bytes", 0),
    ("bucket_bytes", 1.5),
    ("bucket_bytes", float("nan")),
    ("bucket_bytes", True),
    ("staging_bytes", -1),
    ("staging_bytes", "1"),
    ("chunk_bytes", 0),
    ("chunk_bytes", 1.5),
    ("chunk_bytes", float("nan")),
    ("missing", "ignore"),
    ("missing", True),
    ("method", "x"),
    ("topology", 5),
    ("topology", [[0, 1]]),
    ("load", 5),
]


@pytest.mark.parametrize(("option", "value"), REFUSED)
def test_options_that_cannot_be(option: str, value: Any) -> None:
    sides: tuple[Any, Any] = have("w"), want("w")
    options = {"topology": None} | {option: {4: value} if option == "load" else value}
    with pytest.raises(M2nError, match=option):
        Refit(LocalTransport(8), *sides, **options)


def test_parameters_that_cannot_be() -> None:
    strange: list[Any] = [5, "w", {0: 5}, {0: "w"}, {0: [5]}, {8: []}, {-1: []}, {"0": []}, [Parameter("w")]]
    for side in strange:
        with pytest.raises(LayoutError, match="parameter"):
            Refit(LocalTransport(8), side, want("w"))


def test_parameters_may_come_from_iterators() -> None:
    wanted = want("w", "v")
    made = Refit(LocalTransport(8), {r: iter(p) for r, p in have("w", "v").items()}, wanted)  # type: ignore[misc]
    made.run()
    made.wait()
    assert made.verify() == []
    assert_holds(wanted, DESTINATION, FULL)


def test_a_version_that_is_no_number() -> None:
    made = refit(have("w"), want("w"))
    made.run(version=np.int64(3))  # type: ignore[arg-type]
    made.wait()
    assert made.version == 3
    for version in ("4", 1.5, True):
        made.run(version=version)  # type: ignore[arg-type]
        with pytest.raises(LayoutError, match="whole number as version"):
            made.wait()
        assert made.version is None
    for timeout in (float("nan"), -1, "3"):
        with pytest.raises(TransportError, match="timeout"):
            made.wait(timeout)  # type: ignore[arg-type]


class Late(LocalTransport):
    """A peer that does not come to one exchange: whoever waits for it does so until the limit."""

    def __init__(self, purpose: str) -> None:
        super().__init__(8)
        self.purpose = purpose

    def exchange(self, messages: Any, purpose: str = "", limit: float | None = None) -> list[bytes]:
        self.late = purpose == self.purpose
        return super().exchange(messages, purpose, limit)

    def _gather(self, messages: Any, deadline: float) -> list[bytes]:
        if not self.late:
            return super()._gather(messages, deadline)
        time.sleep(max(0.0, deadline - time.monotonic()))
        raise TransferTimeout("nothing from rank 3")


@pytest.mark.parametrize("seconds", [0.0, 0.3])
def test_wait_keeps_its_limit_whatever_it_does(seconds: float) -> None:
    """In the exchange of the version, and after a loader that took all of it."""
    loaded: list[str] = []

    def load(name: str, tensor: Any) -> None:
        loaded.append(name)
        time.sleep(seconds)

    for wanted in (want("w"), {4: [Parameter("w")]}):
        made = Refit(Late("refit: version"), have("w"), wanted, load={4: load})
        made.run(version=1)
        began = time.monotonic()
        with pytest.raises(TransferTimeout, match="refit: version.* took longer than .*nothing from rank 3"):
            made.wait(timeout=seconds)
        assert time.monotonic() - began < 2 * seconds + 1.0
        assert made.version is None
        with pytest.raises(TransportError, match="refit: version"):  # the transport is broken
            made.run()
    assert loaded == ["w"]


def test_one_rank_gives_its_own() -> None:
    array = np.zeros(6, int)
    one = copies((6,), 0)
    with Refit(LocalTransport(1), [Parameter("w", one, values((6,)))], [Parameter("w", one, array)]) as made:
        made.run()
        made.wait()
    assert np.array_equal(array, values((6,)))


def test_a_plan_error_leaves_nothing_behind() -> None:
    with pytest.raises(PlanError):
        refit(have("w"), needs(sharded((8, 4), EIGHT)))


def test_an_array_that_is_none_is_told_by_its_name() -> None:
    for array in (5, "w", [[1, 2]], np.zeros((2, 3), ">i8"), np.array([{}])):
        with pytest.raises(LayoutError, match="rank 2: parameter 'w': expected"):
            refit({**have("w"), 2: [Parameter("w", SOURCE, array)]}, want("w"))


def test_without_a_transport() -> None:
    with pytest.raises(TransportError, match="expected a Transport as the transport of a refit, got None"):
        Refit(None, have("w"), want("w"))  # type: ignore[arg-type]


def test_arrays_that_are_skipped_are_not_kept() -> None:
    sides = have("w", "odd")
    gone = [weakref.ref(held[1].array) for held in sides.values()]
    made = refit(sides, want("w"), missing="skip")
    sides.clear()
    gc.collect()
    assert [ref() for ref in gone] == [None] * 4
    made.close()
