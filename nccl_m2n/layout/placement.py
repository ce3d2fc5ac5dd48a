# SPDX-License-Identifier: Apache-2.0
"""Placements: what one mesh axis does to a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nccl_m2n.checks import several, whole_number
from nccl_m2n.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a dimension that is sharded by itself.

    Args:
        size: Its length in elements.
        parts: How many different parts it has, when they are fewer than the mesh axis has ranks; each
            is then held by that many neighbouring ranks (KV heads when TP exceeds them). With more
            parts than ranks, as with none given, there are as many parts as ranks.
    """

    size: int
    parts: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", whole_number(self.size, "the size of a segment", least=0))
        if self.parts is not None:
            object.__setattr__(self, "parts", whole_number(self.parts, "the parts of a segment", least=1))

    def __repr__(self) -> str:
        return f"Segment({self.size})" if self.parts is None else f"Segment({self.size}, parts={self.parts})"


@dataclass(frozen=True, slots=True)
class Placement:
    """Base of the three placements."""


@dataclass(frozen=True, slots=True)
class Replicate(Placement):
    """Every rank along the mesh axis holds the same."""

    def __repr__(self) -> str:
        return "Replicate()"

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Shard(Placement):
    """The ranks along the mesh axis share out tensor dimension `dim` in ceil chunks.

    Args:
        dim: Tensor dimension; negative counts from the end.
        segments: Lengths (or `Segment`) that add up to the dimension's extent. Each segment is sharded
            by itself and a rank's parts lie end to end: fused gate/up, packed QKV.

    Example:
        >>> from nccl_m2n import Layout, Mesh, Shard
        >>> fused = Layout((8,), Mesh([0, 1]), [Shard(0, segments=(4, 4))])
        >>> [str(piece) for piece in fused.pieces(1)]
        ['[2:4] at (0,)', '[6:8] at (2,)']
    """

    dim: int
    segments: tuple[Segment, ...] = ()

    def __init__(self, dim: int, segments: Sequence[int | Segment] = ()) -> None:
        object.__setattr__(self, "dim", whole_number(dim, "the dimension that is sharded"))
        given = several(segments, "segments", hint="such as segments=(4, 4)")
        made = tuple(s if isinstance(s, Segment) else Segment(s) for s in given)
        object.__setattr__(self, "segments", made)

    def __repr__(self) -> str:
        if not self.segments:
            return f"Shard({self.dim})"
        plain = [s.size if s.parts is None else s for s in self.segments]
        return f"Shard({self.dim}, segments={tuple(plain)})"

    def __str__(self) -> str:
        if not self.segments:
            return f"S({self.dim})"
        sizes = "+".join(f"{s.size}" if s.parts is None else f"{s.size}/{s.parts}" for s in self.segments)
        return f"S({self.dim}: {sizes})"


@dataclass(frozen=True, slots=True)
class StridedShard(Placement):
    """A shard made after another one that stands further right in the mesh: FSDP over TP.

    The dimension is cut in `split_factor` chunks, each of these in as many as the mesh axis has
    ranks, and rank i has the i-th of each, end to end. DTensor calls it ``_StridedShard``. With
    ``[StridedShard(0, split_factor=2), Shard(0)]`` on a mesh (fsdp 2, tp 2), 8 rows lie thus:

    ====== ==== ======
    fsdp   tp   rows
    ====== ==== ======
    0      0    0, 1
    0      1    4, 5
    1      0    2, 3
    1      1    6, 7
    ====== ==== ======
    """

    dim: int
    split_factor: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "dim", whole_number(self.dim, "the dimension that is sharded"))
        object.__setattr__(self, "split_factor", whole_number(self.split_factor, "split_factor", least=1))

    def __repr__(self) -> str:
        return f"StridedShard({self.dim}, split_factor={self.split_factor})"

    def __str__(self) -> str:
        return f"SS({self.dim}, {self.split_factor})"


def as_placement(value: Any, ndim: int) -> Placement:
    """A placement with its dimension counted from 0, from one of ours or from DTensor's.

    DTensor's are told by their class names, so torch need not be installed.

    Raises:
        LayoutError: For anything that is no placement, a dimension out of range, or `Partial`.
    """
    kind = type(value).__name__.lstrip("_")
    if kind == "Partial":
        raise LayoutError(
            "expected Shard, StridedShard or Replicate, got Partial: its values are still to be summed over "
            "the mesh axis; reduce them first (DTensor: redistribute to Replicate or Shard)"
        )
    if isinstance(value, bool | int):
        raise LayoutError(f"expected a placement, got {value!r}; write Shard({int(value)}) or Replicate()")
    made = value if isinstance(value, Placement) else _from_dtensor(value, kind)
    if not isinstance(made, Shard | StridedShard):
        return made
    if not -ndim <= made.dim < ndim:
        raise LayoutError(
            f"expected the dimension of {made!r} to be one of a tensor of rank {ndim}, got {made.dim}; "
            + (f"use 0 to {ndim - 1}" if ndim else "a scalar can only be replicated")
        )
    return made if made.dim >= 0 else _at(made, made.dim + ndim)


def _at(placement: Shard | StridedShard, dim: int) -> Placement:
    if isinstance(placement, Shard):
        return Shard(dim, placement.segments)
    return StridedShard(dim, placement.split_factor)


def _from_dtensor(value: Any, kind: str) -> Placement:
    if kind == "Replicate":
        return Replicate()
    if kind == "Shard" and isinstance(getattr(value, "dim", None), int):
        return Shard(value.dim)
    if kind == "StridedShard" and isinstance(getattr(value, "dim", None), int):
        return StridedShard(value.dim, value.split_factor)
    raise LayoutError(
        f"expected Shard, StridedShard or Replicate, got {value!r} of type {type(value).__name__}"
    )
