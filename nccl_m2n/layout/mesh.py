# SPDX-License-Identifier: Apache-2.0
"""A mesh: an n-dimensional grid of ranks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from nccl_m2n.checks import MAX_RANKS, plain_text, rank_number, several, whole_number, whole_numbers
from nccl_m2n.errors import LayoutError
from nccl_m2n.text import short_ranks
from nccl_m2n.typing import Ints

IN_A_ROW = "nccl.m2n's Mesh(dims, start_rank) is Mesh.arange(dims, start=start_rank) here"


@dataclass(frozen=True, init=False)
class Mesh:
    """An n-dimensional grid of distinct ranks, in any order.

    Args:
        ranks: A nested sequence or an integer array of ranks; its shape is the mesh's. ``Mesh([2])`` is the rank 2;
            NVIDIA's ``nccl.m2n.Mesh([2])`` is two ranks, `Mesh.arange((2,))` here.
        names: One name for each mesh axis, for people; two meshes are equal without regard to names.
        start_rank: Refused, with a hint: `Mesh.arange` has it.

    Raises:
        LayoutError: For a rank that is negative, no integer or given twice; for rows of unequal
            length; for an empty mesh; for as many names as axes violated.

    Example:
        >>> from nccl_m2n import Mesh
        >>> mesh = Mesh([[0, 1], [2, 3]], names=("dp", "tp"))
        >>> mesh.shape, mesh.coordinate(2)
        ((2, 2), (1, 0))
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]  # in row-major order
    names: tuple[str, ...] | None = field(compare=False)

    def __init__(
        self, ranks: Any, names: Sequence[str] | None = None, *, start_rank: int | None = None
    ) -> None:
        if start_rank is not None:
            raise LayoutError(f"expected ranks in a mesh, got start_rank={start_rank!r}; {IN_A_ROW}")
        array = _rank_array(ranks)
        if names is not None:
            names = tuple(
                plain_text(n, "the name of a mesh axis")
                for n in several(names, "names of mesh axes", hint=IN_A_ROW)
            )
            if len(names) != array.ndim:
                raise LayoutError(
                    f"expected one name for each of the {array.ndim} mesh axes, got {names}; "
                    f"give {array.ndim} names or none"
                )
        object.__setattr__(self, "shape", array.shape)
        object.__setattr__(self, "ranks", tuple(array.ravel().tolist()))
        object.__setattr__(self, "names", names)
        if len(set(self.ranks)) != len(self.ranks):
            twice = sorted(rank for rank, times in Counter(self.ranks).items() if times > 1)
            raise LayoutError(
                f"expected distinct ranks in a mesh, got rank {', '.join(map(str, twice))} more than once "
                f"in a mesh of shape {self.shape}; list each rank once"
            )

    @classmethod
    def arange(cls, shape: Sequence[int], start: int = 0, names: Sequence[str] | None = None) -> Mesh:
        """The ranks ``start, start + 1, …`` in row-major order on a grid of `shape`."""
        extents = whole_numbers(
            shape, "the shape of a mesh", least=1, hint="Mesh.arange((4,)) is four ranks in a row"
        )
        first = rank_number(start, "the first rank of a mesh")
        size = whole_number(math.prod(extents), "the size of a mesh", least=1, most=MAX_RANKS - first)
        return cls(np.arange(first, first + size).reshape(extents), names)

    @property
    def ndim(self) -> int:
        """Number of mesh axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @cached_property
    def array(self) -> Ints:
        """The ranks as a read-only integer array of the mesh's shape."""
        array = np.array(self.ranks, dtype=np.int64).reshape(self.shape)
        array.flags.writeable = False
        return array

    @cached_property
    def index(self) -> dict[int, int]:
        """Row-major position of each rank."""
        return {rank: i for i, rank in enumerate(self.ranks)}

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Where `rank` stands in the grid.

        Raises:
            LayoutError: If the rank is not in the mesh.
        """
        if rank_number(rank) not in self.index:
            raise LayoutError(
                f"expected a rank of {self!r}, got {rank}; its ranks are {short_ranks(sorted(self.ranks))}"
            )
        return tuple(int(i) for i in np.unravel_index(self.index[rank], self.shape))

    @cached_property
    def _hash(self) -> int:
        return hash((self.shape, self.ranks))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return Mesh, (self.array, self.names)  # no cache travels: hashes differ by process

    def __repr__(self) -> str:
        names = "" if self.names is None else f", names={self.names}"
        if self.size > 1 and self.ranks == tuple(range(self.ranks[0], self.ranks[0] + self.size)):
            start = f", start={self.ranks[0]}" if self.ranks[0] else ""
            return f"Mesh.arange({self.shape}{start}{names})"
        return f"Mesh({self.array.tolist()}{names})"

    def __str__(self) -> str:
        axes = self.names or ("",) * self.ndim
        grid = " × ".join(f"{name} {n}".strip() for name, n in zip(axes, self.shape, strict=True))
        return f"{grid or '1'} over ranks {short_ranks(sorted(self.ranks))}"


def _rank_array(ranks: Any) -> npt.NDArray[np.int64]:
    """The ranks as an int64 array, or an error that says what was wrong with them."""
    try:
        array = np.asarray(ranks)
    except ValueError:
        raise LayoutError(
            f"expected mesh rows of equal length, got {ranks!r}; pad or regroup the ranks"
        ) from None
    if array.size == 0:
        raise LayoutError(f"expected at least one rank in a mesh, got {ranks!r}")
    if array.dtype.kind not in "iu":
        raise LayoutError(f"expected integer ranks in a mesh, got {ranks!r} of dtype {array.dtype}")
    lowest, highest = int(array.min()), int(array.max())
    if lowest < 0 or highest >= MAX_RANKS:
        wrong = lowest if lowest < 0 else highest
        raise LayoutError(
            f"expected ranks from 0 to {MAX_RANKS - 1} in a mesh, got {wrong}; count ranks from 0"
        )
    return array.astype(np.int64)
