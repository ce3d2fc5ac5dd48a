# SPDX-License-Identifier: Apache-2.0
"""The conventional path: full tensors in buckets, to a loader or into the arrays after all."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nccl_m2n import LayoutError, LocalTransport, M2nError, Parameter, Refit, Topology, Transfer
from nccl_m2n.refit.broadcast import fill_buckets

from .sessions import Side, assert_holds, copies, holds, moved, needs, refit, sharded, together, values
from .test_families import DESTINATIONS, SOURCES, side

METHODS = ["reshard", "gather_broadcast"]
FOUR, EIGHT = range(4), range(4, 8)


class Loader:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.got: dict[str, np.ndarray[Any, Any]] = {}
        self.addresses: set[int] = set()

    def __call__(self, name: str, tensor: Any) -> None:
        self.addresses.add(tensor.__array_interface__["data"][0])
        self.got[name] = tensor.copy()


def whole(names: list[str], ranks: range, dtype: str | None = None) -> Side:
    return {r: [Parameter(name, dtype=dtype) for name in names] for r in ranks}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bucket_bytes", [1, 700, 1 << 20])
def test_what_has_no_layout_is_loaded(method: str, bucket_bytes: int) -> None:
    tensors = {f"t{i}": values((5 + i, 3), np.int32, 100 * i) for i in range(6)}
    sources = [
        holds(sharded(full.shape, FOUR, i % 2), full, n) for i, (n, full) in enumerate(tensors.items())
    ]
    loaders = {r: Loader() for r in EIGHT}
    made = refit(
        together(*sources),
        whole(list(tensors), EIGHT),
        load=loaders,
        bucket_bytes=bucket_bytes,
        method=method,
    )
    assert all(not loader.got for loader in loaders.values())
    for turn in (1, 2):
        made.run(version=turn)
        assert made.version is None
        made.wait(timeout=30)
        assert made.version == turn
        for loader in loaders.values():
            assert list(loader.got) == list(tensors)
            for name, full in tensors.items():
                assert np.array_equal(loader.got[name], full)
                assert loader.got[name].dtype == full.dtype
            loader.got.clear()
    if bucket_bytes == 1:
        assert all(len(loader.addresses) == 1 for loader in loaders.values())  # one buffer, used again
    assert made.report.share == 0.0
    made.close()


def test_both_ways_in_one_refit() -> None:
    full, odd = values((8, 3)), values((9, 2), np.float32)
    loader, destination = Loader(), sharded((8, 3), EIGHT)
    wanted = together(needs(destination), whole(["odd"], range(5, 6)))
    have = together(holds(sharded((8, 3), FOUR), full), holds(sharded((9, 2), FOUR, 1), odd, "odd"))
    made = moved(have, wanted, load={5: loader})
    assert_holds(wanted, destination, full)
    assert np.array_equal(loader.got["odd"], odd)
    assert made.report.share == full.nbytes / (full.nbytes + odd.nbytes)
    assert [t.name for t in made.transfers] == ["w", "odd"]
    loader.got.clear()
    made.run(only="w")
    made.wait()
    assert loader.got == {}
    made.run(only="odd")
    made.wait()
    assert list(loader.got) == ["odd"]


def test_a_run_delivers_before_the_next_one() -> None:
    have, loader = holds(sharded((8, 3), FOUR), values((8, 3))), Loader()
    made = refit(have, whole(["w"], range(4, 5)), load={4: loader})
    made.run()
    assert loader.got == {}
    made.run()
    assert np.array_equal(loader.got.pop("w"), values((8, 3)))
    made.wait()
    assert np.array_equal(loader.got.pop("w"), values((8, 3)))


def test_a_type_of_its_own_for_the_loader() -> None:
    full = (values((8, 3), np.float32) / 3).astype(np.float32)
    loader = Loader()
    moved(
        holds(sharded((8, 3), FOUR), full), whole(["w"], range(4, 5), "bfloat16"), load={4: loader}, cast=True
    )
    assert np.array_equal(loader.got["w"], full.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["moe", "mla"])
def test_a_whole_model_the_conventional_way(family: str, method: str) -> None:
    """Every tensor has a layout, and still goes as a whole, in buckets: the baseline."""
    trainer, _ = side(family, SOURCES["megatron tp2 pp2 ep2"], 0)
    generator, expected = side(family, DESTINATIONS["vllm tp4 dp2, experts parallel"], 8)
    for state in generator.states.values():
        for array in state.values():
            array.fill(-1)
    both = trainer.parameters, generator.parameters
    with Refit(
        LocalTransport(16), *both, Topology.regular(16, 4), whole=["*"], bucket_bytes=20_000, method=method
    ) as made:
        assert len(made.verify()) > 100
        made.run(version=1)
        made.wait(timeout=30)
        assert made.verify() == []
        assert made.report.share == 0.0
        if method == "gather_broadcast":
            assert made.report.network_bytes > made.report.network_bytes_bound
    for rank, state in expected.items():
        for name, array in state.items():
            assert array.tobytes() == generator.states[rank][name].tobytes(), f"{name} on rank {rank}"


def test_some_names_the_conventional_way() -> None:
    full, destination = values((8, 3)), sharded((8, 3), EIGHT)
    names = ["a.weight", "b.weight", "b.bias"]
    wanted = together(*[needs(destination, name=n) for n in names])
    have = together(*[holds(sharded((8, 3), FOUR), full, n) for n in names])
    made = moved(have, wanted, whole=["b.*"])
    assert made.report.share == pytest.approx(1 / 3)
    for name in names:
        assert_holds(wanted, destination, full, name)


def test_a_loader_that_fails_is_heard_of_everywhere() -> None:
    def load(name: str, tensor: Any) -> None:
        raise ValueError(f"no room for {name}")

    loader = Loader()
    made = refit(
        holds(sharded((8, 3), FOUR), values((8, 3))), whole(["w"], EIGHT[:2]), load={4: load, 5: loader}
    )
    made.run(version=1)
    with pytest.raises(M2nError, match="rank 4: .*no room for w"):
        made.wait()
    assert made.version is None
    assert list(loader.got) == ["w"]  # its peers went on


def test_what_is_refused() -> None:
    have = holds(sharded((8, 3), FOUR), values((8, 3)))
    with pytest.raises(
        LayoutError, match="'w' has no layout on the destination side: expected load=.*rank 4"
    ):
        refit(have, whole(["w"], EIGHT))
    with pytest.raises(LayoutError, match="rank 6"):
        refit(have, whole(["w"], EIGHT), load={r: Loader() for r in (4, 5, 7)})
    with pytest.raises(LayoutError, match="load to be a mapping from rank"):
        refit(have, whole(["w"], EIGHT), load=Loader())
    with pytest.raises(LayoutError, match="'w': expected a layout for its array"):
        refit(have, {4: [Parameter("w", array=np.zeros(3))]}, load={4: Loader()})
    with pytest.raises(LayoutError, match="'w': expected a layout on the source side"):
        refit({0: [Parameter("w", dtype="int64")]}, needs(sharded((8, 3), EIGHT)))


def test_an_array_that_cannot_take_its_part_is_refused_before_anything_moves() -> None:
    destination = sharded((8, 3), EIGHT)
    have, read_only = holds(sharded((8, 3), FOUR), values((8, 3))), np.zeros((2, 3), int)
    read_only.flags.writeable = False
    for array, said in (
        (None, "expected one of local shape .*, got none"),
        (np.zeros((3, 2), int), "expected local shape"),
        (read_only, "expected a writable array"),
    ):
        wanted = {**needs(destination), 5: [Parameter("w", destination, array)]}
        with pytest.raises(LayoutError, match=f"rank 5: tensor 'w', destination array: {said}"):
            refit(have, wanted, whole=["*"])
        made = moved(have, needs(destination), whole=["*"])
        with pytest.raises(LayoutError, match="rank 5: "):
            made.rebind(destination=wanted)
        made.run()
        made.wait()
        assert made.verify() == []


def test_buckets() -> None:
    def tensor(rows: int) -> Transfer:
        return Transfer(copies((rows,), 0), copies((rows,), 1), "int8", f"t{rows}")

    tensors = [tensor(n) for n in (256, 200, 700, 1, 2000, 3)]
    assert [[t.shape[0] for t in b] for b in fill_buckets(tensors, 1024)] == [
        [256, 200],
        [700, 1],
        [2000],
        [3],
    ]
    assert fill_buckets([], 1024) == []
    assert fill_buckets([tensor(0)], 1024) == [[tensor(0)]]


def test_buckets_share_their_memory() -> None:
    full = values((64, 40), np.int32)
    have = together(*[holds(sharded(full.shape, FOUR, 1), full, f"t{i}") for i in range(9)])
    made = refit(
        have, whole([f"t{i}" for i in range(9)], EIGHT), load={r: Loader() for r in EIGHT}, bucket_bytes=1
    )
    broadcast = made._subsets.all.moving.broadcast
    assert len(broadcast.bounds) == 9
    assert len({id(bound._executor._staging) for bound in broadcast.bounds}) == 1
    blocks = broadcast.bounds[0]._executor._staging._blocks
    assert all(len(held) == 1 for held in blocks.values())
