# SPDX-License-Identifier: Apache-2.0
"""Bundles: all bytes, over all tensors, with the same holders and the same needers.

A bundle is one byte stream: tensors by the power-of-two part of their element size, largest first (so
that every cell starts at a multiple of it and no padding is needed), then in the plan's order;
within a tensor its cells in the sweep's order. Transfers with equal layouts share a *template*, so a
model of thousands of layers of a dozen shapes costs a dozen overlaps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from nccl_m2n.checks import MAX_WHOLE
from nccl_m2n.dtypes import element_unit
from nccl_m2n.errors import PlanError
from nccl_m2n.layout import Layout
from nccl_m2n.layout.intervals import expand, lengths, offsets, opens
from nccl_m2n.planning.overlap import Cells, overlap
from nccl_m2n.planning.ranksets import RankSets
from nccl_m2n.planning.transfer import Transfer
from nccl_m2n.typing import Ints, Table

BUNDLE = np.dtype(
    [
        ("bytes", "i8"),  # length of the stream
        ("holders", "i8"),  # rank set that has the bytes
        ("needers", "i8"),  # rank set that wants them
        ("remote", "i8"),  # rank set of the needers that are not holders too
    ]
)

# The cells of one template that lie in one bundle: a section of its stream, once for each of the template's transfers.
SECTION = np.dtype(
    [
        ("template", "i8"),
        ("bundle", "i8"),
        ("first", "i8"),  # first of its cells in the template's sorted cells
        ("cells", "i8"),
        ("bytes", "i8"),
    ]
)


@dataclass(frozen=True)
class Template:
    """What all transfers with the same layouts and wire element size share."""

    source: Layout
    destination: Layout
    item: int  # bytes of an element on the wire
    cells: Cells
    order: Ints  # cells sorted by bundle
    offset: Ints  # (cells,) byte offset of each sorted cell within its section
    transfers: Ints  # numbers of the transfers, in stream order


@dataclass(frozen=True)
class Bundles:
    """The bundles of a plan and what they are made of."""

    table: Table  # BUNDLE
    sections: Table  # SECTION, by template and then by bundle
    templates: tuple[Template, ...]
    stream_order: Ints  # (transfers,) position of each transfer in every stream
    sets: RankSets

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Every rank in a layout of a transfer, ascending; those that hold and need nothing included."""
        layouts = {side for t in self.templates for side in (t.source, t.destination)}
        return tuple(sorted({rank for layout in layouts for rank in layout.ranks}))

    @property
    def world(self) -> int:
        """One more than the highest rank."""
        return self.ranks[-1] + 1 if self.ranks else 0

    @cached_property
    def flat(self) -> FlatTemplates:
        """All templates' tables, end to end."""
        none = np.zeros(0, np.int64)
        return FlatTemplates(
            np.array([len(t.transfers) for t in self.templates], np.int64),
            np.concatenate([none, *[t.transfers for t in self.templates]]),
            np.cumsum([0] + [len(t.order) for t in self.templates]),
            np.concatenate([none, *[t.order for t in self.templates]]),
            np.concatenate([none, *[t.offset for t in self.templates]]),
            np.concatenate([none, *[(t.cells.size * t.item)[t.order] for t in self.templates]]),
        )


@dataclass(frozen=True)
class FlatTemplates:
    """The tables of all templates, end to end."""

    uses: Ints  # (templates,) transfers of each
    transfers: Ints  # transfer numbers
    first: Ints  # (templates,) where each one's cells start below
    cell: Ints  # cell numbers, sorted by bundle
    offset: Ints  # bytes within the section
    size: Ints  # bytes


def make_bundles(transfers: Sequence[Transfer]) -> Bundles:
    """Group the cells of all transfers by who holds and who needs them."""
    members = _group_transfers(transfers)
    _refuse_too_much(transfers, members)
    order = sorted(range(len(transfers)), key=lambda i: -element_unit(transfers[i].wire_size))
    stream_order = np.empty(len(transfers), np.int64)
    stream_order[order] = np.arange(len(transfers))
    sets = RankSets()
    found = [_cells(transfers[m[0]]) for m in members]
    pairs = [_set_pairs(cells, sets) for cells in found]
    key = np.concatenate([np.zeros(0, np.int64), *[h * len(sets) + n for h, n in pairs]])
    names, bundle = np.unique(key, return_inverse=True)
    ends = np.cumsum([0] + [len(h) for h, _ in pairs])
    templates, sections = [], []
    for number, (cells, group) in enumerate(zip(found, members, strict=True)):
        first = transfers[group[0]]
        mine = bundle[ends[number] : ends[number + 1]]
        sort = np.argsort(mine, kind="stable")
        size = cells.size[sort] * first.wire_size
        section = _sections(number, mine[sort], size)
        before = offsets(size)
        offset = before - np.repeat(before[section["first"]], section["cells"])
        users = np.array(sorted(group, key=lambda i: stream_order[i]), np.int64)
        templates.append(
            Template(first.source, first.destination, first.wire_size, cells, sort, offset, users)
        )
        sections.append(section)
    table = np.zeros(len(names), BUNDLE)
    table["holders"], table["needers"] = np.divmod(names, max(len(sets), 1))
    table["remote"] = _remote_needers(table, sets)
    every = np.concatenate([np.zeros(0, SECTION), *sections])
    uses = np.array([len(t.transfers) for t in templates], np.int64)
    np.add.at(table["bytes"], every["bundle"], every["bytes"] * uses[every["template"]])
    return Bundles(table, every, tuple(templates), stream_order, sets)


