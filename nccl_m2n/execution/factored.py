# SPDX-License-Identifier: Apache-2.0
"""Arrays with more dimensions than their layout: one dimension seen as several, in row-major order.

Fused storage needs them: the query rows of an interleaved QKV matrix are a strided view of shape (groups, rows,
columns), where the layout speaks of (groups × rows, columns). Cells are cut where a group ends; a cut cell
is a box again in the array's own dimensions, and no copy or message has to know.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from nccl_m2n.layout.intervals import Ints, overlaps
from nccl_m2n.planning.places import CELL
from nccl_m2n.planning.program import LOCAL, Program

Factors: TypeAlias = tuple[tuple[int, ...], ...]  # for each dimension of the layout, those of the array
Rectangle: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]  # start within the cell, extent


def factor_shape(shape: Sequence[int], local_shape: Sequence[int]) -> Factors | None:
    """How the dimensions of an array make up those of a local shape; None where they do not.

    Example:
        >>> from nccl_m2n.execution.factored import factor_shape
        >>> factor_shape((4, 6, 5), (24, 5))
        ((4, 6), (5,))
    """
    rest, factors = list(shape), []
    for extent in local_shape:
        taken = [rest.pop(0)] if rest else [1]
        while math.prod(taken) < extent and rest:
            taken.append(rest.pop(0))
        if math.prod(taken) != extent:
            return None
        factors.append(tuple(taken))
    return None if rest else tuple(factors)


def split_factored(
    program: Program, sources: Mapping[int, Factors], destinations: Mapping[int, Factors], item: Ints
) -> Program:
    """Cut the cells of arrays with more dimensions than their layout.

    Args:
        program: What a rank does.
        sources: By transfer, how the dimensions of its source array are split, where they are.
        destinations: Likewise.
        item: Bytes of an element on the wire, by transfer.
    """
    if not sources and not destinations:
        return program
    received = program.blocks["received"][program.parts["block"]]
    source_cells, packed = _split_side(program.source_cells, program.parts[~received], sources, item)
    destination_cells, unpacked = _split_side(
        program.destination_cells, program.parts[received], destinations, item
    )
    pairs, local_source, local_destination = _split_local(program, sources, destinations)
    parts = np.concatenate([packed, unpacked])
    parts = parts[np.argsort(parts["block"], kind="stable")]
    blocks = program.blocks.copy()
    blocks["parts"] = np.bincount(parts["block"], minlength=len(blocks))
    blocks["first_part"] = np.cumsum(blocks["parts"]) - blocks["parts"]
    local = np.zeros(pairs, LOCAL)
    local["source"] = len(source_cells) + np.arange(pairs)
    local["destination"] = len(destination_cells) + np.arange(pairs)
    return replace(
        program,
        blocks=blocks,
        parts=parts,
        source_cells=np.concatenate([source_cells, local_source]),
        destination_cells=np.concatenate([destination_cells, local_destination]),
        local=local,
    )


def _split_side(
    cells: np.ndarray[Any, Any], parts: np.ndarray[Any, Any], factors: Mapping[int, Factors], item: Ints
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """One side's cells cut, and the parts of the cut cells."""
    rows = [_cut_cell(cell, factors, None) for cell in cells]
    cut = _cells([row for group in rows for row in group])
    counts = np.array([len(group) for group in rows], np.int64)
    size = cut["extent"].prod(axis=1) * item[cut["transfer"]]
    stop = np.cumsum(size)  # all cells' streams laid end to end; their cuts follow each other in them
    first = np.cumsum(counts) - counts
    base = np.append(stop - size, stop[-1:])[first]
    part, piece, lo, hi = overlaps(
        stop - size, stop, base[parts["cell"]] + parts["start"], base[parts["cell"]] + parts["stop"]
    )
    made = parts[part].copy()
    made["cell"], made["start"], made["stop"] = piece, lo - (stop - size)[piece], hi - (stop - size)[piece]
    made["offset"] += lo - (base[parts["cell"]] + parts["start"])[part]
    return cut, made


def _split_local(
    program: Program, sources: Mapping[int, Factors], destinations: Mapping[int, Factors]
) -> tuple[int, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The local copies' cells, cut at the groups of both sides."""
    rows: list[Any] = []
    for source, destination in program.local.tolist():
        a, b = program.source_cells[source], program.destination_cells[destination]
        here = _cut_cell(a, sources, (b, destinations))
        rows += zip(here, _cut_cell(b, destinations, (a, sources)), strict=True)
    return len(rows), _cells([a for a, _ in rows]), _cells([b for _, b in rows])


def _cells(rows: Sequence[Any]) -> np.ndarray[Any, Any]:
    return np.array(rows, CELL) if rows else np.zeros(0, CELL)


def _cut_cell(cell: Any, factors: Mapping[int, Factors], other: Any) -> list[Any]:
    """The pieces of one cell, in the order of its stream and in the array's dimensions."""
    transfer = int(cell["transfer"])
    mine = factors.get(transfer)
    theirs = None if other is None else other[1].get(transfer)
    if mine is None and theirs is None:
        return [(transfer, cell["extent"], cell["offset"])]
    ndim = len(mine or theirs or ())
    extent, offset = tuple(cell["extent"].tolist()[-ndim:]), tuple(cell["offset"].tolist()[-ndim:])
    grains = [_grains(mine, offset)] if mine else []
    if theirs:
        grains.append(_grains(theirs, tuple(other[0]["offset"].tolist()[-ndim:])))
    pieces = []
    for start, shape in _rectangles(extent, tuple(grains)):
        at = [o + s for o, s in zip(offset, start, strict=True)]
        pieces.append((transfer, *_in_array(at, shape, mine or tuple((0,) for _ in shape))))
    return pieces


def _grains(factors: Factors, offset: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """In each dimension the length of a group (0: not split) and where in one the cell starts."""
    return tuple((f[-1], o % f[-1]) if len(f) > 1 else (0, 0) for f, o in zip(factors, offset, strict=True))


@lru_cache(maxsize=4096)
def _rectangles(
    extent: tuple[int, ...], grains: tuple[tuple[tuple[int, int], ...], ...]
) -> tuple[Rectangle, ...]:
    """Boxes that make up a cell in row-major order, none of which crosses the end of a group."""
    last = max((d for g in grains for d, (length, _) in enumerate(g) if length), default=-1)
    spans = [[(i, 1) for i in range(n)] for n in extent[:last]]
    if last >= 0:
        n = extent[last]
        cuts = {0, n} | {x for g in grains for x in _group_ends(n, *g[last])}
        spans.append([(a, b - a) for a, b in itertools.pairwise(sorted(cuts))])
    spans += [[(0, n)] for n in extent[last + 1 :]]
    return tuple(
        (tuple(a for a, _ in chosen), tuple(n for _, n in chosen)) for chosen in itertools.product(*spans)
    )


def _group_ends(extent: int, length: int, start: int) -> range:
    return range(length - start, extent, length) if length else range(0)


def _in_array(at: Sequence[int], shape: Sequence[int], factors: Factors) -> tuple[list[int], list[int]]:
    """Extent and offset of a piece in the array's dimensions, padded on the left to the width of a cell."""
    extent: list[int] = []
    offset: list[int] = []
    for index, n, split in zip(at, shape, factors, strict=True):
        extent += [1] * (len(split) - 1) + [n]
        offset += [index] if len(split) == 1 else [int(i) for i in np.unravel_index(index, split)]
    pad = CELL["extent"].shape[0] - len(extent)
    return [1] * pad + extent, [0] * pad + offset
