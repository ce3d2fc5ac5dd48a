# SPDX-License-Identifier: Apache-2.0
"""One parameter as one rank declares it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nccl_m2n.layout import Layout


@dataclass(frozen=True)
class Parameter:
    """What one rank says of one parameter on one side.

    Attributes:
        name: The name by which both sides know it; with the ready storage views, Hugging Face's.
        layout: Who holds which part of it; the same on all ranks of the side.
        array: This rank's part: any strided view. Its shape is the layout's local shape, or that shape with
            dimensions split further in row-major order, such as (groups, rows, columns) for
            (groups × rows, columns). None where the rank holds nothing.
        dtype: Canonical dtype name where the array cannot tell (bfloat16 kept as uint16, say).
    """

    name: str
    layout: Layout
    array: Any | None = None
    dtype: str | None = None
