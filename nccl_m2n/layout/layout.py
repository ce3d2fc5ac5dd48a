# SPDX-License-Identifier: Apache-2.0
"""Layouts: which part of a global tensor each rank holds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nccl_m2n.checks import made_by, rank_number, several, whole_numbers
from nccl_m2n.errors import LayoutError, M2nError
from nccl_m2n.layout.box import Box, Piece
from nccl_m2n.layout.mesh import Mesh
from nccl_m2n.layout.partition import BoxPartition, GridPartition, grid_partition
from nccl_m2n.layout.placement import Placement, Shard, StridedShard, as_placement
from nccl_m2n.layout.split import Split, split_dimension
from nccl_m2n.typing import Ints

if TYPE_CHECKING:
    from nccl_m2n.layout.pieces import PieceLayout

MAX_NDIM = 8


@dataclass(frozen=True, init=False, repr=False)
class Layout:
    """A global shape, a mesh of ranks, and what each mesh axis does to the tensor.

    Mesh axes apply left to right, each to the piece that the last one left, in ceil chunks, as
    DTensor does it. Nothing here knows of devices or of the rank that runs it.

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
    placements: tuple[Placement, ...]

    def __init__(self, shape: Sequence[int], mesh: Mesh, placements: Sequence[Any]) -> None:
        object.__setattr__(self, "shape", as_shape(shape))
        object.__setattr__(self, "mesh", mesh)
        made_by(mesh, Mesh, "the mesh of a layout", hint="write Mesh(...)")
        given = several(placements, "placements", hint="one for each axis of the mesh, such as [Shard(0)]")
        if len(given) != mesh.ndim:
            raise LayoutError(
                f"expected {mesh.ndim} placements, one for each axis of a mesh of shape {mesh.shape}, "
                f"got {len(given)}: {list(given)}"
            )
        made = tuple(as_placement(p, len(self.shape)) for p in given)
        object.__setattr__(self, "placements", made)
        for placement in made:
            _check_segments(placement, self.shape)
        if any(isinstance(p, Shard) and p.segments for p in made):
            _ = self._splits  # refuses segments whose parts do not fit the mesh axis, now rather than later

    @staticmethod
    def from_pieces(
        shape: Sequence[int],
        pieces: Mapping[int, Sequence[Box | Piece]],
        local_shapes: Mapping[int, Sequence[int]] | None = None,
    ) -> PieceLayout:
        """A layout of user-made pieces.

        Args:
            shape: Global shape, in elements.
            pieces: The boxes of each rank. Several boxes lie end to end in the rank's local array, along
                the first dimension in which all their other extents agree; a `Piece` says itself where
                it lies. Ranks may hold the same parts.
            local_shapes: Shapes of local arrays that are larger than their pieces.

        Raises:
            LayoutError: For a box outside the tensor, pieces that share a place in a local array, or
                boxes that cannot be laid end to end.
        """
        from nccl_m2n.layout.pieces import PieceLayout

        return PieceLayout(shape, pieces, local_shapes)

    @property
    def ndim(self) -> int:
        """Number of tensor dimensions."""
        return len(self.shape)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the mesh, ascending, with those whose shard is empty."""
        return tuple(sorted(self.mesh.ranks))

    @cached_property
    def _splits(self) -> tuple[Split, ...]:
        by_dim: list[list[tuple[int, int, Shard | StridedShard]]] = [[] for _ in self.shape]
        for axis, (size, placement) in enumerate(zip(self.mesh.shape, self.placements, strict=True)):
            if isinstance(placement, Shard | StridedShard):
                by_dim[placement.dim].append((axis, size, placement))
        return tuple(map(split_dimension, self.shape, by_dim))

    @cached_property
    def partition(self) -> BoxPartition | GridPartition:
        """The tensor as disjoint boxes with their holders."""
        return grid_partition(self.mesh, self._splits)

    def _coordinates(self, rank: int) -> list[int]:
        """The rank's coordinate in each dimension's split."""
        at = self.mesh.coordinate(rank)
        coordinates = []
        for split in self._splits:
            number = 0
            for axis in split.axes:
                number = number * self.mesh.shape[axis] + at[axis]
            coordinates.append(number)
        return coordinates

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the local array of `rank`, in elements; an extent is 0 where the shard is empty.

        Raises:
            LayoutError: If the rank is not in the layout.
        """
        at = self._coordinates(rank)
        return tuple(int(split.extents[c]) for split, c in zip(self._splits, at, strict=True))

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """What `rank` holds, in row-major order of its local array; nothing for ranks that hold none."""
        if rank_number(rank) not in self.mesh.index:
            return ()
        rows = []
        for split, coordinate in zip(self._splits, self._coordinates(rank), strict=True):
            at = split.rows(coordinate)
            rows.append(zip(*(a[at].tolist() for a in (split.start, split.stop, split.local)), strict=True))
        made = [
            tuple(zip(*combination, strict=True)) or ((), (), ()) for combination in itertools.product(*rows)
        ]
        return tuple(Piece(Box(start, stop), local) for start, stop, local in made)

    def locate(self, rank: int, start: Ints) -> tuple[Ints, Ints]:
        """Where boxes that `rank` holds start in its local array.

        Args:
            rank: A rank that holds them.
            start: First global index of each box, shape (boxes, ndim); no box crosses a piece.

        Returns:
            Box numbers, and local indices of shape (found, ndim), one row for each place where a box lies.
        """
        local = np.empty_like(start)
        for d, (split, coordinate) in enumerate(zip(self._splits, self._coordinates(rank), strict=True)):
            rows = split.rows(coordinate)
            row = np.searchsorted(split.start[rows], start[:, d], side="right") - 1
            local[:, d] = start[:, d] - split.start[rows][row] + split.local[rows][row]
        return np.arange(len(start)), local

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
        return f"Layout({self.shape}, {self.mesh!r}, {list(self.placements)})"

    def __str__(self) -> str:
        axes = self.mesh.names or tuple(str(n) for n in self.mesh.shape)
        how = ", ".join(f"{axis}: {placement}" for axis, placement in zip(axes, self.placements, strict=True))
        return f"{shape_text(self.shape)} on {self.mesh} ({how})"

    def _repr_html_(self) -> str:
        from nccl_m2n.show import html_layout

        return html_layout(self)

    @cached_property
    def _hash(self) -> int:
        return hash((self.shape, self.mesh, self.placements))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return Layout, (self.shape, self.mesh, self.placements)  # no cache travels: hashes differ by process


