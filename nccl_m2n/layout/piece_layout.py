# SPDX-License-Identifier: Apache-2.0
"""Layouts of user-made pieces, where no mesh says who holds what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from nccl_m2n.checks import rank_number, several, table_of
from nccl_m2n.errors import LayoutError
from nccl_m2n.layout.box import Box, Piece
from nccl_m2n.layout.mesh import Mesh
from nccl_m2n.layout.partition import BoxPartition, box_partition
from nccl_m2n.layout.shape import as_shape, shape_text
from nccl_m2n.typing import Ints, JsonObject, ReadJson


class PieceLayout:
    """What `Layout.from_pieces` answers from: a table of pieces."""

    shape: tuple[int, ...]
    mesh: Mesh
    _table: dict[int, tuple[tuple[Piece, ...], tuple[int, ...]]]  # by rank: what it holds, its local shape

    def __init__(
        self,
        shape: Sequence[int],
        pieces: Mapping[int, Sequence[Box | Piece]],
        local_shapes: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        made = as_shape(shape)
        self.shape = made
        ranks = [rank_number(r, "a rank of pieces") for r in table_of(pieces, "from rank to its pieces")]
        self.mesh = Mesh(sorted(ranks))
        local_shapes = table_of({} if local_shapes is None else local_shapes, "from rank to its local shape")
        given = {rank: as_shape(local) for rank, local in local_shapes.items()}
        if not given.keys() <= pieces.keys():
            raise LayoutError(
                f"expected local shapes only of the ranks {sorted(pieces)} that pieces are given for, "
                f"got some of {sorted(given)}; give a rank that holds nothing an empty list of pieces"
            )
        table = {}
        for rank in self.mesh.ranks:
            held = _placed(rank, pieces[rank])
            table[rank] = (held, _local_shape(rank, made, held, given.get(rank)))
        self._table = table

    @cached_property
    def partition(self) -> BoxPartition:
        """The tensor as disjoint boxes with their holders; a box's faces are those of all pieces."""
        return box_partition(
            len(self.shape), {r: [p.box for p in held] for r, (held, _) in self._table.items()}
        )

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the local array of `rank`, in elements."""
        self.mesh.coordinate(rank)  # an error for a rank that is not here
        return self._table[rank][1]

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """What `rank` holds, in the order given."""
        return self._table[rank][0] if rank_number(rank) in self._table else ()

    def locate(self, rank: int, start: Ints) -> tuple[Ints, Ints]:
        """See `Layout.locate`; a box that lies in two pieces of the rank gives two rows."""
        held = self.pieces(rank)
        lo = np.array([p.box.start for p in held], np.int64).reshape(len(held), len(self.shape))
        hi = np.array([p.box.stop for p in held], np.int64).reshape(len(held), len(self.shape))
        at = np.array([p.offset for p in held], np.int64).reshape(len(held), len(self.shape))
        inside = ((start[:, None] >= lo) & (start[:, None] < hi)).all(axis=2)
        box, piece = np.nonzero(inside)
        return box, start[box] - lo[piece] + at[piece]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PieceLayout):
            return NotImplemented
        return (self.shape, self._table) == (other.shape, other._table)

    def __hash__(self) -> int:
        return hash((self.shape, tuple(self._table.items())))

    def data(self) -> JsonObject:
        """The layout as JSON data."""
        pieces = {
            r: [[p.box.start, p.box.stop, p.offset] for p in held] for r, (held, _) in self._table.items()
        }
        return {"shape": self.shape, "pieces": pieces, "local": {r: s for r, (_, s) in self._table.items()}}

    @classmethod
    def read(cls, data: ReadJson) -> PieceLayout:
        """The layout that `data` described."""
        pieces = {int(r): [Piece(Box(a, b), at) for a, b, at in held] for r, held in data["pieces"].items()}
        return cls(data["shape"], pieces, {int(r): tuple(s) for r, s in data["local"].items()})

    def __repr__(self) -> str:
        pieces = {rank: list(held) for rank, (held, _) in self._table.items()}
        shapes = {rank: shape for rank, (_, shape) in self._table.items()}
        return f"Layout.from_pieces({self.shape}, {pieces}, {shapes})"

    def __str__(self) -> str:
        n = sum(len(held) for held, _ in self._table.values())
        return f"{shape_text(self.shape)} in {n} pieces on {self.mesh}"


def _placed(rank: int, given: Sequence[Box | Piece]) -> tuple[Piece, ...]:
    """The pieces with their offsets, those of plain boxes laid end to end."""
    given = several(given, f"boxes or pieces for rank {rank}", hint="a list of them, of one too")
    boxes = [b for b in given if isinstance(b, Box)]
    pieces = tuple(p for p in given if isinstance(p, Piece))
    if len(given) not in (len(boxes), len(pieces)):
        raise LayoutError(f"expected only Box or only Piece for rank {rank}, got {list(given)}")
    if not boxes:
        return pieces
    if len(boxes) == 1:
        return (Piece(boxes[0], (0,) * len(boxes[0].start)),)
    shapes = [b.shape for b in boxes]
    for d in range(len(shapes[0])):
        if len({s[:d] + s[d + 1 :] for s in shapes}) == 1:
            ends = np.cumsum([0] + [s[d] for s in shapes]).tolist()
            zero = (0,) * len(shapes[0])
            return tuple(Piece(b, zero[:d] + (e,) + zero[d + 1 :]) for b, e in zip(boxes, ends, strict=False))
    raise LayoutError(
        f"expected boxes of rank {rank} that agree in all extents but one, so that they lie end to end, "
        f"got shapes {shapes}; give a Piece(box, offset) for each"
    )


def _local_shape(
    rank: int, shape: tuple[int, ...], held: Sequence[Piece], given: tuple[int, ...] | None
) -> tuple[int, ...]:
    """Shape of the rank's local array, once all its pieces are known to be in order."""
    need = [0] * len(shape)
    for piece in held:
        ends = (piece.box.start, piece.box.stop, piece.offset)
        if any(len(e) != len(shape) for e in ends):
            raise LayoutError(
                f"expected pieces of rank {len(shape)} for shape {shape}, got {piece} on rank {rank}"
            )
        if (
            any(a < 0 or a > b or b > n for a, b, n in zip(*ends[:2], shape, strict=True))
            or min(ends[2], default=0) < 0
        ):
            raise LayoutError(f"expected pieces inside shape {shape}, got {piece} on rank {rank}")
        need = [max(n, o + e) for n, o, e in zip(need, piece.offset, piece.box.shape, strict=True)]
    if len(held) > 1:
        _refuse_overlap(rank, len(shape), [p for p in held if p.box.size])
    if given is not None and (
        len(given) != len(need) or any(n > g for n, g in zip(need, given, strict=True))
    ):
        raise LayoutError(f"expected a local shape of at least {tuple(need)} on rank {rank}, got {given}")
    return tuple(need) if given is None else given


def _refuse_overlap(rank: int, ndim: int, filled: Sequence[Piece]) -> None:
    local = box_partition(ndim, {i: [_local_box(p)] for i, p in enumerate(filled)})
    for sharers in local.holders:
        if len(sharers) > 1:
            a, b = (filled[i] for i in sharers[:2].tolist())
            raise LayoutError(f"expected pieces of rank {rank} apart in its local array, got {a} over {b}")


def _local_box(piece: Piece) -> Box:
    return Box(piece.offset, tuple(o + n for o, n in zip(piece.offset, piece.box.shape, strict=True)))
