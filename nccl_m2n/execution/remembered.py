# SPDX-License-Identifier: Apache-2.0
"""Bindings that are remembered, so that ranks can name one to each other."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from nccl_m2n.execution.bound import Bound
from nccl_m2n.planning import Topology
from nccl_m2n.transport.base import Transport

MAX_BOUND = 256  # bindings of a transport, as far as their staging stays below this many bytes
MAX_STAGING_BYTES = 512 << 20


@dataclass(frozen=True)
class _Remembered:
    key: Hashable  # what this process's ranks said when it was made
    bound: Bound
    staging_bytes: (
        int  # of the rank that needs most: what the plan says, for each rank has to come to the same
    )


@dataclass
class Bindings:
    """Bindings over one transport, by numbers that mean the same on every rank.

    Bindings are numbered in the order in which they were made, by all ranks together, so a number means the same
    one on all of them. What a rank itself passed is no such name: its peers may have passed something else.
    """

    topology: Topology | None = None
    made: int = 0
    arrays: object = None  # of the last call: a device may still be at work on them
    _kept: OrderedDict[int, _Remembered] = field(default_factory=OrderedDict)  # the last used at the end
    _numbers: dict[Hashable, list[int]] = field(default_factory=dict)
    _staging_bytes: int = 0

    def domains(self, transport: Transport) -> Topology:
        """The topology that the transport finds. Collective at the first call."""
        if self.topology is None:
            self.topology = Topology(transport.discover_domains())
        return self.topology

    def numbers(self, key: Hashable) -> Sequence[int]:
        """The bindings that were made when this process's ranks said the same as now."""
        return self._numbers.get(key, ())

    def keep(self, key: Hashable, bound: Bound) -> None:
        """Remember a binding that was made just now; forget the one not used for longest, the same on every rank."""
        self.made += 1
        one = _Remembered(key, bound, int(bound.plan.staging.max(initial=0)))
        self._kept[self.made] = one
        self._staging_bytes += one.staging_bytes
        self._numbers.setdefault(key, []).append(self.made)
        while len(self._kept) > MAX_BOUND or (
            len(self._kept) > 1 and self._staging_bytes > MAX_STAGING_BYTES
        ):
            self._forget(next(iter(self._kept)))

    def recall(self, number: int) -> Bound:
        """A binding by its number; it is the last to be forgotten now."""
        self._kept.move_to_end(number)
        return self._kept[number].bound

    def _forget(self, number: int) -> None:
        one = self._kept.pop(number)
        self._staging_bytes -= one.staging_bytes
        self._numbers[one.key].remove(number)
        if not self._numbers[one.key]:
            del self._numbers[one.key]
        one.bound.close()

    def forget_all(self, made: int) -> None:
        """Begin anew where the ranks have lost count of each other, as after an error on one of them alone."""
        for number in list(self._kept):
            self._forget(number)
        self.made = made
