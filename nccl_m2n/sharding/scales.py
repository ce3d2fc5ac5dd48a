# SPDX-License-Identifier: Apache-2.0
"""Block-scaled tensors: one scale for each block of 128 × 128 elements, in a tensor of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nccl_m2n.layout import Box, Layout, Shard

BLOCK = 128


def scale_layout(layout: Layout, shape: Sequence[int], block: int = BLOCK) -> Layout:
    """Where a block-scaled tensor's scales lie: each rank holds those of all blocks that it has a part of.

    Args:
        layout: The tensor's layout.
        shape: The shape of its scales, ceil(n / block) in each dimension.
        block: Extent of a block in each dimension, in elements.
    """
    pieces = {rank: [_blocks(piece.box, block) for piece in layout.pieces(rank)] for rank in layout.ranks}
    if layout.placements and not any(isinstance(p, Shard) and p.segments for p in layout.placements):
        plain = Layout(tuple(shape), layout.mesh, layout.placements)
        if all([p.box for p in plain.pieces(rank)] == held for rank, held in pieces.items()):
            return plain
    return from_boxes(shape, pieces)


def from_boxes(shape: Sequence[int], boxes: Mapping[int, Sequence[Box]]) -> Layout:
    """A layout of boxes cut along dimension 0 and others; who has none has no rows of the others' width."""
    empty = {rank: (0, *shape[1:]) for rank, held in boxes.items() if not held}
    return Layout.from_pieces(shape, boxes, empty)


def _blocks(box: Box, block: int) -> Box:
    return Box(tuple(a // block for a in box.start), tuple(-(-b // block) for b in box.stop))
