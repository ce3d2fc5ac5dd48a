# SPDX-License-Identifier: Apache-2.0
"""Plans carried out byte by byte."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nccl_m2n import Box, Layout, Mesh, Shard, Topology, Transfer, plan
from tests import strategies
from tests.planning import replay
from tests.scenarios import SCENARIOS, Scenario

METHODS = ["reshard", "direct", "gather_broadcast"]
DTYPES = ["uint8", "int16", "float32", "complex64", "complex128", "bfloat16", "float8_e4m3fn", "V3", "V48"]


@st.composite
def topologies(draw: st.DrawFn, universe: int = 24) -> Topology | None:
    """Domains of any sizes, with ranks in any order; or one that holds all."""
    if draw(st.integers(0, 4)) == 4:
        return None
    order = draw(st.permutations(range(universe)))
    cuts = sorted(draw(st.sets(st.integers(1, universe - 1), min_size=1, max_size=8)))
    return Topology([order[a:b] for a, b in itertools.pairwise([0, *cuts, universe])])


@st.composite
def transfers(draw: st.DrawFn, universe: int = 24) -> list[Transfer]:
    """A few transfers, some with equal layouts."""
    made = []
    for i in range(draw(st.integers(1, 4))):
        dtype = draw(st.sampled_from(DTYPES))
        if made and draw(st.booleans()):
            source, destination = made[-1].source, made[-1].destination
        else:
            shape = draw(strategies.shapes(max_ndim=4, elements=400))
            source, destination = (draw(strategies.layouts(shape, universe)) for _ in range(2))
        made.append(Transfer(source, destination, dtype, f"t{i}"))
    return made


def row(*ranks: int) -> Layout:
    """Four elements, sharded."""
    return Layout((4,), Mesh(ranks), [Shard(0)])


# Held twice by a source, which packed it twice.
TWICE = Layout.from_pieces((4,), {0: [Box((0,), (4,)), Box((0,), (4,))]})
# All that the root of gather+broadcast has, it needs itself: a flow without a hop.
ROOTED = Layout.from_pieces((4,), {0: [Box((0,), (1,))], 1: [Box((1,), (4,))]})


@settings(max_examples=120)
@example([Transfer(TWICE, row(1, 2), "int16")], None, "reshard", None, 1)
@example([Transfer(ROOTED, row(0), "int16")], None, "gather_broadcast", None, 1)
@example([Transfer(row(0), row(0), "int16")], None, "gather_broadcast", 16, 1)
@given(
    transfers(),
    topologies(),
    st.sampled_from(METHODS),
    st.sampled_from([None, None, 1, 16, 100, 5000]),
    st.sampled_from([1, 1000, 256 << 20]),
)
def test_any(made, topology, method, chunk_bytes, staging_bytes) -> None:
    replay.check(plan(made, topology, method=method, chunk_bytes=chunk_bytes, staging_bytes=staging_bytes))


SMALL = [s for s in SCENARIOS if sum(math.prod(t.source.shape) for t in s.tensors) <= 20000]


@pytest.mark.parametrize("scenario", SMALL, ids=str)
def test_scenario(scenario: Scenario) -> None:
    """The scenarios of all transports, to the byte."""
    replay.check(scenario.plan())
    replay.check(scenario.plan(method="direct"))
