# SPDX-License-Identifier: Apache-2.0
"""Bindings that are remembered, so that ranks can name one to each other."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field

from nccl_m2n.execution.bound import Bound
from nccl_m2n.planning import Topology
from nccl_m2n.transport.base import Transport

MAX_BOUND = 32  # bindings of a transport, as far as their staging stays below this many bytes
MAX_STAGING_BYTES = 512 << 20


@dataclass
class Bindings:
    """Bindings over one transport, by numbers that mean the same on every rank.

    Bindings are numbered in the order in which they were made, by all ranks together, so a number means the same
    one on all of them. What a rank itself passed is no such name: its peers may have passed something else.
    """

    topology: Topology | None = None
    bound: OrderedDict[int, Bound] = field(default_factory=OrderedDict)
    numbers: dict[Hashable, list[int]] = field(default_factory=dict)  # by what this process's ranks said then
    made: int = 0
    arrays: object = None  # of the last call: a device may still be at work on them

    def domains(self, transport: Transport) -> Topology:
        """The topology that the transport finds. Collective at the first call."""
        if self.topology is None:
            self.topology = Topology(transport.discover_domains())
        return self.topology

    def keep(self, key: Hashable, bound: Bound) -> None:
        """Remember a binding that was made just now; forget the oldest, the same ones on every rank."""
        self.made += 1
        self.bound[self.made] = bound
        self.numbers.setdefault(key, []).append(self.made)
        while len(self.bound) > MAX_BOUND or (len(self.bound) > 1 and self._staging() > MAX_STAGING_BYTES):
            self._forget(next(iter(self.bound)))

    def recall(self, number: int) -> Bound:
        """A binding by its number; it is the last to be forgotten now."""
        self.bound.move_to_end(number)
        return self.bound[number]

    def _staging(self) -> int:
        """Bytes of the ranks that need most: what the plans say, for each rank has to come to the same."""
        return sum(int(bound.plan.staging.max(initial=0)) for bound in self.bound.values())

    def _forget(self, number: int) -> None:
        self.bound.pop(number).close()
        self.numbers = {
            key: left for key, all_of in self.numbers.items() if (left := [n for n in all_of if n != number])
        }

    def forget_all(self, made: int) -> None:
        """Begin anew where the ranks have lost count of each other, as after an error on one of them alone."""
        for number in list(self.bound):
            self._forget(number)
        self.made = made
