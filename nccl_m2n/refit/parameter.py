# SPDX-License-Identifier: Apache-2.0
"""One parameter as one rank declares it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from nccl_m2n.dtypes import dtype_name, item_size
from nccl_m2n.errors import LayoutError
from nccl_m2n.execution.views import ArrayView, view_array
from nccl_m2n.layout import Layout


@dataclass(frozen=True)
class Parameter:
    """What one rank says of one parameter on one side.

    Attributes:
        name: The name by which both sides know it; with the ready storage views, Hugging Face's.
        layout: Who holds which part of it; the same on all ranks of the side. None, on the destination side, where
            that cannot be said: each rank that declares it so then gets the full tensor, by the ``load`` that
            `Refit` is given.
        array: This rank's part: any strided view. Its shape is the layout's local shape, or that shape with
            dimensions split further in row-major order, such as (groups, rows, columns) for
            (groups × rows, columns). None where the rank holds nothing.
        dtype: Canonical dtype name where the array cannot tell (bfloat16 kept as uint16, say).
    """

    name: str
    layout: Layout | None = None
    array: Any | None = None
    dtype: str | None = None

    def view(self) -> ArrayView | None:
        """The array under the dtype that the parameter declares; None where there is no array.

        Raises:
            LayoutError: If it is no array, or its elements have another size.
        """
        if self.array is None:
            return None
        view = view_array(self.array)
        name = view.dtype if self.dtype is None else dtype_name(self.dtype)
        if item_size(name) != item_size(view.dtype):
            raise LayoutError(
                f"parameter {self.name!r}: expected elements as large as {name}'s, got {view.dtype}"
            )
        return view if name == view.dtype else replace(view, dtype=name)
