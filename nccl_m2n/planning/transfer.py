# SPDX-License-Identifier: Apache-2.0
"""A transfer: one tensor's move from a source layout to a destination layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nccl_m2n.checks import plain_text
from nccl_m2n.dtypes import dtype_name, is_float, item_size, narrower
from nccl_m2n.errors import PlanError
from nccl_m2n.layout import Layout
from nccl_m2n.layout.layout import as_layout
from nccl_m2n.layout.shape import shape_text


@dataclass(frozen=True, init=False)
class Transfer:
    """One tensor's move.

    Args:
        source: Who holds what before.
        destination: Who needs what after; of the same global shape.
        dtype: Element type at the source (and at the destination, if no other is given).
        name: What the tensor is called; unique within a plan.
        destination_dtype: Element type at the destination where it differs. Float types only; the
            smaller of the two crosses the wire, cast while packing or unpacking. Named here, it is meant: nothing
            asks whether its range holds the source's.

    Raises:
        PlanError: If the shapes differ, or the types differ and cannot be cast.
    """

    source: Layout
    destination: Layout
    dtype: str
    name: str
    destination_dtype: str

    def __init__(
        self,
        source: Layout,
        destination: Layout,
        dtype: Any = "float32",
        name: str = "tensor",
        destination_dtype: Any = None,
    ) -> None:
        for side, layout in (("source", source), ("destination", destination)):
            object.__setattr__(self, side, as_layout(layout, side, PlanError))
        object.__setattr__(self, "dtype", dtype_name(dtype))
        object.__setattr__(self, "name", plain_text(name, "the name of a tensor", error=PlanError))
        other = self.dtype if destination_dtype is None else dtype_name(destination_dtype)
        object.__setattr__(self, "destination_dtype", other)
        if source.shape != destination.shape:
            raise PlanError(
                f"tensor {self.name!r}: expected one global shape on both sides, got {source.shape} at the "
                f"source and {destination.shape} at the destination"
            )
        if other != self.dtype and not (is_float(other) and is_float(self.dtype)):
            raise PlanError(
                f"tensor {self.name!r}: expected equal element types or two float types that can be cast, "
                f"got {self.dtype} at the source and {other} at the destination"
            )

    def renamed(self, name: str) -> Transfer:
        """The same move of a tensor of another name."""
        return Transfer(self.source, self.destination, self.dtype, name, self.destination_dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape, in elements."""
        return self.source.shape

    @property
    def wire_dtype(self) -> str:
        """Element type that crosses the wire."""
        return narrower(self.dtype, self.destination_dtype)

    @property
    def wire_size(self) -> int:
        """Bytes of one element on the wire."""
        return item_size(self.wire_dtype)

    def __repr__(self) -> str:
        cast = (
            "" if self.destination_dtype == self.dtype else f", destination_dtype={self.destination_dtype!r}"
        )
        return f"Transfer({self.source!r}, {self.destination!r}, {self.dtype!r}, {self.name!r}{cast})"

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype} {shape_text(self.shape)}, {self.source} → {self.destination}"
