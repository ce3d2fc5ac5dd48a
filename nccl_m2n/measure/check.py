# SPDX-License-Identifier: Apache-2.0
"""Whether a destination holds what it should, by slicing of its own: neither plans nor pieces are asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from nccl_m2n.errors import VerificationError
from nccl_m2n.layout import Layout, Replicate, Shard, StridedShard
from nccl_m2n.measure.values import Run
from nccl_m2n.typing import Array, Ints

BLOCK_BYTES = 32 << 20  # compared at a time


def wanted_index(layout: Layout, rank: int) -> list[Run]:
    """The global indices that a rank's local array must hold, dimension by dimension.

    Follows the placements, one mesh axis after another, on the list of all indices: a naive twin of layouts.

    Args:
        layout: A layout with placements.
        rank: One of its ranks.
    """
    held = [np.arange(extent) for extent in layout.shape]
    at = np.argwhere(np.array(layout.mesh.ranks).reshape(layout.mesh.shape) == rank)[0].tolist()
    for number, size, placement in zip(at, layout.mesh.shape, layout.placements, strict=True):
        if isinstance(placement, StridedShard):
            runs = _chunks(held[placement.dim], placement.split_factor)
            held[placement.dim] = np.concatenate([_chunks(run, size)[number] for run in runs])
        elif isinstance(placement, Shard):
            held[placement.dim] = _shard(held[placement.dim], placement, number, size)
        elif not isinstance(placement, Replicate):
            raise VerificationError(f"expected a placement that can be verified, got {placement}")
    return [_as_run(indices) for indices in held]


def _shard(held: Ints, placement: Shard, number: int, size: int) -> Ints:
    if not placement.segments:
        return _chunks(held, size)[number]
    ends = np.cumsum([segment.size for segment in placement.segments])
    kept = []
    for segment, rows in zip(placement.segments, np.split(np.arange(ends[-1]), ends[:-1]), strict=True):
        parts = segment.parts or size
        own = _chunks(rows, parts)[number * parts // size]
        kept.append(held[np.isin(held, own)])
    return np.concatenate(kept)


def _chunks(indices: Ints, count: int) -> list[Ints]:
    """Ceil chunks, the last of them shorter or empty."""
    step = max(1, -(-len(indices) // count))
    return [indices[i * step : (i + 1) * step] for i in range(count)]


def _as_run(indices: Ints) -> Run:
    """A slice where the indices are one run: slicing a mapped file copies nothing."""
    if not len(indices):
        return slice(0, 0)
    first, last = int(indices[0]), int(indices[-1])
    return slice(first, last + 1) if len(indices) == last - first + 1 else indices


def count_wrong(
    local: Array,
    layout: Layout,
    rank: int,
    read: Callable[[Sequence[Run]], Array],
    before: Sequence[Run] = (),
) -> int:
    """How many elements of a rank's local array are not as they should be.

    Args:
        local: The array, of shape (*extents of `before`, *local shape) and whatever `read` has beyond that.
        layout: Who holds what.
        rank: One of its ranks.
        read: Gives the right values of a part, by what is wanted of each dimension.
        before: What the array holds of dimensions that the layout does not know, for `read`.
    """
    if layout.placements:
        return _differing(local, [*before, *wanted_index(layout, rank)], read)
    pieces = layout.pieces(rank)  # user-made: they are themselves what was asked for
    every = (slice(None),) * len(before)
    return sum(_differing(local[every + p.local_slices], [*before, *p.box.slices], read) for p in pieces)


def _differing(got: Array, index: list[Run], read: Callable[[Sequence[Run]], Array]) -> int:
    extents = [len(run) if isinstance(run, np.ndarray) else run.stop - run.start for run in index]
    if list(got.shape[: len(index)]) != extents:
        raise VerificationError(f"expected a local shape of {extents}, got {got.shape[: len(index)]}")
    if 0 in extents:
        return 0
    dim = next((d for d, extent in enumerate(extents) if extent > 1), None)
    if got.nbytes <= BLOCK_BYTES or dim is None:
        return int((got != read(index)).sum())
    step, wrong = max(1, BLOCK_BYTES * extents[dim] // got.nbytes), 0
    for start in range(0, extents[dim], step):
        rows = slice(start, min(start + step, extents[dim]))
        part = [*index[:dim], _within(index[dim], rows), *index[dim + 1 :]]
        wrong += _differing(got[(slice(None),) * dim + (rows,)], part, read)
    return wrong


def _within(index: Run, rows: slice) -> Run:
    if isinstance(index, slice):
        return slice(index.start + rows.start, index.start + rows.stop)
    return index[rows]
