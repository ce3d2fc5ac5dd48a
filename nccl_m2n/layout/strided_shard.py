# SPDX-License-Identifier: Apache-2.0
"""Strided shards: FSDP over tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from nccl_m2n.checks import whole_number
from nccl_m2n.layout.intervals import shard_bounds
from nccl_m2n.layout.placement import Placement, placement_kind
from nccl_m2n.typing import Ints, Json


@placement_kind
@dataclass(frozen=True, slots=True)
class StridedShard(Placement):
    """A shard made after another one that stands further right in the mesh: FSDP over TP.

    The dimension is cut in `split_factor` shards, each of these in as many as the mesh axis has
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

    kind: ClassVar[str] = "strided"
    dim: int
    split_factor: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "dim", whole_number(self.dim, "the dimension that is sharded"))
        object.__setattr__(self, "split_factor", whole_number(self.split_factor, "split_factor", least=1))

    def ranges(self, extents: Ints, size: int) -> tuple[Ints, Ints]:
        """The rank's shard of each of the shards that were there before."""
        whole = extents.sum(axis=1)
        factor = min(self.split_factor, max(1, int(whole.max())))  # more shards would be empty
        a, b = shard_bounds(whole[:, None], factor, np.arange(factor))
        lo, hi = shard_bounds((b - a)[:, None, :], size, np.arange(size)[:, None])
        return lo + a[:, None, :], hi + a[:, None, :]

    def data(self) -> list[Json]:
        """The dimension and the factor."""
        return [self.kind, self.dim, self.split_factor]

    @classmethod
    def from_dtensor(cls, value: Any, name: str) -> Placement | None:
        """See `Placement.from_dtensor`; DTensor calls it ``_StridedShard``."""
        known = name == "StridedShard" and isinstance(getattr(value, "dim", None), int)
        return cls(value.dim, value.split_factor) if known else None

    def __repr__(self) -> str:
        return f"StridedShard({self.dim}, split_factor={self.split_factor})"

    def __str__(self) -> str:
        return f"SS({self.dim}, {self.split_factor})"
