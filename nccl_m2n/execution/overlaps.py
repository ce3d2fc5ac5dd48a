# SPDX-License-Identifier: Apache-2.0
"""Boxes in memory that have a byte in common: told for thousands of them at once, exactly, by their addresses alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np

from nccl_m2n.execution.descriptors import Boxes, Mask
from nccl_m2n.execution.memory import bytes_at
from nccl_m2n.typing import Bytes, Ints

_Box: TypeAlias = tuple[
    int, list[int], list[int], int
]  # address, extent, stride in bytes, bytes of an element
MAX_WORK = 1_000_000  # of NumPy's search for a common byte; what takes longer counts as having one


def clashes(boxes: Boxes, written: Mask) -> Iterator[tuple[int, int]]:
    """Pairs of boxes with a byte in common, at least one of which is written.

    Args:
        boxes: Where they are.
        written: Whether each is, shape (n,).
    """
    low, high = _spans(boxes)
    order = np.flatnonzero(low < high)
    order = order[np.argsort(low[order], kind="stable")]
    if not len(order):
        return
    low, high, write = low[order], high[order], written[order]
    # How far any box before this one reaches, and any that is written: nearly always, no further than to its start.
    reach = _before(high, low[0])
    reach_written = _before(np.where(write, high, low[0]), low[0])
    met = np.where(write, reach, reach_written) > low
    if not met.any():
        return
    starts = np.flatnonzero(low >= reach)  # of groups whose spans hang together
    for first, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(order)], strict=True):
        if met[first:stop].any():
            rows = order[first:stop]
            if not _side_by_side(boxes.take(rows)):
                yield from _pairs(boxes, written, rows.tolist(), high[first:stop].tolist(), low[first:stop])


def repeated(boxes: Boxes) -> Ints:
    """Rows of the boxes two of whose elements share a byte, such as broadcast or overlapping windows."""
    step = np.where(boxes.extent > 1, np.abs(boxes.stride), 0)
    by_step = np.argsort(step, axis=1, kind="stable")
    step = np.take_along_axis(step, by_step, axis=1)
    extent = np.take_along_axis(boxes.extent, by_step, axis=1)
    # Nested strides, each beyond all that the smaller ones reach, repeat nothing; others are looked at one by one.
    reach = np.cumsum((extent - 1) * step, axis=1) - (extent - 1) * step + boxes.item[:, None]
    nested = ((extent <= 1) | (step >= reach)).all(axis=1)
    doubtful = np.flatnonzero(~nested & (boxes.extent > 0).all(axis=1))
    return np.array([row for row in doubtful.tolist() if _folds(boxes, row)], np.int64)


def _spans(boxes: Boxes) -> tuple[Ints, Ints]:
    """First address and one past the last of each box; equal for an empty one."""
    reach = (boxes.extent - 1) * boxes.stride
    low = boxes.address + np.minimum(reach, 0).sum(axis=1)
    high = boxes.address + np.maximum(reach, 0).sum(axis=1) + boxes.item
    return low, np.where((boxes.extent > 0).all(axis=1), high, low)


def _before(values: Ints, least: int) -> Ints:
    """The largest value before each place."""
    return np.concatenate([[least], np.maximum.accumulate(values)[:-1]])


def _side_by_side(boxes: Boxes) -> bool:
    """Whether boxes are columns of one array: equal outermost strides, and apart within that stride."""
    every = np.arange(len(boxes.address))
    step = np.where(boxes.extent > 1, np.abs(boxes.stride), 0)
    outer = step.argmax(axis=1)
    pitch = step[every, outer]
    if pitch[0] == 0 or (pitch != pitch[0]).any():
        return False
    extent = boxes.extent.copy()
    extent[every, outer] = 1
    low, high = _spans(Boxes(boxes.address, extent, boxes.stride, boxes.item, boxes.format))
    width, start = high - low, low % pitch[0]
    order = np.argsort(start)
    start, stop = start[order], start[order] + width[order]
    return bool((stop[:-1] <= start[1:]).all() and stop[-1] - pitch[0] <= start[0])


def _pairs(
    boxes: Boxes, written: Mask, rows: Sequence[int], high: Sequence[int], low: Ints
) -> Iterator[tuple[int, int]]:
    """The pairs of a few boxes, given by rising first address, that have a byte in common."""
    open_: list[int] = []  # places in `rows` of those that reach further
    for place, row in enumerate(rows):
        open_ = [other for other in open_ if high[other] > low[place]]
        for other in open_:
            if (written[row] or written[rows[other]]) and _meet(_box(boxes, rows[other]), _box(boxes, row)):
                yield rows[other], row
        open_.append(place)


def _box(boxes: Boxes, row: int) -> _Box:
    extent, stride = boxes.extent[row].tolist(), boxes.stride[row].tolist()
    return int(boxes.address[row]), extent, stride, int(boxes.item[row])


def _meet(a: _Box, b: _Box) -> bool:
    """Whether two boxes have a byte in common."""
    try:
        return np.shares_memory(_bytes(*a), _bytes(*b), max_work=MAX_WORK)  # type: ignore[arg-type]  # any number
    except np.exceptions.TooHardError:
        return True


def _bytes(address: int, extent: Sequence[int], stride: Sequence[int], item: int) -> Bytes:
    """A box as an array of bytes. Nothing is read: the addresses may be a device's."""
    reach = [(n - 1) * s for n, s in zip(extent, stride, strict=True)]
    low = sum(min(r, 0) for r in reach)
    size = sum(map(abs, reach)) + item
    return np.ndarray((*extent, item), np.uint8, bytes_at(address + low, size), -low, (*stride, 1))


def _folds(boxes: Boxes, row: int) -> bool:
    """Whether two elements of one box share a byte: its two halves do, or two within the larger half."""
    address, extent, stride, item = _box(boxes, row)
    while math.prod(extent) > 1:
        d = extent.index(max(extent))
        half = extent[d] // 2
        first, second = ([*extent[:d], n, *extent[d + 1 :]] for n in (half, extent[d] - half))
        if _meet((address, first, stride, item), (address + half * stride[d], second, stride, item)):
            return True
        extent = second  # holds whatever the first half may repeat: both have the same strides
    return False
