# SPDX-License-Identifier: Apache-2.0
"""How a block crosses the wire when only some of it changed: the units that differ from what was sent last.

A unit is an element of the wire, or what several sizes of elements have in common: 1, 2, 4 or 8 bytes. A block of n
units with e changed ones is written in the shortest of three forms, which n, e and the unit decide, so that whoever
knows e knows the form and the size:

    dense   the block as it is
    list    first entry of each tile | place within its tile of each entry | values
    map     first entry of each tile | one bit a unit, set where it changed | values

A tile is `TILE` units: a place then takes two bytes, and tiles can be read each for itself. Every section starts at a
multiple of 16 bytes. Nothing changed, nothing sent: an empty list.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nccl_m2n.typing import Ints

TILE = 4096  # units; also in delta.cu
SECTION = 16  # bytes
LIST, MAP, DENSE = 0, 1, 2  # also in delta.cu


@dataclass(frozen=True)
class Sizes:
    """Form and bytes of some blocks on the wire."""

    form: Ints  # LIST, MAP or DENSE
    nbytes: Ints


def wire_sizes(block_bytes: Ints, unit: Ints, entries: Ints) -> Sizes:
    """The shortest form of blocks, and its bytes, a multiple of `SECTION`.

    Args:
        block_bytes: (blocks,) of the block as it is, a multiple of its unit.
        unit: (blocks,) bytes of a unit.
        entries: (blocks,) how many units changed.

    Example:
        >>> import numpy as np
        >>> from nccl_m2n.planning.delta_sizes import wire_sizes
        >>> wire_sizes(np.full(4, 1 << 20), np.full(4, 2), np.array([0, 5000, 50000, 500000]))
        Sizes(form=array([0, 0, 1, 2]), nbytes=array([      0,   20512,  166048, 1048576]))
    """
    units = block_bytes // unit
    head, values = _padded(4 * -(-units // TILE)), _padded(entries * unit)
    forms = np.stack(
        [head + _padded(2 * entries) + values, head + _padded(-(-units // 8)) + values, _padded(block_bytes)]
    )
    form = forms.argmin(axis=0)
    empty = entries == 0
    return Sizes(np.where(empty, LIST, form), np.where(empty, 0, forms.min(axis=0)))


def _padded(nbytes: Ints) -> Ints:
    return -(-nbytes // SECTION) * SECTION
