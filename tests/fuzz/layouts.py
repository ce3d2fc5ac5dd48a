# SPDX-License-Identifier: Apache-2.0
"""Random layouts, each with what every rank holds of it told by lists of indices (`tests.naive`).

Nothing here asks the package who holds what: the package is handed the description only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from random import Random

import numpy as np
import numpy.typing as npt

from nccl_m2n import Box, Layout, Mesh, Piece, Placement, Replicate, Segment, Shard, StridedShard
from tests import naive

Shape = tuple[int, ...]
Ints = npt.NDArray[np.int64]
Flat = tuple[Ints, Ints | None]  # numbers of elements in the whole tensor, and in the local array if not all

NDIMS = (2, 2, 2, 1, 1, 3, 3, 3, 0, 4, 4, 5, 6, 7, 8)
EXTENTS = (1, 2, 3, 4, 5, 6, 7)
MAX_ELEMENTS = 300
LONG = 1 << 15  # elements of the few tensors that are long enough to be sent in several flows


@dataclass(frozen=True, eq=False)
class Drawn:
    """A layout and what it means."""

    layout: Layout
    local_shapes: dict[int, Shape]
    held: dict[int, list[tuple[list[list[int]], Shape]]] = field(repr=False)  # indices by dimension, offset

    @property
    def shape(self) -> Shape:
        """The whole tensor's."""
        return self.layout.shape

    @property
    def ranks(self) -> Sequence[int]:
        """All ranks of the layout."""
        return list(self.local_shapes)

    @property
    def even(self) -> bool:
        """Whether all local arrays are equally large, so that `reshard` can tell the whole shape."""
        return len(set(self.local_shapes.values())) == 1

    @cached_property
    def flat(self) -> dict[int, list[Flat]]:
        """For each rank, which elements of the flattened whole tensor go where in the flattened local one."""
        return {
            rank: [self._flat(local, *part) for part in self.held[rank]]
            for rank, local in self.local_shapes.items()
        }

    def _flat(self, local: Shape, indices: list[list[int]], offset: Shape) -> Flat:
        taken = _numbers(indices, self.shape)
        if tuple(map(len, indices)) == local:
            return taken, None
        places = [[i + o for i in range(len(dim))] for dim, o in zip(indices, offset, strict=True)]
        return taken, _numbers(places, local)


def _numbers(indices: list[list[int]], shape: Shape) -> Ints:
    """Row-major numbers of the elements of a product of index lists."""
    numbers = np.zeros(1, np.int64)
    for dim, extent in zip(indices, shape, strict=True):
        numbers = (numbers[:, None] * extent + np.array(dim, np.int64)).reshape(-1)
    return numbers


