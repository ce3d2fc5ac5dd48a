# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies: layouts as users may write them, larger than the exhaustive tests go."""

from __future__ import annotations

import itertools
import math

from hypothesis import strategies as st

from nccl_m2n import Box, Layout, Mesh, Piece, Placement, Replicate, Segment, Shard, StridedShard


@st.composite
def shapes(draw: st.DrawFn, max_ndim: int = 8, elements: int = 3000) -> tuple[int, ...]:
    """Shapes of about that many elements at most: tests list every one of them."""
    ndim = draw(st.sampled_from([n for n in (1, 2, 2, 3, 3, 0, 4, 5, 6, 7, 8) if n <= max_ndim]))
    made: list[int] = []
    for _ in range(ndim):
        limit = max(2, min(40, elements // math.prod(made)))
        made.append(draw(st.sampled_from(range(1, limit + 1))))  # `integers` would draw mostly ones
    if made and draw(st.integers(0, 15)) == 15:
        made[-1] = 0
    return tuple(draw(st.permutations(made)))


@st.composite
def meshes(draw: st.DrawFn, universe: int = 24, max_size: int = 24) -> Mesh:
    """Any distinct ranks below `universe`, in any order, on up to four axes."""
    shape: list[int] = []
    for _ in range(draw(st.sampled_from((1, 2, 2, 3, 4, 0)))):
        limit = max(1, min(8, max_size // math.prod(shape), universe // math.prod(shape)))
        shape.append(draw(st.sampled_from([n for n in (2, 3, 4, 1, 5, 6, 7, 8) if n <= limit])))
    ranks = draw(st.permutations(range(universe)))[: math.prod(shape)]
    return Mesh(_nested(ranks, shape))


def _nested(ranks: list[int], shape: list[int]) -> object:
    if not shape:
        return ranks[0]
    step = len(ranks) // shape[0]
    return [_nested(ranks[i * step : (i + 1) * step], shape[1:]) for i in range(shape[0])]


@st.composite
def segments(draw: st.DrawFn, extent: int, ranks: int) -> tuple[Segment, ...]:
    ends = sorted(draw(st.lists(st.integers(0, extent), max_size=4)))
    parts = st.one_of(st.none(), st.sampled_from([n for n in range(1, 30) if n > ranks or ranks % n == 0]))
    return tuple(Segment(b - a, draw(parts)) for a, b in itertools.pairwise([0, *ends, extent]))


@st.composite
def placements(draw: st.DrawFn, shape: tuple[int, ...], ranks: int) -> Placement:
    kind = draw(st.sampled_from("SFTR" if shape else "R"))
    if kind == "R":
        return Replicate()
    dim = draw(st.integers(0, len(shape) - 1))
    if kind == "T":
        return StridedShard(dim, split_factor=draw(st.integers(1, 9)))
    return Shard(dim, draw(segments(shape[dim], ranks)) if kind == "F" else ())


@st.composite
def mesh_layouts(
    draw: st.DrawFn, shape: tuple[int, ...] | None = None, universe: int = 24, max_size: int = 24
) -> Layout:
    """Any mesh layout, of `shape` where it is given."""
    if shape is None:
        shape = draw(shapes())
    mesh = draw(meshes(universe, max_size))
    return Layout(shape, mesh, [draw(placements(shape, n)) for n in mesh.shape])


@st.composite
def _boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Boxes that hold the whole tensor: cut in two, time and again."""
    whole = [Box((0,) * len(shape), shape)] if math.prod(shape) else []
    for _ in range(draw(st.integers(0, 6)) if whole else 0):
        box = whole.pop(draw(st.integers(0, len(whole) - 1)))
        dims = [d for d, n in enumerate(box.shape) if n > 1]
        if not dims:
            return [*whole, box]
        d = draw(st.sampled_from(dims))
        at = draw(st.integers(box.start[d] + 1, box.stop[d] - 1))
        whole += [
            Box(box.start, (*box.stop[:d], at, *box.stop[d + 1 :])),
            Box((*box.start[:d], at, *box.start[d + 1 :]), box.stop),
        ]
    return whole


@st.composite
def piece_layouts(
    draw: st.DrawFn, shape: tuple[int, ...] | None = None, universe: int = 8, twice: bool = True
) -> Layout:
    """User-made pieces that leave no hole: some twice on different ranks, and (`twice`) on one rank.

    Local arrays are longer than they need be: pieces lie one after another along dimension 0 (or,
    for a scalar, one a rank), with gaps.
    """
    if shape is None:
        shape = draw(shapes(max_ndim=4))
    tiling = draw(_boxes(shape))
    extra = draw(_boxes(shape))[:3]  # another tiling's: they overlap the first's in part
    pieces: dict[int, list[Box | Piece]] = {rank: [] for rank in draw(meshes(universe, 6)).ranks}
    for box in draw(st.permutations(tiling + extra)):
        owners = sorted(draw(st.sets(st.sampled_from(sorted(pieces)), min_size=1, max_size=3)))
        for rank in owners:
            held = [p.box for p in pieces[rank]]
            if held and (not shape or (not twice and any(box.intersect(other) for other in held))):
                continue
            end = max((p.offset[0] + p.box.shape[0] for p in pieces[rank] if shape), default=0)
            offset = tuple(draw(st.integers(0, 2)) for _ in shape)
            pieces[rank].append(Piece(box, (end + offset[0], *offset[1:]) if shape else ()))
    return Layout.from_pieces(shape, pieces)


def layouts(shape: tuple[int, ...], universe: int = 24) -> st.SearchStrategy[Layout]:
    """A mesh layout or user-made pieces, of `shape`."""
    return st.one_of(
        mesh_layouts(shape, universe), mesh_layouts(shape, universe), piece_layouts(shape, universe)
    )
