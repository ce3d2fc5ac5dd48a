# SPDX-License-Identifier: Apache-2.0
"""What a simulation found, and how it prints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from nccl_m2n.planning import Plan
from nccl_m2n.simulation.links import Links
from nccl_m2n.text import align_table, bytes_text
from nccl_m2n.typing import Floats


@dataclass(frozen=True, eq=False, repr=False)
class Timeline:
    """When each rank is through with each round, and how long each link is busy; made by `simulate`."""

    plan: Plan
    links: Links
    model: Callable[[Plan, Links], Timeline]  # that found it, and finds the same of other plans
    network_bytes: int  # that cross it
    ends: Floats  # (rounds, world) seconds after the start at which a rank is through with a round
    finished: Floats  # (world,) seconds after the start at which a rank has unpacked everything
    busy: Floats  # (4, world) busy seconds of each rank's links, see below

    @property
    def seconds(self) -> float:
        """From the start until the last rank has all its bytes."""
        return float(self.finished.max(initial=0.0))

    @cached_property
    def round_seconds(self) -> Floats:
        """By round, seconds by which it moves the slowest rank on, shape (rounds,)."""
        return np.diff(self.ends.max(axis=1, initial=0.0), prepend=0.0)

    @property
    def network_sent(self) -> Floats:
        """Seconds for which each rank's NIC is busy sending, shape (world,)."""
        return np.asarray(self.busy[0])

    @property
    def network_received(self) -> Floats:
        """Seconds for which each rank's NIC is busy receiving, shape (world,)."""
        return np.asarray(self.busy[1])

    @property
    def nvlink_sent(self) -> Floats:
        """Seconds for which each rank is busy sending within its domain, shape (world,)."""
        return np.asarray(self.busy[2])

    @property
    def nvlink_received(self) -> Floats:
        """Seconds for which each rank is busy receiving within its domain, shape (world,)."""
        return np.asarray(self.busy[3])

    @property
    def wire_seconds(self) -> float:
        """What the bytes of the busiest link alone would take: no round, no waiting, no packing."""
        return float(self.busy.max(initial=0.0))

    @property
    def busiest(self) -> int:
        """The rank that has the busiest link; the lowest of several."""
        return int(self.busy.max(axis=0, initial=0.0).argmax()) if self.busy.size else 0

    @property
    def gbytes(self) -> float:
        """GB/s at which destination bytes arrive, all ranks together; local copies not counted."""
        traffic = self.plan.traffic()
        moved = traffic.network_bytes + traffic.nvlink_bytes
        return moved / self.seconds / 1e9 if self.seconds else 0.0

    def compare(self) -> list[Timeline]:
        """The same transfers over the same links by the other methods that `print(plan)` lists."""
        return [self.model(plan, self.links) for plan in self.plan.compared()]

    def __repr__(self) -> str:
        return f"<Timeline: {seconds_text(self.seconds)} in {len(self.ends)} rounds>"

    def __str__(self) -> str:
        return f"{self.plan.title}\n{_speeds(self.links)}\n{align_table(timeline_rows(self))}"


LABELS = (
    "seconds",
    "  of ours",
    "busiest link alone",
    "  its share",
    "NIC, busiest",
    "NIC, mean",
    "NVLink, busiest",
    "network",
    "rounds",
    "longest round",
)


def timeline_rows(timeline: Timeline) -> list[list[str]]:
    """The table's cells: a header, then one row a quantity; labels first, then one column a method."""
    columns = [timeline, *timeline.compare()]
    header = ["", *[c.plan.figures().name for c in columns]]
    rows = zip(LABELS, *[_column(c, timeline.seconds) for c in columns], strict=True)
    return [header, *map(list, rows)]


def seconds_text(seconds: float) -> str:
    """A duration for people."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}" if seconds < 1000 * scale else f"{seconds:.0f} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def _speeds(links: Links) -> str:
    return (
        f"NIC {links.nic_gbytes:g} GB/s, NVLink {links.nvlink_gbytes:g} GB/s each way; "
        f"a round {seconds_text(links.round_seconds)}, packing {links.pack_gbytes:g} GB/s"
    )


def _column(timeline: Timeline, ours: float) -> list[str]:
    nic = np.maximum(timeline.network_sent, timeline.network_received)
    nvlink = np.maximum(timeline.nvlink_sent, timeline.nvlink_received)
    share = timeline.wire_seconds / timeline.seconds if timeline.seconds else 0.0
    return [
        seconds_text(timeline.seconds),
        f"{timeline.seconds / ours:.2f} ×" if ours else "–",
        seconds_text(timeline.wire_seconds),
        f"{100 * share:.1f} %",
        seconds_text(float(nic.max(initial=0.0))),
        seconds_text(float(nic[nic > 0].mean()) if nic.any() else 0.0),
        seconds_text(float(nvlink.max(initial=0.0))),
        bytes_text(timeline.network_bytes),
        f"{len(timeline.ends)}",
        seconds_text(float(timeline.round_seconds.max(initial=0.0))),
    ]
