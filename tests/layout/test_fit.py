# SPDX-License-Identifier: Apache-2.0
"""Whether an array's shape fits a local shape: against every way of grouping its dimensions, over all small shapes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest

from nccl_m2n import Layout, LayoutError, LocalTransport, Mesh, Replicate, Shard, Transfer, plan
from nccl_m2n.errors import CommandError
from nccl_m2n.execution.factored import fit_view
from nccl_m2n.execution.memory import as_array
from nccl_m2n.execution.views import view_array
from nccl_m2n.layout.fit import factor_shape
from nccl_m2n.models import Manifest
from nccl_m2n.sharding import Parallelism, Rule
from nccl_m2n.sharding.model_layouts import ModelLayouts
from nccl_m2n.storage.declare import RankViews

SHAPES = [shape for ndim in range(5) for shape in itertools.product(range(5), repeat=ndim)]


def local_shapes(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The naive twin: every local shape of at most 4 dimensions that dimensions, grouped in their order, make up."""
    for ndim in range(5):
        for cuts in itertools.combinations_with_replacement(range(len(shape) + 1), max(0, ndim - 1)):
            ends = [0, *cuts, len(shape)]
            if ndim or not shape:
                yield tuple(math.prod(shape[a:b]) for a, b in itertools.pairwise(ends))[:ndim]


def test_every_small_shape() -> None:
    fitting = 0
    for shape in SHAPES:
        wanted = set(local_shapes(shape))
        for local in SHAPES:
            factors = factor_shape.__wrapped__(shape, local)
            assert (factors is not None) == (local in wanted), (shape, local)
            if factors is None:
                continue
            fitting += 1
            assert tuple(map(math.prod, factors)) == local
            assert all(1 not in group or group == (1,) for group in factors), (shape, local)
    assert fitting > 5000


@pytest.mark.parametrize("order", ["C", "F"])
def test_the_same_elements_in_the_same_order(order: str) -> None:
    """A view that fits is what NumPy makes of it by copying, whatever the strides."""
    tried = 0
    for shape in SHAPES:
        base = np.zeros([2 * n + 1 for n in shape], "int16", order)
        array = base[(*(slice(1, 2 * n + 1, 2) for n in shape), ...)]
        array[...] = np.arange(array.size).reshape(shape)
        for local in {one for one in local_shapes(shape) if max(one, default=0) < 50}:
            found = fit_view(view_array(array), local)
            assert found is not None
            seen = as_array(found[0])
            assert np.array_equal(seen.reshape(local), array.reshape(local)), (shape, local)
            assert sum(map(len, found[1])) == seen.ndim
            tried += 1
    assert tried > 5000


FLAT = Layout((6, 4), Mesh.arange((4,)), [Shard(1)])  # a column each: local shape (6, 1)
WHOLE = Layout((6, 4), Mesh([4]), [Replicate()])
VALUES = np.arange(24, dtype="int32").reshape(6, 4)


@pytest.mark.parametrize("shape", [(6,), (6, 1), (1, 6), (1, 6, 1), (2, 3), (2, 3, 1), (3, 1, 2, 1)])
@pytest.mark.parametrize("back", [False, True], ids=["there", "back"])
def test_columns_given_flat_or_split(shape: tuple[int, ...], back: bool) -> None:
    source, destination = (WHOLE, FLAT) if back else (FLAT, WHOLE)
    columns = {
        r: np.ascontiguousarray(VALUES[:, r] if not back else VALUES[:, r] * 0).reshape(shape)
        for r in range(4)
    }
    whole = {4: VALUES.copy() if back else VALUES * 0}
    given = (whole, columns) if back else (columns, whole)
    made = plan(Transfer(source, destination, "int32", "w"))
    with made.bind(LocalTransport(5), {"w": given[0]}, {"w": given[1]}) as bound:
        bound.run()
    assert np.array_equal(whole[4], VALUES)
    for r, column in columns.items():
        assert np.array_equal(column.ravel(), VALUES[:, r])


@pytest.mark.parametrize("shape", [(5,), (7,), (3, 3), (4, 2), (24,), (6, 0), (6, 2, 1), (1, 1, 1)])
def test_a_shape_that_does_not_fit(shape: tuple[int, ...]) -> None:
    given = {"w": {r: np.zeros(shape if r == 2 else (6, 1), "int32") for r in range(4)}}
    with pytest.raises(
        LayoutError, match=r"rank 2: tensor 'w'.*expected local shape \(6, 1\) as .* has it, got"
    ):
        plan(Transfer(FLAT, WHOLE, "int32", "w")).bind(LocalTransport(5), given, {"w": {4: VALUES.copy()}})


def test_more_dimensions_than_there_can_be() -> None:
    layout = Layout((1,) * 7 + (256,), Mesh([0]), [Replicate()])
    given = {"w": {0: np.zeros((2,) * 8, "int8")}}
    with pytest.raises(LayoutError, match=r"expected local shape \(1, 1, 1, 1, 1, 1, 1, 256\)"):
        plan(Transfer(layout, layout, "int8", "w")).bind(LocalTransport(1), given, given)


@pytest.mark.parametrize(("shape", "fits"), [((6,), True), ((6, 1), True), ((2, 3, 1), True), ((3,), False)])
def test_storage_asks_the_same(shape: tuple[int, ...], fits: bool) -> None:
    side = ModelLayouts(Manifest({"w": ((6, 1), "float32")}), Parallelism(), rules=[Rule("*")])
    declared = RankViews(side, 0)
    if fits:
        declared.add("w", np.zeros(shape), "stored")
    else:
        with pytest.raises(CommandError, match=r"stored on rank 0: expected \(6, 1\) for w"):
            declared.add("w", np.zeros(shape), "stored")
