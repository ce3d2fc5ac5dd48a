# SPDX-License-Identifier: Apache-2.0
"""From a model and two sets of parallel sizes to the transfers between them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from nccl_m2n.cli.arguments import SIDES
from nccl_m2n.cli.model import Model
from nccl_m2n.errors import CommandError
from nccl_m2n.planning import Plan, Topology, Transfer, plan
from nccl_m2n.refit import Parallelism, layouts


@dataclass(frozen=True)
class Problem:
    """A whole model's move from one side to the other."""

    model: Model
    source: Parallelism
    destination: Parallelism
    first: int  # the destination's first rank
    staging_bytes: int

    @classmethod
    def of(cls, arguments: argparse.Namespace, model: Model) -> Problem:
        """What the arguments ask for."""
        first = 0 if arguments.overlap else arguments.source.size
        return cls(model, arguments.source, arguments.destination, first, arguments.staging_mib << 20)

    @property
    def ranks(self) -> int:
        """Ranks of both sides together."""
        return max(self.source.size, self.first + self.destination.size)

    @cached_property
    def transfers(self) -> list[Transfer]:
        """One for each parameter.

        Raises:
            CommandError: If a side cannot divide the model so.
        """
        manifest, rules = self.model.manifest, self.model.rules
        before = layouts(manifest, self.source, rules)
        after = layouts(manifest, self.destination, rules, self.first)
        return [Transfer(before[name], after[name], info.dtype, name) for name, info in manifest.items()]

    def plan(self, topology: Topology) -> Plan:
        """One plan for all of them."""
        return plan(self.transfers, topology, staging_bytes=self.staging_bytes)

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

    def headline(self) -> str:
        """One line: which model goes from where to where."""
        where = f"{self.source} on {_ranks(0, self.source)}"
        to = f"{self.destination} on {_ranks(self.first, self.destination)}"
        return f"{self.model.label}: {where} to {to}"

    def data(self) -> dict[str, Any]:
        """The same as JSON data."""
        manifest = self.model.manifest
        return {
            "model": {"name": self.model.label, "tensors": len(manifest), "bytes": manifest.nbytes},
            "source": {"sizes": str(self.source), "first_rank": 0, "ranks": self.source.size},
            "destination": {
                "sizes": str(self.destination),
                "first_rank": self.first,
                "ranks": self.destination.size,
            },
        }


def _ranks(first: int, side: Parallelism) -> str:
    return f"ranks {first}-{first + side.size - 1}" if side.size > 1 else f"rank {first}"