def draw_shape(rng: Random) -> Shape:
    """Mostly small; some long, some empty."""
    ndim, chance = rng.choice(NDIMS), rng.random()
    if chance < 0.01 and ndim:
        shape = [rng.choice((1, 2, 3)) for _ in range(min(ndim, 3) - 1)]
        shape.insert(rng.randrange(len(shape) + 1), rng.randrange(LONG // 8, LONG))
        return tuple(shape)
    shape, total = [], 1
    for _ in range(ndim):
        extent = rng.choice(EXTENTS) if chance < 0.9 or ndim > 3 else rng.randrange(1, 60)
        shape.append(extent if total * extent <= MAX_ELEMENTS else 1)
        total *= shape[-1]
    rng.shuffle(shape)
    if shape and rng.random() < 0.03:
        shape[rng.randrange(ndim)] = 0
    return tuple(shape)


def draw_sides(rng: Random, shape: Shape, ranks: int, *, meshes_only: bool = False) -> tuple[Drawn, Drawn]:
    """A source and a destination layout: on the same ranks, on others, or on any."""
    order, how = rng.sample(range(ranks), ranks), rng.random()
    if how < 0.25 or ranks == 1:
        first = order[: rng.randint(1, ranks)]
        second = rng.sample(first, len(first))
    elif how < 0.6:
        at = rng.randint(1, ranks - 1)
        first, second = order[:at], order[at:]
    else:
        first, second = (rng.sample(order, rng.randint(1, ranks)) for _ in range(2))
    if rng.random() < 0.15:  # one rank alone on a side
        first, second = rng.choice(((first[:1], second), (first, second[:1])))
    return draw_layout(rng, shape, first, meshes_only), draw_layout(rng, shape, second, meshes_only)


def draw_layout(rng: Random, shape: Shape, ranks: list[int], mesh_only: bool = False) -> Drawn:
    """On some of `ranks`: shards of a mesh, or user-made pieces."""
    if mesh_only or rng.random() < 0.8:
        return _draw_mesh_layout(rng, shape, ranks)
    return _draw_pieces(rng, shape, ranks)


def _draw_mesh_layout(rng: Random, shape: Shape, ranks: list[int]) -> Drawn:
    axes = _draw_axes(rng, len(ranks))
    mesh = Mesh(np.array(ranks[: math.prod(axes)]).reshape(axes))
    placements = tuple(_draw_placement(rng, shape, n) for n in axes)
    everyone = itertools.product(*map(range, axes))
    held = {
        rank: naive.indices(shape, axes, placements, at)
        for rank, at in zip(mesh.ranks, everyone, strict=True)
    }
    zero = (0,) * len(shape)
    return Drawn(
        Layout(shape, mesh, placements),
        {rank: tuple(map(len, indices)) for rank, indices in held.items()},
        {rank: [(indices, zero)] for rank, indices in held.items()},
    )


def _draw_axes(rng: Random, ranks: int) -> tuple[int, ...]:
    axes: list[int] = []
    for _ in range(rng.choice((1, 1, 2, 2, 3, 4, 0))):
        left = ranks // math.prod(axes)
        axes.append(left if rng.random() < 0.5 else rng.randint(1, left))
    rng.shuffle(axes)
    return tuple(axes)


def _draw_placement(rng: Random, shape: Shape, ranks: int) -> Placement:
    kind = rng.choice("SSSFTR") if shape else "R"
    if kind == "R":
        return Replicate()
    dim = rng.randrange(len(shape))
    told = dim - len(shape) if rng.random() < 0.2 else dim
    if kind == "T":
        return StridedShard(told, split_factor=rng.randint(1, 5))
    return Shard(told, _draw_segments(rng, shape[dim], ranks) if kind == "F" else ())


def _draw_segments(rng: Random, extent: int, ranks: int) -> tuple[Segment, ...]:
    ends = sorted(rng.randint(0, extent) for _ in range(rng.randint(0, 3)))
    parts = [n for n in range(1, 10) if n > ranks or ranks % n == 0]
    return tuple(
        Segment(b - a, rng.choice(parts) if rng.random() < 0.4 else None)
        for a, b in itertools.pairwise([0, *ends, extent])
    )


def _draw_boxes(rng: Random, shape: Shape) -> list[Box]:
    """Boxes that together hold the whole tensor: cut in two, time and again."""
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(rng.randint(0, 5)):
        box = boxes.pop(rng.randrange(len(boxes)))
        dims = [d for d, n in enumerate(box.shape) if n > 1]
        if not dims:
            return [*boxes, box]
        d = rng.choice(dims)
        at = rng.randint(box.start[d] + 1, box.stop[d] - 1)
        boxes += [
            Box(box.start, (*box.stop[:d], at, *box.stop[d + 1 :])),
            Box((*box.start[:d], at, *box.start[d + 1 :]), box.stop),
        ]
    return boxes


def _draw_pieces(rng: Random, shape: Shape, ranks: list[int]) -> Drawn:
    """Pieces that leave no hole; some on several ranks or twice on one; local arrays with room to spare."""
    boxes = _draw_boxes(rng, shape) + _draw_boxes(rng, shape)[: rng.choice((0, 0, 1, 2))]
    rng.shuffle(boxes)
    ranks = ranks[: rng.randint(1, len(ranks))]
    pieces: dict[int, list[Piece]] = {rank: [] for rank in ranks}
    need = {rank: [0] * len(shape) for rank in ranks}
    for box in boxes:
        owners = rng.sample(ranks, min(rng.choice((1, 1, 2, 3)), len(ranks)))
        for rank in owners:
            if not shape and pieces[rank]:
                continue
            gaps = [rng.choice((0, 0, 0, 1, 2)) for _ in shape]
            offset = tuple(gaps) if not pieces[rank] else (need[rank][0] + gaps[0], *gaps[1:])
            pieces[rank].append(Piece(box, offset))
            need[rank] = [max(n, o + e) for n, o, e in zip(need[rank], offset, box.shape, strict=True)]
    spare = {rank: [n + rng.choice((0, 0, 1)) for n in need[rank]] for rank in ranks}
    local = {rank: tuple(spare[rank]) if rng.random() < 0.3 else tuple(need[rank]) for rank in ranks}
    return Drawn(
        Layout.from_pieces(shape, pieces, {r: s for r, s in local.items() if s != tuple(need[r])}),
        local,
        {rank: [(_spelled_out(p.box), p.offset) for p in held] for rank, held in pieces.items()},
    )


def _spelled_out(box: Box) -> list[list[int]]:
    return [list(range(a, b)) for a, b in zip(box.start, box.stop, strict=True)]
