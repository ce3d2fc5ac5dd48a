# SPDX-License-Identifier: Apache-2.0
"""Placements: what one mesh axis does to a tensor. Each kind has a file of its own and enters itself here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

from nccl_m2n.checks import shown
from nccl_m2n.errors import LayoutError
from nccl_m2n.typing import Ints, Json


@dataclass(frozen=True, slots=True)
class Placement(ABC):
    """Base of all placements.

    A kind of placement is one file: a frozen dataclass with these methods, entered by `placement_kind`. Layouts,
    plans, digests, JSON and pictures then know it.
    """

    kind: ClassVar[str]  # what JSON calls it; no other kind may
    dim: int | None  # the tensor dimension that it shards; None shards none

    @property
    def cut_at(self) -> tuple[int, ...]:
        """Ends of those ranges of the dimension that are sharded each by itself; none where it is one."""
        return ()

    def check(self, extent: int, size: int) -> None:
        """Refuse a dimension of `extent` elements or a mesh axis of `size` ranks that do not fit.

        Raises:
            LayoutError: Saying what would.
        """
        return  # most kinds fit all

    @abstractmethod
    def ranges(self, extents: Ints, size: int) -> tuple[Ints, Ints]:
        """What each rank on a mesh axis takes of a dimension that earlier mesh axes may have cut already.

        Args:
            extents: Elements that each coordinate of those axes has left of the dimension, shape (coordinates, 1);
                or, with `cut_at`, of each of these ranges, shape (coordinates, ranges). They lie end to end.
            size: Ranks on the mesh axis.

        Returns:
            First elements and ends, of shape (coordinates, size, any), counted in what the coordinate had. What a
            rank takes lies end to end in its local array, in this order, and must ascend.
        """

    @abstractmethod
    def data(self) -> list[Json]:
        """`kind` and what else makes the placement, as JSON data: what digests are made of."""

    @classmethod
    def read(cls, *data: Json) -> Placement:
        """The placement that `data` described, from what followed its kind."""
        return cls(*data)

    @classmethod
    def from_dtensor(cls, value: Any, name: str) -> Placement | None:
        """The same as one of DTensor's placements, whose class is called `name`; None for other classes."""
        return None


KINDS: dict[str, type[Placement]] = {}
Kind = TypeVar("Kind", bound=type[Placement])


def placement_kind(cls: Kind) -> Kind:
    """Enter a kind of placement.

    Raises:
        LayoutError: If there is another of that name.
    """
    if KINDS.setdefault(cls.kind, cls) is not cls:
        raise LayoutError(f"expected a new name for the placement {cls.__name__}, got {cls.kind!r} again")
    return cls


def read_placement(data: Sequence[Json]) -> Placement:
    """The placement that `Placement.data` described.

    Raises:
        LayoutError: For a kind that is not known here.
    """
    kind, *rest = data
    if kind not in KINDS:
        raise LayoutError(f"expected a placement out of {', '.join(KINDS)}, got {shown(kind)}")
    return KINDS[kind].read(*rest)


def as_placement(value: Any, ndim: int) -> Placement:
    """A placement with its dimension counted from 0, from one of ours or from DTensor's.

    DTensor's are told by their class names, so torch need not be installed.

    Raises:
        LayoutError: For anything that is no placement, a dimension out of range, or `Partial`.
    """
    name = type(value).__name__.lstrip("_")
    if name == "Partial":
        raise LayoutError(
            "expected Shard, StridedShard or Replicate, got Partial: its values are still to be summed over "
            "the mesh axis; reduce them first (DTensor: redistribute to Replicate or Shard)"
        )
    if isinstance(value, bool | int):
        raise LayoutError(f"expected a placement, got {value!r}; write Shard({int(value)}) or Replicate()")
    made = value if type(value) in KINDS.values() else _from_dtensor(value, name)
    if made.dim is None:
        return made
    if not -ndim <= made.dim < ndim:
        raise LayoutError(
            f"expected the dimension of {made!r} to be one of a tensor of rank {ndim}, got {made.dim}; "
            + (f"use 0 to {ndim - 1}" if ndim else "a scalar can only be replicated")
        )
    return made if made.dim >= 0 else replace(made, dim=made.dim + ndim)


def _from_dtensor(value: Any, name: str) -> Placement:
    for kind in KINDS.values():
        made = kind.from_dtensor(value, name)
        if made is not None:
            return made
    names = [kind.__name__ for kind in KINDS.values()]
    raise LayoutError(
        f"expected {', '.join(names[:-1])} or {names[-1]}, got {shown(value)} of type {type(value).__name__}"
    )
