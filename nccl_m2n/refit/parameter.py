# SPDX-License-Identifier: Apache-2.0
"""One parameter as one rank declares it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from nccl_m2n.checks import made_by, plain_text, several
from nccl_m2n.dtypes import dtype_name, item_size
from nccl_m2n.errors import LayoutError
from nccl_m2n.execution.views import ArrayView, view_array
from nccl_m2n.layout import Layout
from nccl_m2n.layout.layout import as_layout
from nccl_m2n.transport.base import Transport


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

    def __post_init__(self) -> None:
        plain_text(self.name, "the name of a parameter")
        if self.layout is not None:
            as_layout(self.layout, f"the layout of parameter {self.name!r}")
        if self.dtype is not None:
            object.__setattr__(self, "dtype", dtype_name(self.dtype))

    def view(self) -> ArrayView | None:
        """The array under the dtype that the parameter declares; None where there is no array.

        Raises:
            LayoutError: If it is no array, or its elements have another size.
        """
        if self.array is None:
            return None
        try:
            view = view_array(self.array)
        except LayoutError as error:
            raise LayoutError(f"parameter {self.name!r}: {error}") from error
        name = view.dtype if self.dtype is None else dtype_name(self.dtype)
        if item_size(name) != item_size(view.dtype):
            raise LayoutError(
                f"parameter {self.name!r}: expected elements as large as {name}'s, got {view.dtype}"
            )
        return view if name == view.dtype else replace(view, dtype=name)


Parameters: TypeAlias = Sequence[Parameter] | Mapping[int, Sequence[Parameter]]


def parameters_of(given: Parameters, transport: Transport, rank: int, side: str) -> list[Parameter]:
    """What a local rank was given to declare on one side.

    Raises:
        LayoutError: If it is no sequence of parameters, nor a mapping from the transport's ranks to these.
    """
    if isinstance(given, Mapping):
        strange = [each for each in given if each not in range(transport.size)]
        if strange:
            raise LayoutError(
                f"expected {side} parameters of ranks 0 to {transport.size - 1}, got some of {strange[0]!r}"
            )
    elif len(transport.local_ranks) > 1 and given:
        raise LayoutError(
            "expected a mapping from rank to parameters, for this process drives several ranks, got "
            f"{type(given).__name__}"
        )
    found = several(given.get(rank, ()) if isinstance(given, Mapping) else given, f"{side} parameters")
    return [made_by(one, Parameter, f"{side} parameter") for one in found]
