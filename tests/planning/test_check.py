# SPDX-License-Identifier: Apache-2.0
"""`Plan.check` finds what is wrong with a plan, and says where."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from nccl_m2n import Layout, Mesh, Plan, PlanError, Replicate, Shard, Topology, Transfer, plan
from nccl_m2n.planning.routes import Routes


def whole() -> Plan:
    """Two row shards to two replicas: flows 0 → 2 → 3 and 1 → 3 → 2."""
    source = Layout((64, 1024), Mesh([0, 1]), [Shard(0)])
    destination = Layout((64, 1024), Mesh([2, 3]), [Replicate()])
    made = plan(Transfer(source, destination, "float32", "w"), Topology.regular(4, 2))
    assert made.hops[["flow", "source", "destination"]].tolist() == [
        (0, 0, 2),
        (0, 2, 3),
        (1, 1, 3),
        (1, 3, 2),
    ]
    return made


def damaged(change, made: Plan | None = None) -> Plan:
    made = whole() if made is None else made
    flows, hops = made.flows.copy(), made.hops.copy()
    found = change(flows, hops)
    return dataclasses.replace(made, routes=Routes(flows, hops) if found is None else Routes(*found))


def set_flow(field: str, value: int, row: int = 0):
    def change(flows: np.ndarray, hops: np.ndarray) -> None:
        flows[field][row] = value

    return change


def set_hop(row: int, **values: int):
    def change(flows: np.ndarray, hops: np.ndarray) -> None:
        for field, value in values.items():
            hops[field][row] = value

    return change


def without_hops(*rows: int):
    return lambda flows, hops: (flows, np.delete(hops, rows))


def with_hop_twice(row: int):
    return lambda flows, hops: (flows, np.insert(hops, row, hops[row]))


WHERE = r"tensor 'w', box \[0:32, 0:1024\], rank"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_flow("sender", 1), rf"{WHERE} 1: sends what it does not hold"),
        (set_flow("start", 8), rf"{WHERE} 0: is cut at a wrong place"),
        (set_flow("stop", 40), rf"{WHERE} 0: is cut at a wrong place"),
        (set_flow("start", 32 * 4096), r"rank 0: is cut at a wrong place"),
        (set_flow("start", 16), rf"{WHERE} 2: is not received exactly once"),
        (set_flow("stop", 16), rf"{WHERE} 2: is not received exactly once"),
        (set_hop(0, source=1), rf"{WHERE} 1: passes on what has not arrived"),
        (set_hop(1, depth=0), rf"{WHERE} 2: passes on what has not arrived"),
        (set_hop(1, depth=2), rf"{WHERE} 2: passes on what has not arrived"),
        (without_hops(0), rf"{WHERE} 2: passes on what has not arrived"),
        (without_hops(1), rf"{WHERE} 3: is never received"),
        (with_hop_twice(1), rf"{WHERE} 3: receives it twice"),
        (set_hop(0, network=0), r"expected hops between domains, and no others, to be marked as network"),
        (set_hop(1, network=1), r"expected hops between domains, and no others, to be marked as network"),
        (
            set_hop(1, source=0, depth=0, network=1),
            r"expected 262144 network bytes, the least there can be, got 393216",
        ),
    ],
)
def test_a_damaged_plan(change, message: str) -> None:
    whole().check()
    with pytest.raises(PlanError, match=message):
        damaged(change).check()


def test_the_second_tensor_of_a_stream_is_named() -> None:
    source, destination = (Layout((4, 4), Mesh([rank]), [Replicate()]) for rank in (0, 1))
    made = plan([Transfer(source, destination, "int8", name) for name in ("a", "b")])
    made.check()
    with pytest.raises(PlanError, match=r"tensor 'b', box \[0:4, 0:4\], rank 0: is cut at a wrong place"):
        damaged(set_flow("start", 24), made).check()


def test_cells_that_do_not_cover() -> None:
    made = whole()
    template = made.bundles.templates[0]
    fewer = dataclasses.replace(template.cells, start=template.cells.start + [1, 0])
    bundles = dataclasses.replace(made.bundles, templates=(dataclasses.replace(template, cells=fewer),))
    with pytest.raises(PlanError, match=r"tensor 'w': expected cells of 65536 elements, got 63488"):
        dataclasses.replace(made, bundles=bundles).check()
