# SPDX-License-Identifier: Apache-2.0
"""Two sides of a move: how many ranks they take, and how these lie in NVLink domains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from nccl_m2n.cli.arguments import SIDES
from nccl_m2n.errors import CommandError
from nccl_m2n.planning import Topology


class Ranked(Protocol):
    """Parallel sizes that print themselves."""

    @property
    def size(self) -> int:
        """Its number of ranks."""


Kind = TypeVar("Kind", bound=Ranked)


@dataclass(frozen=True)
class Sides(Generic[Kind]):
    """The source from rank 0 on, the destination from a later rank on, or from rank 0 on as well."""

    source: Kind
    destination: Kind
    first: int  # the destination's first rank

    @property
    def ranks(self) -> int:
        """Ranks of both sides together."""
        return int(max(self.source.size, self.first + self.destination.size))

    def require(self, ranks: int, remedy: str) -> None:
        """Refuse to go on with fewer ranks than both sides take.

        Args:
            ranks: How many there are.
            remedy: How to get `{}` of them.

        Raises:
            CommandError: Saying how many are needed.
        """
        if ranks >= self.ranks:
            return
        both = max(self.source.size, self.destination.size)
        text = (
            f"the source {self.source} needs {self.source.size} ranks and the destination {self.destination} "
        )
        text += f"needs {self.destination.size}"
        if self.first:
            text += f" others, {self.ranks} in all; there are {ranks}: {remedy.format(self.ranks)}"
            text += f", or let both sides share ranks with --overlap ({both})"
        else:
            text += f" of the same, {self.ranks} in all; there are {ranks}: {remedy.format(self.ranks)}"
        raise CommandError(text)

    def topology(self, domain: int | str | None, found: Sequence[Sequence[int]] = ()) -> tuple[Topology, str]:
        """The NVLink domains to plan for, and where they come from.

        Args:
            domain: Ranks of a domain, `SIDES`, or None for what was found.
            found: What the transport found.
        """
        if domain == SIDES:
            if not self.first:
                raise CommandError(f"--domain {SIDES} expects sides that are apart, got --overlap")
            sides = [range(self.first), range(self.first, self.ranks)]
            return Topology(sides), "planned as if each side were a domain of its own"
        if domain is not None:
            return Topology.regular(self.ranks, int(domain)), "as asked"
        used = [[rank for rank in ranks if rank < self.ranks] for ranks in found]
        return Topology([ranks for ranks in used if ranks]), "as the transport finds them"

    def domain_for(
        self, asked: int | str | None, memory: str, found: Sequence[Sequence[int]]
    ) -> int | str | None:
        """What stands for a domain where none was asked for.

        One machine's host memory is no NVLink: there one plans as for the two machines it stands for.
        """
        one_machine = memory == "host" and len(found) == 1 and self.first
        return SIDES if asked is None and one_machine else asked

    def where(self, first: int, side: Ranked) -> str:
        """The ranks of a side, for people."""
        return f"ranks {first}-{first + side.size - 1}" if side.size > 1 else f"rank {first}"

    def way(self) -> str:
        """From where to where, for people."""
        source = f"{self.source} on {self.where(0, self.source)}"
        return f"{source} to {self.destination} on {self.where(self.first, self.destination)}"
