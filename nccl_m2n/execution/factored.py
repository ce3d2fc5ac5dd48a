# SPDX-License-Identifier: Apache-2.0
"""Arrays with more dimensions than their layout: one dimension seen as several, in row-major order.

Fused storage needs them: the query rows of an interleaved QKV matrix are a strided view of shape (groups, rows,
columns), where the layout speaks of (groups × rows, columns). A cell that is made of whole groups is a box in the
array's own dimensions as well, in the same order of elements. Others are cut where their first and their last
group end; what is left are boxes again, and no copy or message has to know.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TypeAlias

import numpy as np

from nccl_m2n.execution.descriptors import Mask
from nccl_m2n.execution.views import ArrayView
from nccl_m2n.layout.fit import Factors, factor_shape
from nccl_m2n.layout.intervals import overlaps
from nccl_m2n.planning.program import LOCAL, Program
from nccl_m2n.planning.rank_cells import CELL
from nccl_m2n.typing import Ints, Table

Side: TypeAlias = tuple[
    tuple[int, ...], Factors
]  # where a cell starts in a local array, and the array's factors
Run: TypeAlias = tuple[int, int]  # start within a cell's dimension, length
Place: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]  # extent and offset in the array, as in a `CELL`
WIDTH = CELL["extent"].shape[0]


def fit_view(view: ArrayView, local_shape: tuple[int, ...]) -> tuple[ArrayView, Factors] | None:
    """An array seen as its layout speaks of it: dimensions of extent 1 as there, others split as the array has them.

    Returns:
        The same elements in the same order, and what makes up each dimension; None where the shapes do not fit.
    """
    factors = factor_shape(view.shape, local_shape)
    if factors is None:
        return None
    steps = iter([step for n, step in zip(view.shape, view.strides, strict=True) if n != 1])
    shape = tuple(itertools.chain.from_iterable(factors))
    return replace(view, shape=shape, strides=tuple(0 if n == 1 else next(steps) for n in shape)), factors


def align_factors(
    views: tuple[dict[int, ArrayView], dict[int, ArrayView]],
    factors: tuple[dict[int, Factors], dict[int, Factors]],
) -> None:
    """Split what one side alone splits on the other side as well, where both are on this rank.

    A rank copies to itself box by box, and boxes must then have the same extents on both sides.

    Args:
        views: The source's and the destination's views, by transfer; changed.
        factors: How they split dimensions of their layout, where they do; changed.
    """
    for number in factors[0].keys() | factors[1].keys():
        if not all(number in side for side in views):
            continue
        given = [
            f.get(number) or tuple((n,) for n in v[number].shape) for v, f in zip(views, factors, strict=True)
        ]
        for side in (0, 1):
            finer = _finer(given[side], given[1 - side])
            if finer != given[side] and sum(map(len, finer)) <= WIDTH:
                views[side][number] = _split_view(views[side][number], given[side], finer)
                factors[side][number] = finer


def _finer(own: Factors, other: Factors) -> Factors:
    """Own factors, where a dimension has none those of the other side if they divide it."""
    made: list[tuple[int, ...]] = []
    for a, b in zip(own, other, strict=True):
        inner = math.prod(b[1:])
        divided = len(a) == 1 and len(b) > 1 and inner and a[0] % inner == 0
        made.append((a[0] // inner, *b[1:]) if divided else a)
    return tuple(made)


def _split_view(view: ArrayView, factors: Factors, finer: Factors) -> ArrayView:
    """The same elements with some dimensions split."""
    shape: list[int] = []
    strides: list[int] = []
    rest = iter(view.strides)
    for before, after in zip(factors, finer, strict=True):
        own = [next(rest) for _ in before]
        if before != after:
            own = [own[0] * math.prod(after[i + 1 :]) for i in range(len(after))]
        shape += after
        strides += own
    return replace(view, shape=tuple(shape), strides=tuple(strides))


def split_factored(
    program: Program, sources: Mapping[int, Factors], destinations: Mapping[int, Factors], item: Ints
) -> Program:
    """Describe the cells of arrays with more dimensions than their layout in the arrays' dimensions.

    Args:
        program: What a rank does.
        sources: By transfer, how the dimensions of its source array are split, where they are.
        destinations: Likewise.
        item: Bytes of an element on the wire, by transfer.
    """
    if not sources and not destinations:
        return program
    received = program.chunks["received"][program.spans["chunk"]]
    source_cells, packed = _split_side(program.source_cells, program.spans[~received], sources, item)
    destination_cells, unpacked = _split_side(
        program.destination_cells, program.spans[received], destinations, item
    )
    local_source, local_destination = _split_local(program, sources, destinations)
    spans = np.concatenate([packed, unpacked])
    spans = spans[np.argsort(spans["chunk"], kind="stable")]
    chunks = program.chunks.copy()
    chunks["spans"] = np.bincount(spans["chunk"], minlength=len(chunks))
    chunks["first_span"] = np.cumsum(chunks["spans"]) - chunks["spans"]
    local = np.zeros(len(local_source), LOCAL)
    local["source"] = len(source_cells) + np.arange(len(local))
    local["destination"] = len(destination_cells) + np.arange(len(local))
    return replace(
        program,
        chunks=chunks,
        spans=spans,
        source_cells=np.concatenate([source_cells, local_source]),
        destination_cells=np.concatenate([destination_cells, local_destination]),
        local=local,
    )


def _split_side(
    cells: Table, spans: Table, factors: Mapping[int, Factors], item: Ints
) -> tuple[Table, Table]:
    """One side's cells cut, and the spans of the cut cells."""
    chosen = np.isin(cells["transfer"], list(factors))
    places = [
        [place for (place,) in _places(*_own(cell, factors[int(cell["transfer"])]))] for cell in cells[chosen]
    ]
    cut, counts = _replaced(cells, chosen, places)
    size = cut["extent"].prod(axis=1) * item[cut["transfer"]]
    stop = np.cumsum(size)  # all cells' streams laid end to end; their cuts follow each other in them
    first = np.cumsum(counts) - counts
    base = np.append(stop - size, stop[-1:])[first]
    span, piece, lo, hi = overlaps(
        stop - size, stop, base[spans["cell"]] + spans["start"], base[spans["cell"]] + spans["stop"]
    )
    made = spans[span].copy()
    made["cell"], made["start"], made["stop"] = piece, lo - (stop - size)[piece], hi - (stop - size)[piece]
    made["offset"] += lo - (base[spans["cell"]] + spans["start"])[span]
    return cut, made


