# SPDX-License-Identifier: Apache-2.0
"""Whether a destination holds what it should, by slicing of its own: neither plans nor pieces are asked."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from nccl_m2n.cli.weights import Bytes, Weights
from nccl_m2n.errors import VerificationError
from nccl_m2n.layout import Layout, Replicate, Shard, StridedShard

Wanted: TypeAlias = slice | npt.NDArray[np.int64]

BLOCK_BYTES = 32 << 20  # compared at a time


def wanted_index(layout: Layout, rank: int) -> list[Wanted]:
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


def _shard(held: npt.NDArray[np.int64], placement: Shard, number: int, size: int) -> npt.NDArray[np.int64]:
    if not placement.segments:
        return _chunks(held, size)[number]
    ends = np.cumsum([segment.size for segment in placement.segments])
    kept = []
    for segment, rows in zip(placement.segments, np.split(np.arange(ends[-1]), ends[:-1]), strict=True):
        parts = segment.parts or size
        own = _chunks(rows, parts)[number * parts // size]
        kept.append(held[np.isin(held, own)])
    return np.concatenate(kept)


def _chunks(indices: npt.NDArray[np.int64], count: int) -> list[npt.NDArray[np.int64]]:
    """Ceil chunks, the last of them shorter or empty."""
    step = max(1, -(-len(indices) // count))
    return [indices[i * step : (i + 1) * step] for i in range(count)]


def _as_run(indices: npt.NDArray[np.int64]) -> Wanted:
    """A slice where the indices are one run: slicing a mapped file copies nothing."""
    if not len(indices):
        return slice(0, 0)
    first, last = int(indices[0]), int(indices[-1])
    return slice(first, last + 1) if len(indices) == last - first + 1 else indices


def wrong_bytes(weights: Weights, name: str, layout: Layout, rank: int, local: Bytes) -> int:
    """How many bytes of a rank's local array are not as they should be.

    Args:
        weights: What they are compared with.
        name: The tensor.
        layout: The destination layout.
        rank: One of its ranks.
        local: The rank's array as bytes, of shape ``(*local shape, bytes of an item)``.
    """
    if layout.placements:
        return _differing(weights, name, wanted_index(layout, rank), local)
    pieces = layout.pieces(rank)  # user-made: they are themselves what was asked for
    return sum(_differing(weights, name, list(p.box.slices), local[p.local_slices]) for p in pieces)


def _differing(weights: Weights, name: str, index: list[Wanted], got: Bytes) -> int:
    extents = [len(w) if isinstance(w, np.ndarray) else w.stop - w.start for w in index]
    if list(got.shape[:-1]) != extents:
        raise VerificationError(f"tensor {name!r}: expected a local shape of {extents}, got {got.shape[:-1]}")
    if not index:
        return int(np.count_nonzero(weights.read(name, ()) != got))
    wrong = 0
    for rows in _blocks(got):
        wanted = weights.read(name, [_within(index[0], rows), *index[1:]])
        wrong += int(np.count_nonzero(wanted != got[rows]))
    return wrong


def _blocks(array: Bytes) -> list[slice]:
    """Runs of rows of a bearable size."""
    rows = array.shape[0]
    step = max(1, BLOCK_BYTES * rows // max(1, array.nbytes))
    return [slice(a, min(a + step, rows)) for a in range(0, rows, step)]


def _within(index: Wanted, rows: slice) -> Wanted:
    if isinstance(index, slice):
        return slice(index.start + rows.start, index.start + rows.stop)
    return index[rows]