def _refuse_too_much(transfers: Sequence[Transfer], members: Sequence[Sequence[int]]) -> None:
    """Keep every sum of bytes that a plan counts within 64 bits."""
    firsts = [(len(group), transfers[group[0]]) for group in members]
    needed = sum(n * math.prod(t.shape) * t.wire_size * len(t.destination.ranks) for n, t in firsts)
    if needed >= MAX_WHOLE:
        raise PlanError(
            f"expected a plan that moves fewer than 2**62 bytes in all, got {needed}; plan a part of it"
        )


def _cells(transfer: Transfer) -> Cells:
    try:
        return overlap(transfer.source, transfer.destination)
    except PlanError as error:
        raise PlanError(f"tensor {transfer.name!r}: {error}") from None


def _group_transfers(transfers: Sequence[Transfer]) -> list[list[int]]:
    """Numbers of the transfers that share a template, refusing two of one name."""
    names: dict[str, int] = {}
    groups: dict[tuple[Layout, Layout, int], list[int]] = {}
    for number, transfer in enumerate(transfers):
        if names.setdefault(transfer.name, number) != number:
            raise PlanError(
                f"expected one transfer of each name, got {transfer.name!r} twice: transfers "
                f"{names[transfer.name]} and {number}; give each its own name"
            )
        groups.setdefault((transfer.source, transfer.destination, transfer.wire_size), []).append(number)
    return list(groups.values())


def _set_pairs(cells: Cells, sets: RankSets) -> tuple[Ints, Ints]:
    """Numbers of the holder set and of the needer set of each cell."""
    made = []
    for which, ranks in ((cells.holder, cells.holders), (cells.needer, cells.needers)):
        used, inverse = np.unique(which, return_inverse=True)
        members = [ranks[i] for i in used.tolist()]
        counts = np.array([len(m) for m in members], np.int64)
        made.append(sets.numbers(np.concatenate([np.zeros(0, np.int64), *members]), counts)[inverse])
    return made[0], made[1]


def _remote_needers(table: Table, sets: RankSets) -> Ints:
    """Rank set of each bundle's needers that are not holders too."""
    every = sets.table()
    holders, needers = (every.members(np.unique(table[side]))[1] for side in ("holders", "needers"))
    if not np.isin(holders, needers).any():
        return table["needers"]
    pairs = zip(table["holders"].tolist(), table["needers"].tolist(), strict=True)
    return np.array(
        [sets.number(np.setdiff1d(sets[n], sets[h], assume_unique=True)) for h, n in pairs], np.int64
    )


def _sections(template: int, bundle: Ints, size: Ints) -> Table:
    """Neighbours of equal bundle numbers."""
    first = np.flatnonzero(opens(bundle))
    section = np.zeros(len(first), SECTION)
    section["template"], section["bundle"], section["first"] = template, bundle[first], first
    section["cells"] = lengths(first, len(bundle))
    section["bytes"] = np.add.reduceat(size, first) if len(first) else 0
    return section


@dataclass(frozen=True)
class StreamCells:
    """The cells of some bundles in stream order, with where each lies."""

    bundle: Ints
    start: Ints  # byte offset in the bundle's stream
    size: Ints  # bytes
    transfer: Ints
    template: Ints
    cell: Ints  # number in the template's cells


def stream_cells(bundles: Bundles, wanted: Ints) -> StreamCells:
    """The cells of the `wanted` bundles (numbers, ascending), by bundle and position in its stream."""
    mask = np.zeros(len(bundles.table), bool)
    mask[wanted] = True
    sections = bundles.sections[mask[bundles.sections["bundle"]]]
    flat = bundles.flat
    row, k = expand(flat.uses[sections["template"]])
    section = sections[row]
    transfer = flat.transfers[offsets(flat.uses)[section["template"]] + k]
    order = np.lexsort((bundles.stream_order[transfer], section["bundle"]))
    section, transfer = section[order], transfer[order]
    start = offsets(section["bytes"])
    first = np.flatnonzero(opens(section["bundle"]))
    start -= np.repeat(start[first], lengths(first, len(section)))
    row, k = expand(section["cells"])
    at = (flat.first[section["template"]] + section["first"])[row] + k
    return StreamCells(
        section["bundle"][row],
        start[row] + flat.offset[at],
        flat.size[at],
        transfer[row],
        section["template"][row],
        flat.cell[at],
    )