def _replaced(cells: Table, chosen: Mask, places: Sequence[Sequence[Place]]) -> tuple[Table, Ints]:
    """The cells with each chosen one replaced by some of other places, and how many stand for each."""
    counts = np.ones(len(cells), np.int64)
    counts[chosen] = [len(each) for each in places]
    cut = np.repeat(cells, counts)
    rows = np.flatnonzero(np.repeat(chosen, counts))
    if len(rows):
        cut["extent"][rows] = [extent for each in places for extent, _ in each]
        cut["offset"][rows] = [offset for each in places for _, offset in each]
    return cut, counts


def _split_local(
    program: Program, sources: Mapping[int, Factors], destinations: Mapping[int, Factors]
) -> tuple[Table, Table]:
    """The local copies' cells, cut alike on both sides."""
    pairs = [program.source_cells[program.local["source"]]]
    pairs.append(program.destination_cells[program.local["destination"]])
    chosen = np.isin(pairs[0]["transfer"], list(sources.keys() | destinations.keys()))
    both = []
    for a, b in zip(pairs[0][chosen], pairs[1][chosen], strict=True):
        number = int(a["transfer"])
        known = sources.get(number) or destinations[number]
        plain = tuple((0,) for _ in known)
        first = _own(a, sources.get(number, plain))
        second = _own(b, destinations.get(number, plain))
        both.append(_places(*first, second[1]))
    made = [
        _replaced(cells, chosen, [[pair[side] for pair in each] for each in both])[0]
        for side, cells in enumerate(pairs)
    ]
    return made[0], made[1]


