# SPDX-License-Identifier: Apache-2.0
"""Writing and reading what changed of a chunk, in host memory; see `nccl_m2n.planning.delta_sizes` for the forms."""

from __future__ import annotations

import numpy as np

from nccl_m2n.planning.delta_sizes import DENSE, LIST, MAP, SECTION, TILE
from nccl_m2n.typing import Bytes, Ints

UNITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


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
    at = -(-4 * tiles // SECTION) * SECTION
    after = at + -(-places // SECTION) * SECTION
    return (
        wire[: 4 * tiles].view(np.uint32),
        wire[at : at + places],
        wire[after : after + entries * unit].view(UNITS[unit]),
    )
