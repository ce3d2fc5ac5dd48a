# SPDX-License-Identifier: Apache-2.0
"""What a picture is drawn from: boxes that tile a tensor, each with the ranks that it belongs to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nccl_m2n.layout import Box, Layout
from nccl_m2n.layout.partition import BoxPartition, GridPartition

MOST_REGIONS = 1024  # what an eye can still make out, and a browser draws at once


@dataclass(frozen=True)
class Region:
    """A box of the tensor and the ranks that hold it."""

    box: Box
    ranks: tuple[int, ...]


def regions(layout: Layout) -> list[Region] | None:
    """The boxes of a layout with their holders, row-major; None where they are too many to draw."""
    partition = layout.partition
    if isinstance(partition, GridPartition):
        if math.prod(len(dim.start) for dim in partition.dims) > MOST_REGIONS:
            return None
        return _from_partition(partition.boxes)
    whole = _whole_pieces(layout)
    if whole is None:
        whole = _from_partition(partition)
    return whole if len(whole) <= MOST_REGIONS else None


def _from_partition(boxes: BoxPartition) -> list[Region]:
    rows = zip(boxes.start.tolist(), boxes.stop.tolist(), boxes.holder.tolist(), strict=True)
    return [Region(Box(a, b), tuple(boxes.holders[h].tolist())) for a, b, h in rows]


def _whole_pieces(layout: Layout) -> list[Region] | None:
    """A user's pieces as he gave them, or None where some overlap in part and must be drawn in parts."""
    held: dict[Box, list[int]] = {}
    for rank in layout.ranks:
        for box in dict.fromkeys(piece.box for piece in layout.pieces(rank)):
            if box.size:
                held.setdefault(box, []).append(rank)
    if len(held) > MOST_REGIONS:
        return None
    boxes = sorted(held, key=lambda box: (box.start, box.stop))
    if any(a.intersect(b) for i, a in enumerate(boxes) for b in boxes[:i]):
        return None
    return [Region(box, tuple(held[box])) for box in boxes]


def overlaps_of(source: Sequence[Region], destination: Sequence[Region]) -> list[tuple[Box, Region, Region]]:
    """Every overlap of two lists of regions; quadratic, as only what fits a picture comes here."""
    pairs = ((a.box.intersect(b.box), a, b) for b in destination for a in source)
    return [(box, a, b) for box, a, b in pairs if box is not None]


def cuts(boxes: Sequence[Box], dim: int) -> list[int]:
    """Where the boxes start and stop along a dimension, ascending, each once."""
    return sorted({box.start[dim] for box in boxes} | {box.stop[dim] for box in boxes})