def _own(cell: np.void, factors: Factors) -> tuple[tuple[int, ...], Side]:
    """A cell's extent in the dimensions of its layout, and where it lies in the array."""
    unused = WIDTH - len(factors)
    return tuple(cell["extent"].tolist()[unused:]), (tuple(cell["offset"].tolist()[unused:]), factors)


@lru_cache(maxsize=1 << 14)
def _places(extent: tuple[int, ...], *sides: Side) -> tuple[tuple[Place, ...], ...]:
    """Boxes that make up a cell in row-major order, and the place of each in one array or in both of a copy.

    A box of the array is a box of the layout in the same order only while it stays, in every split dimension, within
    one group, or takes whole groups. So each dimension is cut by itself, where its first group ends and its last one
    starts. But order runs through the last dimension first: once a dimension is cut in several ranges, the box of the
    dimensions before it would visit its first range for all their indices and then come back for the second. Hence
    the indices before the last cut dimension are taken one by one.

    Args:
        extent: Of the cell, in the dimensions of its layout.
        *sides: Where it lies in one array or two.
    """
    runs, narrow = [], -1  # the last dimension before which indices are taken one by one
    for d, n in enumerate(extent):
        ways = [(factors[d], offset[d]) for offset, factors in sides]
        # Whole groups may stay together where all arrays have them in the same places.
        alike = len({(f[1:], start % max(1, math.prod(f[1:]))) for f, start in ways}) == 1
        runs.append(_runs(n, ways, alike))
        if len(runs[-1]) > 1 or not alike:
            narrow = d
    chosen = [[(i, 1) for i in range(n)] if d < narrow else runs[d] for d, n in enumerate(extent)]
    return tuple(
        tuple(_place(box, offset, factors) for offset, factors in sides) for box in itertools.product(*chosen)
    )


def _runs(n: int, ways: Sequence[tuple[tuple[int, ...], int]], together: bool) -> list[Run]:
    """Cut ``0 … n`` of a dimension until every run is a box in every array.

    Args:
        n: Extent of the cell.
        ways: For each array the factors of the dimension, and where the cell starts in it.
        together: Whether whole groups that follow each other may be one box.
    """
    runs = [(0, n)]
    for factors, offset in ways:
        cuts = [(start, _boxes(factors, offset + start, length, together)) for start, length in runs]
        runs = [(start + at, length) for start, boxes in cuts for at, length in boxes]
    return runs


def _boxes(factors: tuple[int, ...], start: int, n: int, together: bool) -> list[Run]:
    """Cut ``start … start + n`` of a split dimension in boxes: the end of a group, whole groups, the start of one."""
    inner = math.prod(factors[1:])
    if len(factors) == 1 or not n:
        return [(0, n)]
    # In order: what is left of the group it starts in, whole groups, the part of the last one. Each end is cut again
    # by the finer factors; whole groups are a box as they are, and stay one if the other array has them alike.
    head = min(-start % inner, n)
    body = (n - head) // inner * inner
    groups = [(head, body)] if together and body else []
    ranges = [(0, head), *((head + i, inner) for i in range(0, 0 if together else body, inner))]
    cuts = [
        (at, _boxes(factors[1:], (start + at) % inner, length, together)) for at, length in ranges if length
    ]
    runs = [(at + first, length) for at, boxes in cuts for first, length in boxes] + groups
    if head + body < n:
        rest = _boxes(factors[1:], 0, n - head - body, together)
        runs += [(head + body + first, length) for first, length in rest]
    return runs


def _place(runs: Sequence[Run], offset: Sequence[int], factors: Factors) -> Place:
    """Extent and offset of a box in an array's dimensions, padded on the left to the width of a cell."""
    extent: list[int] = []
    at: list[int] = []
    for (first, n), start, split in zip(runs, offset, factors, strict=True):
        index, left = start + first, n
        for i in range(1, len(split)):
            inner = math.prod(split[i:])
            at.append(index // inner)
            extent.append(max(1, left // inner))
            index, left = index % inner, min(left, inner)
        at.append(index)
        extent.append(left)
    pad = WIDTH - len(extent)
    return (*[1] * pad, *extent), (*[0] * pad, *at)
