# SPDX-License-Identifier: Apache-2.0
"""Arrays that split a dimension of their layout: cells cut as little as they must be, values as the oracle has them."""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nccl_m2n import Layout, LocalTransport, Mesh, Replicate, Shard, Transfer, plan
from nccl_m2n.execution.factored import _boxes, _places
from nccl_m2n.layout.fit import factor_shape


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_boxes_are_boxes_in_their_order(factors: list[int], data: st.DataObject) -> None:
    total = math.prod(factors)
    start = data.draw(st.integers(0, total - 1))
    n = data.draw(st.integers(1, total - start))
    index = np.arange(total).reshape(factors)
    for together in (True, False):
        found = []
        for ((extent, offset),) in _places((n,), ((start,), (tuple(factors),))):
            own = slice(len(extent) - len(factors), None)
            box = tuple(slice(o, o + e) for o, e in zip(offset[own], extent[own], strict=True))
            found += index[box].ravel().tolist()
        assert found == list(range(start, start + n))
        runs = _boxes(tuple(factors), start, n, together)
        assert list(itertools.chain(*[range(a, a + k) for a, k in runs])) == list(range(n))
    assert len(_boxes(tuple(factors), start, n, True)) <= 2 * len(factors) - 1


SPLITS = [(24, 5), (4, 6, 5), (2, 12, 5), (4, 2, 3, 5), (24, 5, 1), (8, 3, 5)]


def factored(local: np.ndarray, split: tuple[int, ...], order: int) -> tuple[np.ndarray, np.ndarray]:
    """The local array with its first dimension split as far as it can be, strided; and the memory behind it."""
    rows = split[1:-1]
    if local.shape[0] % math.prod(rows):
        rows = ()
    shape = (local.shape[0] // math.prod(rows), *rows, local.shape[1])
    if order == 0:
        base = np.empty((*shape[:-1], shape[-1] + 2), local.dtype)
        view = base[..., 1:-1]
    else:
        base = np.empty(shape[::-1], local.dtype)
        view = base.T
    view[...] = local.reshape(shape)
    return view, base


@pytest.mark.parametrize("together", [False, True], ids=["apart", "on the same ranks"])
@pytest.mark.parametrize("a", SPLITS)
@pytest.mark.parametrize("b", SPLITS)
@pytest.mark.parametrize("shards", [(1, 1), (2, 3), (3, 2), (4, 5), (5, 2)])
def test_values(a: tuple[int, ...], b: tuple[int, ...], shards: tuple[int, int], together: bool) -> None:
    full = np.arange(120).reshape(24, 5)
    first = 0 if together else shards[0]
    source = Layout((24, 5), Mesh.arange((shards[0],)), [Shard(0)])
    destination = Layout((24, 5), Mesh.arange((shards[1],), start=first), [Shard(0)])
    ranks = max(shards[0], first + shards[1])
    sources = {r: factored(source.slice_global(full, r), a, 0)[0] for r in source.ranks}
    destinations = {r: factored(destination.slice_global(full * 0, r), b, 1)[0] for r in destination.ranks}
    made = plan(Transfer(source, destination, "int64", "w"))
    given_ = ({"w": sources}, {"w": destinations})
    if ranks == 1:
        given_ = ({"w": sources[0]}, {"w": destinations[0]})
    with made.bind(LocalTransport(ranks), *given_) as bound:
        bound.run()
        bound.wait()
    for rank, array in destinations.items():
        wanted = destination.slice_global(full, rank)
        assert np.array_equal(array.reshape(wanted.shape), wanted)


@pytest.mark.parametrize("together", [False, True], ids=["apart", "on the same rank"])
def test_interleaved_columns_of_a_real_size(together: bool) -> None:
    """GPT-OSS: 2880 × 5760 with gate and up columns in turn, kept as [gate; up] of (out, in)."""
    full = np.arange(2880 * 5760, dtype=np.int32).reshape(2880, 5760)
    one = Layout(full.shape, Mesh([0]), [Replicate()])
    other = one if together else Layout(full.shape, Mesh([1]), [Replicate()])
    kept = np.zeros((2, 2880, 2880), np.int32)
    view = kept.swapaxes(0, 2)  # (in, out, 2)
    assert factor_shape(view.shape, full.shape) == ((2880,), (2880, 2))
    made = plan(Transfer(one, other, "int32", "w"))
    given_ = (full, view) if together else ({0: full}, {1: view})
    start = time.process_time()
    with made.bind(LocalTransport(1 if together else 2), {"w": given_[0]}, {"w": given_[1]}) as bound:
        assert time.process_time() - start < 1
        bound.run()
        bound.wait()
    assert np.array_equal(kept[0].T, full[:, ::2])
    assert np.array_equal(kept[1].T, full[:, 1::2])
