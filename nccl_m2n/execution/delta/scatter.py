# SPDX-License-Identifier: Apache-2.0
"""Writing single units of received chunks to where they belong in a rank's arrays, in host memory."""

from __future__ import annotations

import numpy as np

from nccl_m2n.dtypes import cast_name
from nccl_m2n.execution.delta.entries import UNITS
from nccl_m2n.execution.host import strided
from nccl_m2n.execution.lower import ArrayTable, Wire
from nccl_m2n.execution.memory import numpy_type
from nccl_m2n.planning.program import Program
from nccl_m2n.typing import Bytes, Ints


class Scatter:
    """Where every byte of a rank's received chunks belongs.

    Args:
        program: What the rank does.
        destinations: Its destination arrays.
        wire: What elements are on the wire.
        unit: (chunks,) bytes of a unit of each chunk.
    """

    def __init__(self, program: Program, destinations: ArrayTable, wire: Wire, unit: Ints) -> None:
        self._program, self._arrays, self._wire, self._unit = program, destinations, wire, unit

    def write(self, chunk: int, changed: Ints, values: Bytes) -> None:
        """Write changed units of a chunk.

        Args:
            chunk: Its number.
            changed: The units, ascending.
            values: Their values.
        """
        made, unit = self._program.chunks[chunk], int(self._unit[chunk])
        spans = self._program.spans[made["first_span"] : made["first_span"] + made["spans"]]
        first = spans["offset"] // unit
        stop = first + (spans["stop"] - spans["start"]) // unit
        lo, hi = np.searchsorted(changed, first), np.searchsorted(changed, stop)
        for row in np.flatnonzero(hi > lo).tolist():
            span, some = spans[row], slice(int(lo[row]), int(hi[row]))
            at = changed[some] * unit - int(span["offset"]) + int(span["start"])
            self._write(int(span["cell"]), at, values[some], unit)

    def _write(self, cell: int, at: Ints, values: Bytes, unit: int) -> None:
        """Write units of one cell, which start at bytes `at` of its stream."""
        place = self._program.destination_cells[cell]
        number = int(place["transfer"])
        item, extent = int(self._arrays.item[number]), place["extent"].tolist()
        strides = self._arrays.stride[number].tolist()
        address = int(self._arrays.address[number] + (place["offset"] * self._arrays.stride[number]).sum())
        formats = int(self._wire.format[number]), int(self._arrays.format[number])
        if formats[0] == formats[1]:
            kind = np.dtype(UNITS[unit])
            array = strided(address, (*extent, item // unit), (*strides, unit), kind)
        else:
            source, kind = (numpy_type(cast_name(f)) for f in formats)
            array = strided(address, (*extent, 1), (*strides, kind.itemsize), kind)
            values = values.view(source).astype(kind)
        array[np.unravel_index(at // unit, array.shape)] = values
