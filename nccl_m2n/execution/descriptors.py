# SPDX-License-Identifier: Apache-2.0
"""Copies between strided boxes as one flat table, one row a copy: what the pack kernel reads.

A row moves the elements ``start .. stop`` of a box, counted in the box's row-major order, from one memory
layout to another. Packing, unpacking and local copies are all rows of this one kind: the packed side is a
box whose strides happen to be row-major. Everything here works on whole tables with NumPy; no loop runs
over rows, so sixteen thousand tensors cost about what a thousand cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from nccl_m2n.layout.shape import MAX_NDIM
from nccl_m2n.typing import Ints, Table

Mask = npt.NDArray[np.bool_]

DIMENSIONS = MAX_NDIM  # also in copy_parts.cu
WIDEST = 16  # bytes of the widest access of one thread
TILE_BYTES = 8192  # what one warp moves at a time

PLACE_FIELDS = 4  # the fields of `COPY` before `run`; those from there on are a copy's shape
ENDLESS = 1 << 56  # units of a run that no copy leaves

COPY = np.dtype(
    [
        ("source", "i8"),  # address of the box's first element
        ("destination", "i8"),
        ("start", "i8"),  # first unit to move, in the box's row-major order
        ("stop", "i8"),  # one past the last
        ("run", "i8"),  # units that lie end to end on both sides
        ("source_unit", "i8"),  # bytes of a unit: an element, or after `widen` one access
        ("destination_unit", "i8"),
        ("cast", "i8"),  # 0: bytes are moved as they are; else see `cast_code`
        ("extent", "i8", DIMENSIONS),  # dimensions outside the run, fastest first, padded with 1
        ("source_stride", "i8", DIMENSIONS),  # bytes
        ("destination_stride", "i8", DIMENSIONS),
    ]
)


@dataclass(frozen=True)
class Boxes:
    """Boxes in memory, one row a box; dimensions slowest first, as the tensor has them."""

    address: Ints  # (n,) of the first element
    extent: Ints  # (n, DIMENSIONS) elements
    stride: Ints  # (n, DIMENSIONS) bytes
    item: Ints  # (n,) bytes of an element
    format: Ints  # (n,) number of the element's format, see `nccl_m2n.dtypes.cast_number`

    def take(self, rows: Ints) -> Boxes:
        """The boxes of some rows."""
        return Boxes(
            self.address[rows], self.extent[rows], self.stride[rows], self.item[rows], self.format[rows]
        )


def join_boxes(several: Sequence[Boxes]) -> Boxes:
    """The boxes of several tables, one after the other."""
    columns = ([getattr(one, field.name) for one in several] for field in fields(Boxes))
    return Boxes(*(np.concatenate(column) for column in columns))


def packed_boxes(extent: Ints, item: Ints, format: Ints) -> Boxes:
    """Boxes that lie in row-major order from address 0 on: cells as they are on the wire."""
    inner = np.cumprod(extent[:, :0:-1], axis=1)[:, ::-1]
    stride = np.concatenate([inner, np.ones((len(extent), 1), np.int64)], axis=1) * item[:, None]
    return Boxes(np.zeros(len(extent), np.int64), extent, stride, item, format)


def join(source: Boxes, destination: Boxes) -> Table:
    """The copies that move whole boxes, with every dimension merged that lies end to end on both sides.

    Args:
        source: Boxes to read.
        destination: Boxes of the same extents to write.

    Returns:
        Rows of `COPY`, in units: elements where they are cast, else the largest powers of two that divide them,
        for a message may end within an element of 3 or 12 bytes.
    """
    count = len(source.address)
    copies = np.zeros(count, COPY)
    copies["source"], copies["destination"] = source.address, destination.address
    copies["source_unit"], copies["destination_unit"] = source.item, destination.item
    copies["cast"] = cast_code(source.format, destination.format)
    copies["stop"] = source.extent.prod(axis=1)
    run = np.ones(count, np.int64)
    extent, strides, depth = _outer_dimensions(count)
    every = np.arange(count)
    for dimension in reversed(range(DIMENSIONS)):
        size = source.extent[:, dimension]
        here = (source.stride[:, dimension], destination.stride[:, dimension])
        wide = size != 1
        in_run = wide & (depth == 0)
        for stride, unit in zip(here, (source.item, destination.item), strict=True):
            in_run &= stride == run * unit
        last = np.maximum(depth - 1, 0)
        merged = wide & (depth > 0)
        for stride, outer in zip(here, strides, strict=True):
            merged &= stride == extent[every, last] * outer[every, last]
        added = wide & ~in_run & ~merged
        run[in_run] *= size[in_run]
        extent[every[merged], last[merged]] *= size[merged]
        rows, columns = every[added], depth[added]
        extent[rows, columns] = size[added]
        for stride, outer in zip(here, strides, strict=True):
            outer[rows, columns] = stride[added]
        depth += added
    copies["run"], copies["extent"] = np.maximum(run, 1), extent  # an empty box has no run
    copies["source_stride"], copies["destination_stride"] = strides
    return _in_units(copies)


def _in_units(copies: Table) -> Table:
    """Count what is not cast in units that every message is made of, see `dtypes.element_unit`."""
    item = copies["source_unit"]
    unit = np.where(copies["cast"] == 0, np.minimum(item & -item, WIDEST), item)
    for field in ("run", "stop"):
        copies[field] *= item // np.maximum(unit, 1)
    for field in ("source_unit", "destination_unit"):
        copies[field] = np.where(copies["cast"] == 0, unit, copies[field])
    return copies


def _outer_dimensions(count: int) -> tuple[Ints, tuple[Ints, Ints], Ints]:
    extent = np.ones((count, DIMENSIONS), np.int64)
    strides = (np.zeros((count, DIMENSIONS), np.int64), np.zeros((count, DIMENSIONS), np.int64))
    return extent, strides, np.zeros(count, np.int64)


def cast_code(source: Ints, destination: Ints) -> Ints:
    """0 where the formats agree, else both formats in one number, the source's times 16."""
    return np.where(source == destination, 0, source * 16 + destination)


