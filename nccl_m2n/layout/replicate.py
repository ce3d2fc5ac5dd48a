# SPDX-License-Identifier: Apache-2.0
"""Replication: every rank along a mesh axis holds the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from nccl_m2n.layout.placement import Placement, placement_kind
from nccl_m2n.typing import Ints, Json


@placement_kind
@dataclass(frozen=True, slots=True)
class Replicate(Placement):
    """Every rank along the mesh axis holds the same."""

    kind: ClassVar[str] = "replicate"
    dim: None = field(default=None, init=False)

    def ranges(self, extents: Ints, size: int) -> tuple[Ints, Ints]:
        """All of it, for every rank."""
        stop = np.repeat(extents.sum(axis=1)[:, None, None], size, axis=1)
        return np.zeros_like(stop), stop

    def data(self) -> list[Json]:
        """Nothing but the kind."""
        return [self.kind]

    @classmethod
    def from_dtensor(cls, value: Any, name: str) -> Placement | None:
        """See `Placement.from_dtensor`."""
        return cls() if name == "Replicate" else None

    def __repr__(self) -> str:
        return "Replicate()"

    def __str__(self) -> str:
        return "R"
