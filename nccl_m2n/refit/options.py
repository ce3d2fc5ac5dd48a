# SPDX-License-Identifier: Apache-2.0
"""What may be chosen about a refit: checked, and the same on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from nccl_m2n.checks import byte_count, choice, plain_text, several
from nccl_m2n.dtypes import Cast, Casts
from nccl_m2n.execution.bound import checked_delta
from nccl_m2n.planning import Topology
from nccl_m2n.planning.options import PlanOptions
from nccl_m2n.planning.topology import as_topology

MISSING = ("error", "skip")


@dataclass(frozen=True)
class RefitOptions:
    """See `Refit` for what each one means."""

    topology: Topology | None
    casts: Casts
    missing: str
    whole: tuple[str, ...]
    bucket_bytes: int
    plan: PlanOptions
    delta: bool | str

    @classmethod
    def of(
        cls,
        topology: object,
        cast: Cast,
        missing: object,
        whole: object,
        bucket_bytes: object,
        plan: PlanOptions,
        delta: object,
    ) -> RefitOptions:
        """What a user gave.

        Raises:
            M2nError: For anything that cannot be meant.
        """
        return cls(
            None if topology is None else as_topology(topology),
            Casts.of(cast),
            choice(missing, "missing", MISSING),
            tuple(plain_text(pattern, "pattern of whole") for pattern in several(whole, "patterns as whole")),
            byte_count(bucket_bytes, "bucket_bytes"),
            plan,
            checked_delta(delta),
        )

    def facts(self) -> Mapping[str, object]:
        """What ranks compare, as JSON data by name."""
        domains = None if self.topology is None else self.topology.domains
        return {
            "topology": domains,
            "cast": self.casts.allowed,
            "casts by name": [[name, sorted(types)] for name, types in self.casts.named],
            "missing": self.missing,
            "whole": self.whole,
            "bucket_bytes": self.bucket_bytes,
            "delta": bool(self.delta),
            **asdict(self.plan),
        }
