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

from nccl_m2n.typing import Bytes, Ints

TILE = 4096  # units; also in delta.cu
ALIGN = 16  # bytes
LIST, MAP, DENSE = 0, 1, 2  # also in delta.cu
UNITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True)
class Sizes:
    """Form and bytes of some blocks on the wire."""

    form: Ints  # LIST, MAP or DENSE
    nbytes: Ints


def wire_sizes(block_bytes: Ints, unit: Ints, entries: Ints) -> Sizes:
    """The shortest form of blocks, and its bytes, a multiple of `ALIGN`.

    Args:
        block_bytes: (blocks,) of the block as it is, a multiple of its unit.
        unit: (blocks,) bytes of a unit.
        entries: (blocks,) how many units changed.

    Example:
        >>> import numpy as np
        >>> from nccl_m2n.execution.delta.entries import wire_sizes
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
    return -(-nbytes // ALIGN) * ALIGN


def changed_units(block: Bytes, baseline: Bytes, unit: int) -> Ints:
    """The units of a block that differ from the baseline, ascending."""
    return np.flatnonzero(block.view(UNITS[unit]) != baseline.view(UNITS[unit]))


def encode(block: Bytes, changed: Ints, unit: int, form: int, out: Bytes) -> None:
    """Write a block in a form.

    Args:
        block: The block as it is.
        changed: The units that changed, ascending.
        unit: Bytes of a unit.
        form: `LIST`, `MAP` or `DENSE`, as `wire_sizes` has it.
        out: As many bytes as `wire_sizes` says.
    """
    if form == DENSE:
        out[: len(block)] = block
        return
    if not len(changed):
        return
    first, places, values = _sections(out, len(block) // unit, len(changed), unit, form)
    first[:] = np.searchsorted(changed, np.arange(len(first)) * TILE)
    if form == LIST:
        places.view(np.uint16)[:] = changed % TILE
    else:
        mask = np.zeros(len(block) // unit, bool)
        mask[changed] = True
        places[:] = np.packbits(mask, bitorder="little")
    values[:] = block.view(UNITS[unit])[changed]


def decode(wire: Bytes, units: int, entries: int, unit: int, form: int) -> tuple[Ints, Bytes]:
    """The changed units of a block, ascending, and their values; of a sparse form.

    Args:
        wire: As `encode` wrote it.
        units: Of the whole block.
        entries: How many changed.
        unit: Bytes of a unit.
        form: `LIST` or `MAP`.
    """
    if not entries:
        return np.zeros(0, np.int64), np.zeros(0, UNITS[unit])
    first, places, values = _sections(wire, units, entries, unit, form)
    if form == MAP:
        return np.flatnonzero(np.unpackbits(places, count=units, bitorder="little")), values
    tile = np.repeat(np.arange(len(first)), np.diff(np.append(first, entries)))
    return tile * TILE + places.view(np.uint16), values


def _sections(wire: Bytes, units: int, entries: int, unit: int, form: int) -> tuple[Bytes, Bytes, Bytes]:
    """The three sections of a sparse form: first entries, places or bits, values."""
    tiles, places = -(-units // TILE), 2 * entries if form == LIST else -(-units // 8)
    at = -(-4 * tiles // ALIGN) * ALIGN
    after = at + -(-places // ALIGN) * ALIGN
    return (
        wire[: 4 * tiles].view(np.uint32),
        wire[at : at + places],
        wire[after : after + entries * unit].view(UNITS[unit]),
    )
