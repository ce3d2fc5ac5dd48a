# SPDX-License-Identifier: Apache-2.0
"""Layouts: which part of a global tensor each rank holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from nccl_m2n.checks import made_by
from nccl_m2n.errors import LayoutError, M2nError
from nccl_m2n.layout.box import Box, Piece
from nccl_m2n.layout.mesh import Mesh
from nccl_m2n.layout.mesh_layout import MeshLayout
from nccl_m2n.layout.partition import BoxPartition, GridPartition
from nccl_m2n.layout.piece_layout import PieceLayout
from nccl_m2n.layout.placement import Placement
from nccl_m2n.typing import Ints, JsonObject, ReadJson


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Layout:
    """A global shape, a mesh of ranks, and what each mesh axis does to the tensor.

    Mesh axes apply left to right, each to the piece that the last one left, as
    ``torch.chunk`` and DTensor cut. Nothing here knows of devices or of the rank that runs it.

    Args:
        shape: Global shape, in elements; up to 8 dimensions, none for a scalar.
        mesh: The ranks that hold the tensor.
        placements: One placement for each mesh axis. DTensor's own are taken too.

    Raises:
        LayoutError: If the placements do not fit the mesh or the shape.

    Example:
        >>> from nccl_m2n import Layout, Mesh, Replicate, Shard
        >>> layout = Layout((10, 8), Mesh.arange((2, 4)), [Replicate(), Shard(0)])
        >>> [layout.local_shape(rank) for rank in range(4)]
        [(3, 8), (3, 8), (3, 8), (1, 8)]
    """

    shape: tuple[int, ...]
    mesh: Mesh
    placements: tuple[Placement, ...]  # none where pieces were given
    _kind: MeshLayout | PieceLayout = field(repr=False)

    def __init__(self, shape: Sequence[int], mesh: Mesh, placements: Sequence[Any]) -> None:
        self._take(MeshLayout(shape, mesh, placements))

    def _take(self, kind: MeshLayout | PieceLayout) -> Layout:
        """Fill a new layout in."""
        placements = kind.placements if isinstance(kind, MeshLayout) else ()
        for name, value in (
            ("shape", kind.shape),
            ("mesh", kind.mesh),
            ("placements", placements),
            ("_kind", kind),
        ):
            object.__setattr__(self, name, value)
        return self

    @staticmethod
    def from_pieces(
        shape: Sequence[int],
        pieces: Mapping[int, Sequence[Box | Piece]],
        local_shapes: Mapping[int, Sequence[int]] | None = None,
    ) -> Layout:
        """A layout of user-made pieces.

        Args:
            shape: Global shape, in elements.
            pieces: The boxes of each rank. Several boxes lie end to end in the rank's local array, along
                the first dimension in which all their other extents agree; a `Piece` says itself where
                it lies. Ranks may hold the same.
            local_shapes: Shapes of local arrays that are larger than their pieces.

        Raises:
            LayoutError: For a box outside the tensor, pieces that overlap in a local array, or
                boxes that cannot be laid end to end.
        """
        return object.__new__(Layout)._take(PieceLayout(shape, pieces, local_shapes))

    @staticmethod
    def read(data: ReadJson) -> Layout:
        """The layout that `data` described."""
        kind = PieceLayout if "pieces" in data else MeshLayout
        return object.__new__(Layout)._take(kind.read(data))

    def data(self) -> JsonObject:
        """The layout as JSON data; axis names are left out where there are none."""
        return self._kind.data()

    @property
    def ndim(self) -> int:
        """Number of tensor dimensions."""
        return len(self.shape)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the mesh, ascending, with those whose shard is empty."""
        return tuple(sorted(self.mesh.ranks))

    @property
    def partition(self) -> BoxPartition | GridPartition:
        """The tensor as disjoint boxes with their holders."""
        return self._kind.partition

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the local array of `rank`, in elements; an extent is 0 where the shard is empty.

        Raises:
            LayoutError: If the rank is not in the layout.
        """
        return self._kind.local_shape(rank)

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """What `rank` holds, in row-major order of its local array; nothing for ranks that hold none."""
        return self._kind.pieces(rank)

    def locate(self, rank: int, start: Ints) -> tuple[Ints, Ints]:
        """Where boxes that `rank` holds start in its local array.

        Args:
            rank: A rank that holds them.
            start: First global index of each box, shape (boxes, ndim); no box crosses a piece.

        Returns:
            Box numbers, and local indices of shape (found, ndim), one row each time that a box lies there.
        """
        return self._kind.locate(rank, start)

    def slice_global(self, array: npt.NDArray[Any], rank: int) -> npt.NDArray[Any]:
        """The local array that `rank` would hold of a global NumPy array: the oracle of all tests.

        Raises:
            LayoutError: If the array's shape is not the layout's, or the rank is not in the layout.
        """
        if made_by(array, np.ndarray, "the global array").shape != self.shape:
            raise LayoutError(f"expected a global array of shape {self.shape}, got {array.shape}")
        local = np.zeros(self.local_shape(rank), array.dtype)
        for piece in self.pieces(rank):
            local[piece.local_slices] = array[piece.box.slices]
        return local

    def __repr__(self) -> str:
        return repr(self._kind)

    def __str__(self) -> str:
        return str(self._kind)

    def _repr_html_(self) -> str:
        from nccl_m2n.show import html_layout

        return html_layout(self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        return self is other or self._kind == other._kind

    @cached_property
    def _hash(self) -> int:
        return hash(self._kind)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return Layout.read, (self.data(),)  # no cache travels: hashes differ by process


def as_layout(value: Any, what: str, error: type[M2nError] = LayoutError) -> Layout:
    """A layout as it is, or an error."""
    return made_by(value, Layout, what, error=error, hint="write Layout(shape, mesh, placements)")
