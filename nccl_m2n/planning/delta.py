# SPDX-License-Identifier: Apache-2.0
"""All chunks of a plan as numbers, and the wide rounds in which they move when only some of their bytes changed.

When little changed, a round's messages are small, and rounds would cost more than bytes do. Once all ranks know how
much of each chunk changed, all of them run the same few *wide rounds* in place of the plan's: each takes the chunks of
some consecutive rounds, as many as the staging of every rank holds.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from nccl_m2n.dtypes import element_unit
from nccl_m2n.layout.intervals import expand, offsets
from nccl_m2n.planning.delta_sizes import SECTION, Sizes, wire_sizes
from nccl_m2n.planning.plans import Plan
from nccl_m2n.planning.rounds import chunk_table
from nccl_m2n.typing import Bools, Ints

WIDE_BYTES = (
    2 << 20
)  # a wide round brings the busiest rank so many, where there are: fewer would cost more than they take
CLASSES = (16, 8, 4, 2, 1)  # the element units in the order in which a bundle's stream has them
WIDEST_UNIT = 8  # bytes


@dataclass(frozen=True)
class Chunks:
    """Every chunk of a plan, flow by flow, and every hop of every chunk."""

    flow: Ints  # (chunks,)
    sender: Ints  # (chunks,)
    start: Ints  # (chunks,) the round of the first hop
    nbytes: Ints  # (chunks,)
    unit: Ints  # (chunks,) bytes of the units that are compared
    whole: Bools  # (chunks,) goes as it is: elements that are cast are larger than its unit
    first: Ints  # (flows,) number of each flow's first chunk
    hop_chunk: Ints  # (hops of chunks,)
    hop_source: Ints
    hop_destination: Ints
    hop_depth: Ints
    hop_network: Bools
    world: int
    rounds: int  # in which first hops start
    depth: int

    @classmethod
    def of(cls, plan: Plan) -> Chunks:
        """The chunks of a plan."""
        flows, hops = plan.routes.flows, plan.routes.hops
        row, lo, hi, start = chunk_table(flows, plan.chunk_rounds)
        unit, whole = _units(plan, flows["bundle"][row], lo, hi)
        first = offsets(flows["chunks"])
        hop, k = expand(flows["chunks"][hops["flow"]])
        return cls(
            row,
            flows["sender"][row],
            start,
            hi - lo,
            unit,
            whole,
            first,
            first[hops["flow"][hop]] + k,
            hops["source"][hop],
            hops["destination"][hop],
            hops["depth"][hop],
            hops["network"][hop],
            plan.world,
            plan.chunk_rounds,
            plan.depth,
        )

    def reaching(self, ranks: Collection[int]) -> Bools:
        """The chunks that some ranks receive."""
        found = np.zeros(len(self.sender), bool)
        found[self.hop_chunk[np.isin(self.hop_destination, list(ranks))]] = True
        return found

    def sizes(self, entries: Ints) -> Sizes:
        """Form and wire bytes of every chunk, by how many units changed."""
        return wire_sizes(self.nbytes, self.unit, entries)

    def loads(self, wide: Ints, nbytes: Ints) -> tuple[Ints, Ints]:
        """Staging that each rank needs in each wide round for what it packs and for what it receives.

        Args:
            wide: (rounds,) the wide round that stands for each round in which first hops start.
            nbytes: (chunks,) bytes on the wire.

        Returns:
            Two arrays (ranks, wide rounds), in bytes.
        """
        count = int(wide.max(initial=-1)) + 1 + self.depth
        at = wide[self.start]
        padded = -(-nbytes // SECTION) * SECTION
        packed = np.bincount(self.sender * count + at, padded, self.world * count)
        moved = self.hop_destination * count + at[self.hop_chunk] + self.hop_depth
        received = np.bincount(moved, padded[self.hop_chunk], self.world * count)
        shape = (self.world, count)
        return packed.reshape(shape).astype(np.int64), received.reshape(shape).astype(np.int64)

    def wide_rounds(self, nbytes: Ints, slots: tuple[Ints, Ints]) -> Ints:
        """The wide round of each round, as wide as staging allows and as there is any use in.

        Args:
            nbytes: (chunks,) bytes on the wire.
            slots: (ranks,) bytes of a slot for what is packed, and for what is received.
        """
        rounds = np.arange(self.rounds)
        width, loads = 1, self.loads(rounds, nbytes)
        while width < self.rounds and int((loads[0] + loads[1]).max(initial=0)) < WIDE_BYTES:
            loads = self.loads(rounds // (2 * width), nbytes)
            if any((load.max(axis=1) > slot).any() for load, slot in zip(loads, slots, strict=True)):
                break
            width *= 2
        return rounds // width

    def dense_slots(self) -> tuple[Ints, Ints]:
        """(ranks,) The slots that the plan's own rounds need, for what is packed and for what is received."""
        loads = self.loads(np.arange(self.rounds), self.nbytes)
        return loads[0].max(axis=1, initial=0), loads[1].max(axis=1, initial=0)


@dataclass(frozen=True)
class WideRun:
    """What all ranks know of one run."""

    chunks: Chunks
    entries: Ints  # (chunks,) how many units changed
    sizes: Sizes
    wide: Ints  # (rounds,) the wide round in which the chunks of each round start

    @classmethod
    def of(cls, chunks: Chunks, entries: Ints, slots: tuple[Ints, Ints]) -> WideRun:
        """Size every chunk, and choose the wide rounds; chunks that cannot be taken apart go as they are."""
        entries = np.where(chunks.whole & (entries > 0), chunks.nbytes // chunks.unit, entries)
        sizes = chunks.sizes(entries)
        return cls(chunks, entries, sizes, chunks.wide_rounds(sizes.nbytes, slots))

    @property
    def rounds(self) -> int:
        """All wide rounds: those in which first hops start, and those until the last hop."""
        return int(self.wide[-1]) + 1 + self.chunks.depth if len(self.wide) else 0


def _units(plan: Plan, bundle: Ints, lo: Ints, hi: Ints) -> tuple[Ints, Bools]:
    """The unit of each chunk, that of its smallest elements, and whether it holds larger ones that are cast."""
    number, bundles = {unit: i for i, unit in enumerate(CLASSES)}, plan.bundles
    nbytes = np.zeros((len(bundles.table), len(CLASSES)), np.int64)
    cast = np.zeros(nbytes.shape, bool)
    for k, template in enumerate(bundles.templates):
        sections = bundles.sections[bundles.sections["template"] == k]
        column = number[element_unit(template.item)]
        np.add.at(nbytes[:, column], sections["bundle"], sections["bytes"] * len(template.transfers))
        if any(t.dtype != t.destination_dtype for t in map(plan.transfers.__getitem__, template.transfers)):
            cast[sections["bundle"], column] = True
    stop = np.cumsum(nbytes, axis=1)[bundle]
    last = (stop < hi[:, None]).sum(axis=1)
    unit = np.minimum(np.array(CLASSES)[last], WIDEST_UNIT)
    within = (stop > lo[:, None]) & (np.arange(len(CLASSES)) < last[:, None])
    larger = np.array(CLASSES) > unit[:, None]
    return unit, (within & larger & cast[bundle]).any(axis=1)