def trim(copies: Table) -> tuple[Table, Mask]:
    """Move the start of each copy that stays within one run to that run, and forget its other dimensions.

    Args:
        copies: Rows of `COPY`, in elements.

    Returns:
        The trimmed rows, and which of them lie within one run: contiguous on both sides.
    """
    copies = copies.copy()
    row = copies["start"] // copies["run"]
    single = (copies["stop"] > copies["start"]) & (row == (copies["stop"] - 1) // copies["run"])
    within = copies[single]
    row = row[single]
    column = within["start"] - row * within["run"]
    for side in ("source", "destination"):
        within[side] += column * within[f"{side}_unit"]
    for dimension in range(DIMENSIONS):
        row, index = np.divmod(row, within["extent"][:, dimension])
        for side in ("source", "destination"):
            within[side] += index * within[f"{side}_stride"][:, dimension]
            within[f"{side}_stride"][:, dimension] = 0
    within["stop"] -= within["start"]
    within["start"], within["run"], within["extent"] = 0, within["stop"], 1
    copies[single] = within
    return copies, single


def widen(copies: Table) -> tuple[Table, Ints]:
    """Choose each row's access: the widest that every address it touches is aligned to.

    Rows that cast keep their element as the unit. Bytes left over at the end of a contiguous row become a
    row of their own, moved byte by byte.

    Args:
        copies: Rows of `COPY`, in elements.

    Returns:
        Rows of `COPY` ready for the kernel, empty ones dropped, and for each the row that it came from.
    """
    copies, single = trim(copies)
    plain = copies["cast"] == 0
    rows, single = copies[plain], single[plain]
    for field in ("run", "start", "stop"):
        rows[field] *= rows["source_unit"]
    touched = rows["source"] | rows["destination"] | rows["start"]
    touched |= np.where(single, 0, rows["run"] | rows["stop"])
    for side in ("source", "destination"):
        strides = np.where(rows["extent"] > 1, rows[f"{side}_stride"], 0)
        touched |= np.bitwise_or.reduce(strides, axis=1)
    width = np.minimum((touched | WIDEST) & -(touched | WIDEST), WIDEST)
    rest = rows["stop"] % width  # only single runs have any: the others' ends are aligned
    has_rest = rest > 0
    tails, rest = rows[has_rest], rest[has_rest]
    for side in ("source", "destination"):
        tails[side] += tails["stop"] - rest
        tails[f"{side}_unit"] = 1
        rows[f"{side}_unit"] = width
    tails["run"] = tails["stop"] = rest
    for field in ("run", "start", "stop"):
        rows[field] //= width
    bare = np.flatnonzero(plain)
    result = np.concatenate([rows, copies[~plain], tails])
    origin = np.concatenate([bare, np.flatnonzero(~plain), bare[has_rest]])
    filled = result["stop"] > result["start"]
    return result[filled], origin[filled]


def tiles(copies: Table) -> Ints:
    """How many tiles of `TILE_BYTES` each copy takes, at least one."""
    units = TILE_BYTES // np.maximum(copies["source_unit"], copies["destination_unit"])
    counts: Ints = -((copies["start"] - copies["stop"]) // units)
    return counts


def split_shapes(copies: Table) -> tuple[Ints, Ints]:
    """The table as the kernel reads it: a short row a copy, and the shapes that many copies share.

    Of thousands of tensors, most have a few shapes between them, and most copies lie within one run.

    Returns:
        Rows of `PLACE_FIELDS` and the number of a shape; shapes of the rest of `COPY`'s fields.
    """
    copies = copies.copy()
    copies["run"][(copies["extent"] == 1).all(axis=1)] = ENDLESS  # its length is in the row already
    fields = copies.view(np.int64).reshape(len(copies), COPY.itemsize // 8)
    place, shape = fields[:, :PLACE_FIELDS], np.ascontiguousarray(fields[:, PLACE_FIELDS:])
    whole = shape.view(np.dtype((np.void, shape.itemsize * shape.shape[1])))[:, 0]
    _, first, number = np.unique(whole, return_index=True, return_inverse=True)
    return np.column_stack([place, number]), shape[first]


def block_hints(first: Ints, tiles: Ints, bounds: Ints, shapes: Ints, per_block: int) -> tuple[Ints, Ints]:
    """For each block of each launch the copy that its first tile belongs to.

    Args:
        first: (copies,) each copy's first tile, counted within its launch.
        tiles: (launches,) tiles of each launch.
        bounds: (launches + 1,) rows of each launch.
        shapes: (copies,) number of each copy's shape.
        per_block: Tiles that one block of threads moves.

    Returns:
        Rows of two: a copy, counted within its launch, and its shape; and the bounds of each launch's rows.
    """
    blocks = -(-tiles // per_block)
    stops = np.cumsum(blocks)
    launch = np.repeat(np.arange(len(tiles)), blocks)
    start = (np.arange(len(launch)) - (stops - blocks)[launch]) * per_block
    before = np.cumsum(tiles) - tiles  # tiles of earlier launches
    of_copy = np.repeat(np.arange(len(tiles)), np.diff(bounds))
    copy = np.searchsorted(first + before[of_copy], start + before[launch], side="right") - 1
    return np.column_stack([copy - bounds[launch], shapes[copy]]), np.concatenate([[0], stops])