def as_layout(value: Any, what: str, error: type[M2nError] = LayoutError) -> Layout:
    """A layout as it is, or an error."""
    return made_by(value, Layout, what, error=error, hint="write Layout(shape, mesh, placements)")


def as_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """A shape as a tuple of ints, or an error."""
    made = whole_numbers(shape, "the extents of a shape")
    if len(made) > MAX_NDIM:
        raise LayoutError(f"expected at most {MAX_NDIM} dimensions, got {len(made)}: {made}; merge some")
    if any(n < 0 for n in made):
        raise LayoutError(f"expected extents of 0 or more, got shape {made}")
    if math.prod(n for n in made if n) >= 2**59:
        raise LayoutError(f"expected fewer than 2**59 elements, so that bytes fit 64 bits, got shape {made}")
    return made


def shape_text(shape: Sequence[int]) -> str:
    """A shape for people."""
    return " × ".join(map(str, shape)) if shape else "scalar"


def _check_segments(placement: Placement, shape: tuple[int, ...]) -> None:
    if not isinstance(placement, Shard) or not placement.segments:
        return
    total, extent = sum(s.size for s in placement.segments), shape[placement.dim]
    if total != extent:
        raise LayoutError(
            f"expected the segments of {placement!r} to add up to the extent {extent} of dimension "
            f"{placement.dim} in shape {shape}, got {total}; list the length of every segment"
        )
