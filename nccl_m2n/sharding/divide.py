# SPDX-License-Identifier: Apache-2.0
"""One tensor on the ranks of its pipeline stages, as its rule says."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from nccl_m2n.errors import CommandError
from nccl_m2n.layout import Box, Layout, Mesh, Piece, Placement, Replicate, Segment, Shard, StridedShard
from nccl_m2n.models.config import Config
from nccl_m2n.sharding.companions import from_pieces
from nccl_m2n.sharding.parallelism import DENSE_AXES, EXPERT_AXES
from nccl_m2n.sharding.rules import Rule

Grid = npt.NDArray[np.int64]  # ranks on (stages, dp, fsdp, cp or ep, tp)


def on_grid(rule: Rule, shape: tuple[int, ...], grid: Grid, config: Config) -> Layout:
    """The layout of a tensor by its rule.

    Raises:
        ValueError: If it cannot be divided so.
    """
    fsdp, middle, tp = grid.shape[2:]
    inner: list[Placement] = [Replicate(), Replicate()]
    if isinstance(rule.ep, int):
        inner[0] = Shard(rule.ep)
    if rule.tp is not None:
        inner[1] = _tensor_parallel(rule, shape, tp, config) if tp > 1 else Shard(rule.tp)
    if fsdp == 1 or not shape:
        return _on_mesh(rule, shape, grid, [Replicate(), *inner])
    # FSDP shards what TP and EP have left, though its mesh axis stands before theirs
    later = zip(inner, (middle, tp), strict=True)
    cuts = [(p, n) for p, n in later if isinstance(p, Shard) and p.dim == rule.fsdp and n > 1]
    chunks = math.prod(n for _, n in cuts)
    if any(p.segments for p, _ in cuts) or shape[rule.fsdp] % chunks:
        return cut_by_fsdp(_on_mesh(rule, shape, grid, [Replicate(), *inner]), grid, rule.fsdp)
    outer = StridedShard(rule.fsdp, chunks) if cuts else Shard(rule.fsdp)
    return _on_mesh(rule, shape, grid, [outer, *inner])


def _on_mesh(rule: Rule, shape: tuple[int, ...], grid: Grid, placements: Sequence[Placement]) -> Layout:
    names = DENSE_AXES if rule.ep is None else EXPERT_AXES
    every = [Replicate(), Replicate(), *placements]
    kept = [axis for axis, size in enumerate(grid.shape) if size > 1] or [grid.ndim - 1]
    mesh = Mesh(grid.reshape([grid.shape[a] for a in kept]), names=[names[a] for a in kept])
    return Layout(shape, mesh, [every[a] for a in kept])


def cut_by_fsdp(layout: Layout, grid: Grid, dim: int) -> Layout:
    """Each rank's local array cut along one dimension among the FSDP ranks, as FSDP2 cuts it: in ceil chunks.

    Args:
        layout: On all ranks of the grid, the same along its FSDP axis.
        grid: The ranks.
        dim: The dimension.
    """
    pieces, shapes, ranks = {}, {}, grid.shape[2]
    for index in range(ranks):
        for rank in map(int, grid[:, :, index].flat):
            local = layout.local_shape(rank)
            chunk = -(-local[dim] // ranks)
            first, last = (min((index + i) * chunk, local[dim]) for i in (0, 1))
            pieces[rank] = [p for piece in layout.pieces(rank) if (p := _between(piece, dim, first, last))]
            shapes[rank] = (*local[:dim], last - first, *local[dim + 1 :])
    return Layout.from_pieces(layout.shape, pieces, shapes)


def _between(piece: Piece, dim: int, first: int, last: int) -> Piece | None:
    """The part of a piece that lies so in the local array, in an array that begins at `first`."""
    at, start, stop = piece.offset[dim], list(piece.box.start), list(piece.box.stop)
    begin, end = max(first, at), min(last, at + stop[dim] - start[dim])
    if begin >= end:
        return None
    start[dim], stop[dim] = start[dim] + begin - at, start[dim] + end - at
    offset = (*piece.offset[:dim], begin - first, *piece.offset[dim + 1 :])
    return Piece(Box(tuple(start), tuple(stop)), offset)


def _tensor_parallel(rule: Rule, shape: tuple[int, ...], tp: int, config: Config) -> Placement:
    assert rule.tp is not None
    if not -len(shape) <= rule.tp < len(shape):
        return Shard(rule.tp)  # which refuses it
    extent = shape[rule.tp]
    if isinstance(rule.segments, int):
        count, rest = rule.segments, extent % rule.segments
        units = None if rule.units is None else config.size(rule.units)
        if rest or (units and extent // count % units):
            raise CommandError(
                f"{extent} elements are no {count} equal parts of whole {rule.units or 'elements'}"
            )
        parts = None if units is None else _parts(units, rule.units, rule.repeat, tp)
        return Shard(rule.tp, [Segment(extent // count, parts)] * count)
    segments = [_segment(text, rule, tp, config) for text in rule.segments]
    if segments:
        total = sum(s.size for s in segments)
        if total != extent:
            raise CommandError(
                f"its segments {rule.segments} add up to {total}, dimension {rule.tp} has {extent}"
            )
    elif rule.units is not None:
        units = config.size(rule.units)
        if extent % units:
            raise CommandError(f"{extent} elements are no whole number for each of {units} {rule.units}")
        segments = [Segment(extent, _parts(units, rule.units, rule.repeat, tp))]
    plain = len(segments) <= 1 and all(s.parts is None for s in segments)
    return Shard(rule.tp, () if plain else segments)


def _segment(text: int | str, rule: Rule, tp: int, config: Config) -> Segment:
    size = config.size(text)
    first = str(text).partition("*")[0].strip()
    named = isinstance(text, str) and "*" in text
    return Segment(size, _parts(config.size(first), first, rule.repeat, tp) if named else None)


def _parts(units: int, name: int | str | None, repeat: bool, tp: int) -> int | None:
    """How many different parts so many units make; None for as many as there are ranks.

    Raises:
        CommandError: If the ranks cannot have as many units as one another.
    """
    said = name if isinstance(name, str) else "units"
    if units >= tp:
        if units % tp:
            raise CommandError(
                f"{units} {said} cannot be divided among {tp} tensor-parallel ranks; take a divisor of {units}"
            )
        return None
    if not repeat:
        raise CommandError(
            f"{tp} tensor-parallel ranks are more than {units} {said}; take a divisor of {units}"
        )
    if tp % units:
        raise CommandError(
            f"{tp} tensor-parallel ranks cannot repeat {units} {said} evenly; take a divisor or a multiple of {units}"
        )
    return units


def padded(rule: Rule, shape: tuple[int, ...], grid: Grid, extent: int) -> Layout:
    """Equal shares of a dimension that storage pads to `extent` elements, less the padding.

    Raises:
        CommandError: If they cannot be equal, or FSDP shards them further.
    """
    dim, tp = rule.tp or 0, grid.shape[4]
    if extent % tp or extent < shape[dim] or grid.shape[2] > 1:
        raise CommandError(
            f"padded_vocab={extent} cannot hold {shape[dim]} rows in equal shares of {tp} ranks"
            + (" under fsdp, which does not pad" if grid.shape[2] > 1 else "")
        )
    pieces: dict[int, list[Box]] = {}
    share = extent // tp
    for position in range(tp):
        start, stop = (min((position + i) * share, shape[dim]) for i in (0, 1))
        low = tuple(start if d == dim else 0 for d in range(len(shape)))
        high = tuple(stop if d == dim else n for d, n in enumerate(shape))
        box = [Box(low, high)] if start < stop else []
        pieces.update({int(rank): box for rank in grid[..., position].flat})
    return from_pieces(shape, pieces)
