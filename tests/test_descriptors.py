# SPDX-License-Identifier: Apache-2.0
"""Copy tables against NumPy's own slicing, through a naive interpreter of the table."""

from __future__ import annotations

import numpy as np
import pytest

from nccl_m2n.execution.descriptors import TILE_BYTES, join, packed_boxes, tiles, trim, widen
from tests.copies import boxes_of, run_copies


def scattered(shape, dtype, seed):
    """An array of the shape with gaps, another order of dimensions and a misaligned start."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(shape))
    steps = rng.integers(1, 3, len(shape))
    pads = rng.integers(0, 3, len(shape))
    big = [int(shape[d] * steps[d] + pads[d]) for d in order]
    item = np.dtype(dtype).itemsize
    raw = np.zeros(int(np.prod(big)) * item + 64, np.uint8)
    start = int(rng.integers(0, 4)) * item
    array = raw[start : start + int(np.prod(big)) * item].view(dtype).reshape(big)
    array = array.transpose(np.argsort(order))
    return array[(*(slice(0, n * s, s) for n, s in zip(shape, steps, strict=True)), ...)]


SHAPES = [
    (),
    (1,),
    (7,),
    (3, 5),
    (2, 3, 4),
    (4, 1, 6),
    (2, 2, 3, 2),
    (16, 8),
    (1, 2, 1, 2, 1, 2, 1, 3),
    (0, 3),
]


@pytest.mark.parametrize("dtype", ["uint8", "int16", "float32", "complex128"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_whole_boxes_move_as_numpy_moves_them(shape, dtype):
    for seed in range(4):
        source, destination = scattered(shape, dtype, seed), scattered(shape, dtype, seed + 100)
        source[...] = (np.arange(source.size).reshape(shape) + 1).astype(dtype)
        run_copies(widen(join(boxes_of([source]), boxes_of([destination])))[0])
        np.testing.assert_array_equal(destination, source)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cuts_of_a_packed_box(shape):
    """Packing a box in two cuts at every element gives the box's bytes in row-major order."""
    for seed in range(2):
        source = scattered(shape, "int32", seed)
        source[...] = np.arange(source.size).reshape(shape) + 1
        packed = np.zeros(source.size + 4, np.int32)
        boxes = boxes_of([source])
        table = join(boxes, packed_boxes(boxes.extent, boxes.item, boxes.format))
        table["destination"] += packed.ctypes.data
        for cut in range(source.size + 1):
            packed[...] = 0
            halves = np.concatenate([table, table])
            halves["stop"][0] = halves["start"][1] = cut
            run_copies(widen(halves)[0])
            assert packed[: source.size].tolist() == source.ravel().tolist()
            assert not packed[source.size :].any()


def test_dimensions_merge_only_where_both_sides_lie_end_to_end():
    source = np.zeros((4, 6, 8), np.uint8)
    whole = join(boxes_of([source]), boxes_of([np.zeros((4, 6, 8), np.uint8)]))
    assert whole["run"].tolist() == [192]
    padded = join(boxes_of([source]), boxes_of([np.zeros((4, 6, 10), np.uint8)[:, :, :8]]))
    assert padded["run"].tolist() == [8]
    assert padded["extent"][0].tolist() == [24, 1, 1, 1, 1, 1, 1, 1]
    assert padded["destination_stride"][0].tolist() == [10, 0, 0, 0, 0, 0, 0, 0]


def test_a_part_within_one_run_becomes_contiguous():
    source = np.zeros((4, 32), np.uint8)[:, :16]
    boxes = boxes_of([source])
    table = join(boxes, packed_boxes(boxes.extent, boxes.item, boxes.format))
    table["start"], table["stop"] = 17, 30
    trimmed, single = trim(table)
    assert single.all()
    assert trimmed["source"][0] == source.ctypes.data + 33
    assert trimmed["stop"][0] == 13
    table["stop"] = 33
    assert not trim(table)[1].any()


@pytest.mark.parametrize(
    ("offset", "size", "widths"),
    [(0, 64, {16: 4}), (8, 40, {8: 5}), (2, 64, {2: 32}), (0, 37, {16: 2, 1: 5})],
)
def test_the_widest_aligned_access_is_chosen(offset, size, widths):
    raw = np.zeros(256, np.uint8)
    raw = raw[-raw.ctypes.data % 16 :]
    table = join(boxes_of([raw[offset : offset + size]]), boxes_of([raw[128 : 128 + size]]))
    rows, origin = widen(table)
    assert dict(zip(rows["source_unit"].tolist(), rows["stop"].tolist(), strict=True)) == widths
    assert set(origin.tolist()) == {0}


def test_tiles_cover_every_unit():
    table = join(boxes_of([np.zeros(10000, np.uint8)]), boxes_of([np.zeros(10000, np.uint8)]))
    rows, _ = widen(table)
    units = TILE_BYTES // rows["source_unit"]
    assert (tiles(rows) == -(-rows["stop"] // units)).all()
