# SPDX-License-Identifier: Apache-2.0
"""Plans: who sends what to whom, when. A pure function of values, the same on every rank."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from nccl_m2n.checks import made_by, rank_number, several
from nccl_m2n.errors import PlanError
from nccl_m2n.planning import describe
from nccl_m2n.planning.bundles import Bundles, make_bundles
from nccl_m2n.planning.check import check_routes
from nccl_m2n.planning.methods import METHODS, others
from nccl_m2n.planning.options import PlanOptions
from nccl_m2n.planning.program import Program, make_program
from nccl_m2n.planning.rounds import schedule, staging_by_rank
from nccl_m2n.planning.routes import Routes
from nccl_m2n.planning.table import Figures, plan_rows, title
from nccl_m2n.planning.topology import Topology, as_topology
from nccl_m2n.planning.traffic import Traffic, count_traffic, nic_bound
from nccl_m2n.planning.transfer import Transfer
from nccl_m2n.text import align_table
from nccl_m2n.typing import Ints, Table

if TYPE_CHECKING:
    from nccl_m2n.execution.bound import Bound
    from nccl_m2n.execution.given import GivenArrays
    from nccl_m2n.execution.staging import Staging
    from nccl_m2n.transport.base import Transport


HINT = "make them with Transfer(source, destination, …)"


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """What every rank must do to carry out some transfers; made by `plan`."""

    transfers: tuple[Transfer, ...]
    topology: Topology
    options: PlanOptions
    bundles: Bundles
    routes: Routes
    chunk_rounds: int  # rounds in which first hops start

    @classmethod
    def of(cls, transfers: Sequence[Transfer], topology: Topology | None, options: PlanOptions) -> Plan:
        """The plan of a problem; see `nccl_m2n.plan`."""
        items = several(transfers, "transfers", error=PlanError, hint=HINT)
        for item in set(map(type, items)) - {Transfer} and items:
            made_by(item, Transfer, "each transfer", error=PlanError, hint=HINT)
        bundles = make_bundles(items)
        domains = Topology.single(bundles.ranks or [0]) if topology is None else topology
        as_topology(domains).require(bundles.ranks)
        return cls._routed(items, domains, options, bundles)

    @classmethod
    def _routed(
        cls, transfers: tuple[Transfer, ...], topology: Topology, options: PlanOptions, bundles: Bundles
    ) -> Plan:
        routes = METHODS[options.method](bundles, topology)
        rounds = schedule(routes, bundles.world, options.chunk_bytes, options.staging_bytes)
        return cls(transfers, topology, options, bundles, routes, rounds)

    def compared(self) -> list[Plan]:
        """The same transfers by the other methods, as far as that is not too long a list."""
        if self.options.method != "reshard":
            return []
        chosen = [replace(self.options, method=m, chunk_bytes=None) for m in others(self.bundles)]
        return [self._routed(self.transfers, self.topology, options, self.bundles) for options in chosen]

    @property
    def flows(self) -> Table:
        """The flows, a structured array; see `nccl_m2n.planning.routes.FLOW`."""
        return self.routes.flows

    @property
    def hops(self) -> Table:
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

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank in a layout of the plan, ascending."""
        return self.bundles.ranks

    @property
    def world(self) -> int:
        """One more than the highest rank."""
        return self.bundles.world

    @cached_property
    def staging(self) -> Ints:
        """Bytes of staging by rank, at most: parts contiguous in a rank's arrays go without."""
        return staging_by_rank(self.routes, self.world, self.chunk_rounds)

    @cached_property
    def digest(self) -> str:
        """A text that is equal on two ranks exactly when their plans are."""
        return describe.problem_digest(self.transfers, self.topology, self.options)

    def traffic(self) -> Traffic:
        """Bytes by tier and by rank, with the least network bytes that any plan needs."""
        return self._traffic

    @cached_property
    def _traffic(self) -> Traffic:
        return count_traffic(self.bundles, self.routes, self.topology)

    def check(self) -> None:
        """Prove the plan's invariants.

        Raises:
            PlanError: Naming the tensor, the box and the rank where one is broken.
        """
        least = self.options.method == "reshard"
        check_routes([t.name for t in self.transfers], self.bundles, self.routes, self.topology, least=least)

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
        delta: bool | str = False,
    ) -> Bound:
        """Bind the plan to arrays, see `nccl_m2n.execution.bind`. Collective over the transport."""
        from nccl_m2n.execution.bind import bind

        return bind(self, transport, sources, destinations, staging, delta)

    def to_json(self) -> str:
        """The plan as text: its problem, its options and its digest. Planning is pure, so that is all."""
        data = describe.plan_data(self.transfers, self.topology, self.options, self.digest)
        return json.dumps(data, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote.

        Raises:
            PlanError: If the text is none, or if this version of the package plans the problem otherwise.
        """
        transfers, topology, options, digest = describe.read_plan(text)
        made = cls.of(transfers, topology, options)
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

    @property
    def title(self) -> str:
        """One line: what is moved, from where to where."""
        return title(self.transfers, self.topology)

    def figures(self) -> Figures:
        """The plan in numbers."""
        messages = int(self.flows["chunks"][self.hops["flow"]].sum())
        staging = int(self.staging.max(initial=0))
        bound = nic_bound(self.bundles, self.topology)
        return Figures(
            self.options.method, len(self.flows), self.traffic(), self.rounds, messages, staging, bound
        )

    def rows(self) -> list[list[str]]:
        """What `print(plan)` shows, as cells: labels first, then a column for the plan and each compared with it."""
        return plan_rows([made.figures() for made in [self, *self.compared()]])

    def __str__(self) -> str:
        return f"{self.title}\n{align_table(self.rows())}"

    def _repr_html_(self) -> str:
        from nccl_m2n.show import html_plan

        return html_plan(self)
