# SPDX-License-Identifier: Apache-2.0
"""Twins of the package's geometry that are too simple to be wrong: lists of indices, no arithmetic.

A dimension is the list of its global indices. Every mesh axis takes the list that the last one left
and cuts it in lists. What a rank holds of a tensor is then one list of global indices a dimension.
"""

from __future__ import annotations

import itertools

import numpy as np

from nccl_m2n import Layout, Placement, Replicate, Shard, StridedShard


def ceil_chunks(items: list[int], parts: int) -> list[list[int]]:
    """What ``torch.chunk`` makes, with empty lists at the end where it makes fewer chunks."""
    size = -(-len(items) // parts)
    return [items[i * size : (i + 1) * size] for i in range(parts)]


def cut(items: list[int], placement: Shard | StridedShard, ranks: int) -> list[list[int]]:
    """What each of the `ranks` along a mesh axis keeps of `items`."""
    kept: list[list[int]] = [[] for _ in range(ranks)]
    if isinstance(placement, StridedShard):
        for chunk in ceil_chunks(items, placement.split_factor):
            for rank, part in enumerate(ceil_chunks(chunk, ranks)):
                kept[rank] += part
    elif not placement.segments:
        kept = ceil_chunks(items, ranks)
    else:
        first = 0
        for segment in placement.segments:
            mine = [i for i in items if first <= i < first + segment.size]
            parts = ranks if segment.parts is None else min(segment.parts, ranks)
            for rank in range(ranks):
                kept[rank] += ceil_chunks(mine, parts)[rank * parts // ranks]
            first += segment.size
    return kept


def indices(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    placements: tuple[Placement, ...],
    at: tuple[int, ...],
) -> list[list[int]]:
    """Global indices that mesh coordinate `at` holds, one list a dimension, in local order."""
    held = [list(range(extent)) for extent in shape]
    for size, placement, i in zip(mesh_shape, placements, at, strict=True):
        if not isinstance(placement, Replicate):
            dim = placement.dim % len(shape)
            held[dim] = cut(held[dim], placement, size)[i]
    return held


def layout_indices(layout: Layout) -> dict[int, list[list[int]]]:
    """`indices` of every rank of a mesh layout."""
    everyone = itertools.product(*map(range, layout.mesh.shape))
    return {
        rank: indices(layout.shape, layout.mesh.shape, layout.placements, at)
        for rank, at in zip(layout.mesh.ranks, everyone, strict=True)
    }


def distinct(shape: tuple[int, ...], dtype: str = "int64") -> np.ndarray:
    """A global array in which no two values are equal, none of them zero."""
    return np.arange(1, 1 + int(np.prod(shape, dtype=np.int64)), dtype=dtype).reshape(shape)


def runs(items: list[int]) -> list[tuple[int, int, int]]:
    """(first, one past the last, where it starts in the list) of every stretch of neighbours."""
    starts = [k for k in range(len(items)) if k == 0 or items[k] != items[k - 1] + 1]
    return [(items[a], items[b - 1] + 1, a) for a, b in itertools.pairwise([*starts, len(items)])]
