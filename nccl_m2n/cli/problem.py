# SPDX-License-Identifier: Apache-2.0
"""From a model and two sets of parallel sizes to the transfers between them."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import cached_property

from nccl_m2n.cli.model import Model
from nccl_m2n.cli.sides import Sides
from nccl_m2n.planning import Plan, Topology, Transfer, plan
from nccl_m2n.sharding import Parallelism, layouts
from nccl_m2n.typing import JsonObject


@dataclass(frozen=True)
class Problem(Sides[Parallelism]):
    """A whole model's move from one side to the other."""

    model: Model
    staging_bytes: int

    @classmethod
    def of(cls, arguments: argparse.Namespace, model: Model) -> Problem:
        """What the arguments ask for."""
        first = 0 if arguments.overlap else arguments.source.size
        return cls(arguments.source, arguments.destination, first, model, arguments.staging_mib << 20)

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

    def headline(self, how: str = "") -> str:
        """Which model goes from where to where; a further line for what no rule knows of it."""
        return "\n".join(filter(None, [f"{self.model.label}: {self.way()}{how}", self.model.unknown_text()]))

    def data(self) -> JsonObject:
        """The same as JSON data."""
        manifest = self.model.manifest
        return {
            "model": {
                "name": self.model.label,
                "tensors": len(manifest),
                "bytes": manifest.nbytes,
                **({"unknown": list(self.model.unknown)} if self.model.unknown else {}),
            },
            "source": {"sizes": str(self.source), "first_rank": 0, "ranks": self.source.size},
            "destination": {
                "sizes": str(self.destination),
                "first_rank": self.first,
                "ranks": self.destination.size,
            },
        }
