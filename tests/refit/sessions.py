# SPDX-License-Identifier: Apache-2.0
"""Short ways to declare both sides of a refit in one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from nccl_m2n import Layout, LocalTransport, Mesh, Parameter, Refit, Replicate, Shard, Topology

Side = dict[int, list[Parameter]]


def sharded(shape: tuple[int, ...], ranks: range, dim: int = 0) -> Layout:
    return Layout(shape, Mesh(list(ranks)), [Shard(dim)])


def copies(shape: tuple[int, ...], *ranks: int) -> Layout:
    return Layout(shape, Mesh(list(ranks)), [Replicate()])


def values(shape: tuple[int, ...], dtype: Any = np.int64, first: int = 1) -> np.ndarray[Any, Any]:
    """Distinct values, as far as the type has them."""
    return np.arange(first, first + int(np.prod(shape))).astype(dtype).reshape(shape)


def holds(layout: Layout, full: np.ndarray[Any, Any], name: str = "w") -> Side:
    """Every rank of a layout with its part of a tensor."""
    return {r: [Parameter(name, layout, layout.slice_global(full, r))] for r in layout.ranks}


def needs(layout: Layout, dtype: Any = np.int64, name: str = "w", fill: Any = 0) -> Side:
    """Every rank of a layout with an array to write."""
    return {r: [Parameter(name, layout, np.full(layout.local_shape(r), fill, dtype))] for r in layout.ranks}


def together(*sides: Side) -> Side:
    """Several parameters of one side."""
    made: Side = {}
    for side in sides:
        for rank, parameters in side.items():
            made.setdefault(rank, []).extend(parameters)
    return made


def refit(source: Side, destination: Side, **options: Any) -> Refit:
    every = [p.layout for side in (source, destination) for held in side.values() for p in held]
    ranks = 1 + max([*source, *destination, *[r for layout in every if layout for r in layout.ranks]])
    return Refit(LocalTransport(ranks), source, destination, Topology.regular(ranks, 4), **options)


def moved(source: Side, destination: Side, **options: Any) -> Refit:
    """Run once, verified."""
    made = refit(source, destination, **options)
    made.run()
    made.wait(timeout=30)
    assert made.verify() == []
    return made


def assert_holds(
    side: Mapping[int, list[Parameter]], layout: Layout, full: np.ndarray[Any, Any], name: str = "w"
) -> None:
    """Bit for bit."""
    for rank in layout.ranks:
        (array,) = (p.array for p in side[rank] if p.name == name)
        wanted = layout.slice_global(full, rank)
        assert array is not None
        assert array.dtype == wanted.dtype
        assert array.tobytes() == wanted.tobytes(), f"rank {rank}: {array} instead of {wanted}"
