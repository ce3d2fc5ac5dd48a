# SPDX-License-Identifier: Apache-2.0
"""Layouts over a mesh, where placements say who holds what."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from nccl_m2n.checks import made_by, rank_number, several
from nccl_m2n.errors import LayoutError
from nccl_m2n.layout.box import Box, Piece
from nccl_m2n.layout.mesh import Mesh
from nccl_m2n.layout.partition import GridPartition, grid_partition
from nccl_m2n.layout.placement import Placement, as_placement, read_placement
from nccl_m2n.layout.shape import as_shape, shape_text
from nccl_m2n.layout.split import Split, split_dimension
from nccl_m2n.typing import Ints, JsonObject, ReadJson


@dataclass(frozen=True, init=False, repr=False)
class MeshLayout:
    """What a `Layout` of a mesh and placements answers from."""

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
        for placement, size in zip(made, mesh.shape, strict=True):
            if placement.dim is not None:
                placement.check(self.shape[placement.dim], size)

    @cached_property
    def _splits(self) -> tuple[Split, ...]:
        by_dim: list[list[tuple[int, int, Placement]]] = [[] for _ in self.shape]
        for axis, (size, placement) in enumerate(zip(self.mesh.shape, self.placements, strict=True)):
            if placement.dim is not None:
                by_dim[placement.dim].append((axis, size, placement))
        return tuple(map(split_dimension, self.shape, by_dim))

    @cached_property
    def partition(self) -> GridPartition:
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
            Box numbers, and local indices of shape (found, ndim), one row each time that a box lies there.
        """
        local = np.empty_like(start)
        for d, (split, coordinate) in enumerate(zip(self._splits, self._coordinates(rank), strict=True)):
            rows = split.rows(coordinate)
            row = np.searchsorted(split.start[rows], start[:, d], side="right") - 1
            local[:, d] = start[:, d] - split.start[rows][row] + split.local[rows][row]
        return np.arange(len(start)), local

    def data(self) -> JsonObject:
        """The layout as JSON data; axis names are left out where there are none."""
        data = {
            "shape": self.shape,
            "mesh": [self.mesh.shape, self.mesh.ranks],
            "placements": [p.data() for p in self.placements],
        }
        return data | ({"names": self.mesh.names} if self.mesh.names else {})

    @classmethod
    def read(cls, data: ReadJson) -> MeshLayout:
        """The layout that `data` described."""
        shape, ranks = data["mesh"]
        mesh = Mesh(np.array(ranks, np.int64).reshape(shape), data.get("names"))
        return cls(data["shape"], mesh, [read_placement(p) for p in data["placements"]])

    def __repr__(self) -> str:
        return f"Layout({self.shape}, {self.mesh!r}, {list(self.placements)})"

    def __str__(self) -> str:
        axes = self.mesh.names or tuple(str(n) for n in self.mesh.shape)
        how = ", ".join(f"{axis}: {placement}" for axis, placement in zip(axes, self.placements, strict=True))
        return f"{shape_text(self.shape)} on {self.mesh} ({how})"
