# SPDX-License-Identifier: Apache-2.0
"""Plans: who sends what to whom, when. A pure function of values, the same on every rank."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from nccl_m2n.checks import byte_count, choice, made_by, rank_number, several
from nccl_m2n.errors import PlanError
from nccl_m2n.layout import Layout
from nccl_m2n.planning import describe
from nccl_m2n.planning.bundles import Bundles, make_bundles
from nccl_m2n.planning.check import check_plan
from nccl_m2n.planning.methods import METHODS
from nccl_m2n.planning.program import Program, make_program
from nccl_m2n.planning.rounds import schedule, staging_by_rank
from nccl_m2n.planning.routes import Routes
from nccl_m2n.planning.table import plan_table
from nccl_m2n.planning.topology import Topology, as_topology
from nccl_m2n.planning.traffic import Traffic, count_traffic
from nccl_m2n.planning.transfer import Transfer

if TYPE_CHECKING:
    from nccl_m2n.execution.bound import Bound
    from nccl_m2n.execution.given import GivenArrays
    from nccl_m2n.execution.staging import Staging
    from nccl_m2n.transport.base import Transport

PLAN_VERSION = 1  # part of every digest; raise it when equal problems would be planned otherwise
DEFAULT_STAGING_BYTES = 256 << 20


@dataclass(frozen=True)
class PlanOptions:
    """What may be chosen about a plan, apart from its transfers and topology."""

    method: str = "reshard"
    chunk_bytes: int | None = None
    staging_bytes: int = DEFAULT_STAGING_BYTES

    def __post_init__(self) -> None:
        choice(self.method, "method", tuple(METHODS))
        if self.chunk_bytes is not None:
            object.__setattr__(self, "chunk_bytes", byte_count(self.chunk_bytes, "chunk_bytes"))
        object.__setattr__(self, "staging_bytes", byte_count(self.staging_bytes, "staging_bytes"))


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """What every rank must do to carry out some transfers; made by `plan`."""

    transfers: tuple[Transfer, ...]
    topology: Topology
    options: PlanOptions
    bundles: Bundles = field(repr=False)
    routes: Routes = field(repr=False)
    chunk_rounds: int  # rounds in which first hops start

    @property
    def flows(self) -> np.ndarray:
        """The flows, a structured array; see `nccl_m2n.planning.routes.FLOW`."""
        return self.routes.flows

    @property
    def hops(self) -> np.ndarray:
        """The hops, a structured array; see `nccl_m2n.planning.routes.HOP`."""
        return self.routes.hops

    @cached_property
    def depth(self) -> int:
        """Rounds between a chunk's first hop and the last hop of the longest route."""
        return int(self.hops["depth"].max(initial=0))

    @property
    def rounds(self) -> int:
        """All rounds: those in which first hops start, and those until the last hop."""
        return self.chunk_rounds + self.depth if self.chunk_rounds else 0

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Every rank in a layout of the plan, ascending."""
        return tuple(sorted({r for a in self._layouts for r in a.ranks}))

    @cached_property
    def _layouts(self) -> set[Layout]:
        return {side for t in self.bundles.templates for side in (t.source, t.destination)}

    @property
    def world(self) -> int:
        """One more than the highest rank."""
        return self.ranks[-1] + 1 if self.ranks else 0

    @cached_property
    def staging(self) -> np.ndarray:
        """Bytes of staging by rank, at most: parts contiguous in a rank's arrays go without."""
        return staging_by_rank(self.routes, self.world, self.chunk_rounds)

    @cached_property
    def digest(self) -> str:
        """A text that is equal on two ranks exactly when their plans are."""
        return hashlib.sha256(json.dumps(describe.plan_text(self)).encode()).hexdigest()

    def traffic(self) -> Traffic:
        """Bytes by tier and by rank, with the least network bytes that any plan needs."""
        return self._traffic

    @cached_property
    def _traffic(self) -> Traffic:
        return count_traffic(self)

    def check(self) -> None:
        """Prove the plan's invariants.

        Raises:
            PlanError: Naming the tensor, the box and the rank where one is broken.
        """
        check_plan(self)

    def program(self, rank: int) -> Program:
        """What `rank` does, round by round; nothing for a rank that is in no layout."""
        rank = rank_number(rank, error=PlanError)
        return make_program(self.bundles, self.routes, self.chunk_rounds, self.depth, rank)

    def bind(
        self,
        transport: Transport,
        sources: GivenArrays,
        destinations: GivenArrays,
        staging: Staging | None = None,
    ) -> Bound:
        """Bind the plan to arrays, see `nccl_m2n.execution.bind`. Collective over the transport."""
        from nccl_m2n.execution.bind import bind

        return bind(self, transport, sources, destinations, staging)

    def to_json(self) -> str:
        """The plan as text: its problem, its options and its digest. Planning is pure, so that is all."""
        return json.dumps(describe.plan_json(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote.

        Raises:
            PlanError: If the text is none, or if this version of the package plans the problem otherwise.
        """
        transfers, topology, options, digest = describe.read_plan(text)
        made = plan(transfers, topology, **options)
        if made.digest != digest:
            raise PlanError(
                f"expected the plan of digest {digest[:12]}…, got {made.digest[:12]}…; plan it anew"
            )
        return made

    def __repr__(self) -> str:
        return (
            f"<Plan of {len(self.transfers)} transfers over {len(self.ranks)} ranks: "
            f"{len(self.flows)} flows, {self.rounds} rounds, digest {self.digest[:12]}>"
        )

    def __str__(self) -> str:
        return plan_table(self)

    def _repr_html_(self) -> str:
        from nccl_m2n.show import html_plan

        return html_plan(self)


def plan(
    transfers: Transfer | Sequence[Transfer],
    topology: Topology | None = None,
    *,
    method: str = "reshard",
    chunk_bytes: int | None = None,
    staging_bytes: int = DEFAULT_STAGING_BYTES,
) -> Plan:
    """Plan one transfer or many as one collective.

    Pure: no rank, no device, no clock, no environment. All ranks get the same plan.

    Args:
        transfers: What to move.
        topology: NVLink domains of all ranks; None takes them all to be in one (one machine).
        method: ``"reshard"``; or, to compare with, ``"direct"`` (a holder serves every needer by
            itself) and ``"gather_broadcast"`` (whole tensors by way of one rank).
        chunk_bytes: Upper bound of a chunk, in bytes (one of 16 can always be); None chooses.
        staging_bytes: Staging that a rank may need, in bytes. More rounds are made to stay below.

    Raises:
        PlanError: For two transfers of one name, ranks in no domain, holes in the source, or options
            out of range.

    Example:
        >>> from nccl_m2n import Layout, Mesh, Replicate, Shard, Topology, Transfer, plan
        >>> source = Layout((1024, 512), Mesh.arange((4,)), [Shard(0)])
        >>> destination = Layout((1024, 512), Mesh.arange((4,), start=4), [Replicate()])
        >>> made = plan(Transfer(source, destination, "bfloat16", "w"), Topology.regular(8, 4))
        >>> made.traffic().network_bytes
        1048576
    """
    items = (transfers,) if isinstance(transfers, Transfer) else _transfers(transfers)
    options = PlanOptions(method, chunk_bytes, staging_bytes)
    bundles = make_bundles(items)
    ranks = {r for t in bundles.templates for side in (t.source, t.destination) for r in side.ranks}
    domains = Topology.single(sorted(ranks) or [0]) if topology is None else as_topology(topology)
    domains.require(ranks)
    routes = METHODS[method](bundles, domains)
    rounds = schedule(routes, max(ranks, default=0) + 1, options.chunk_bytes, options.staging_bytes)
    return Plan(items, domains, options, bundles, routes, rounds)


@lru_cache(maxsize=64)
def cached_plan(
    transfers: tuple[Transfer, ...], topology: Topology | None, chunk_bytes: int | None, staging_bytes: int
) -> Plan:
    """`plan`, remembered by value for the last few problems."""
    return plan(transfers, topology, chunk_bytes=chunk_bytes, staging_bytes=staging_bytes)


def _transfers(given: Any) -> tuple[Transfer, ...]:
    hint = "make them with Transfer(source, destination, …)"
    return tuple(
        made_by(t, Transfer, "each transfer", error=PlanError, hint=hint)
        for t in several(given, "transfers", error=PlanError, hint=hint)
    )
