# SPDX-License-Identifier: Apache-2.0
"""Shards: the ranks along a mesh axis share out a dimension evenly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np

from nccl_m2n.checks import several, whole_number
from nccl_m2n.errors import LayoutError
from nccl_m2n.layout.intervals import shard_bounds
from nccl_m2n.layout.placement import Placement, placement_kind
from nccl_m2n.typing import Ints, Json


@dataclass(frozen=True, slots=True)
class Segment:
    """A range of a dimension that is sharded by itself.

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


@placement_kind
@dataclass(frozen=True, slots=True)
class Shard(Placement):
    """The ranks along the mesh axis share out tensor dimension `dim`, as ``torch.chunk`` cuts it.

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

    kind: ClassVar[str] = "shard"
    dim: int
    segments: tuple[Segment, ...] = ()

    def __init__(self, dim: int, segments: Sequence[int | Segment] = ()) -> None:
        object.__setattr__(self, "dim", whole_number(dim, "the dimension that is sharded"))
        given = several(segments, "segments", hint="such as segments=(4, 4)")
        made = tuple(s if isinstance(s, Segment) else Segment(s) for s in given)
        object.__setattr__(self, "segments", made)

    @property
    def cut_at(self) -> tuple[int, ...]:
        """Where segments end."""
        return tuple(accumulate(s.size for s in self.segments))

    def check(self, extent: int, size: int) -> None:
        """Segments make up the dimension, and their parts go evenly into the ranks of the mesh axis."""
        if self.segments and self.cut_at[-1] != extent:
            raise LayoutError(
                f"expected the segments of {self!r} to add up to the extent {extent} of dimension {self.dim}, got "
                f"{self.cut_at[-1]}; list the length of every segment"
            )
        for segment, parts in zip(self.segments, self._parts(size), strict=False):
            if size % parts:
                raise LayoutError(
                    f"expected the parts of each segment to divide the mesh axis of {size} ranks, "
                    f"got {segment!r}; take ranks that are a divisor or a multiple of {parts}, or "
                    f"parts that are a divisor of {size}; without parts each of them would be cut"
                )

    def _parts(self, size: int) -> list[int]:
        """How many parts each segment has on a mesh axis of `size` ranks."""
        return [min(s.parts or size, size) for s in self.segments] or [size]

    def ranges(self, extents: Ints, size: int) -> tuple[Ints, Ints]:
        """One shard of each segment; neighbouring ranks have the same where a segment has fewer parts."""
        parts = np.array(self._parts(size))
        part = np.arange(size)[:, None] * parts // size
        lo, hi = shard_bounds(extents[:, None, :], parts, part)
        first = np.cumsum(extents, axis=1) - extents
        return lo + first[:, None, :], hi + first[:, None, :]

    def data(self) -> list[Json]:
        """The dimension, and size and parts of each segment."""
        return [self.kind, self.dim, [[s.size, s.parts] for s in self.segments]]

    @classmethod
    def read(cls, *data: Json) -> Placement:
        """See `Placement.read`."""
        dim, segments = data
        return cls(dim, [Segment(*s) for s in segments])

    @classmethod
    def from_dtensor(cls, value: Any, name: str) -> Placement | None:
        """See `Placement.from_dtensor`."""
        return cls(value.dim) if name == "Shard" and isinstance(getattr(value, "dim", None), int) else None

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
