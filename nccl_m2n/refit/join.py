# SPDX-License-Identifier: Apache-2.0
"""Joining two sides: what all ranks find out together before anything is planned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from nccl_m2n.execution.given import SIDES, Given
from nccl_m2n.execution.memory import gpu_of
from nccl_m2n.planning import Plan, Topology
from nccl_m2n.planning.options import PlanOptions
from nccl_m2n.refit.broadcast import Views, moved_by
from nccl_m2n.refit.deliver import Delivery, Loader, loader_of
from nccl_m2n.refit.exchange import OwnSide, describe_side, exchange_descriptions
from nccl_m2n.refit.match import Matched, match_sides
from nccl_m2n.refit.names import Names, new_names
from nccl_m2n.refit.options import RefitOptions
from nccl_m2n.refit.parameter import Parameters, parameters_of
from nccl_m2n.transport.agree import together
from nccl_m2n.transport.base import Transport

Result = TypeVar("Result")


@dataclass(frozen=True)
class Joined:
    """Both sides, matched, and what this process's ranks have of them."""

    options: RefitOptions
    topology: Topology
    matched: Matched
    declared: Mapping[int, tuple[OwnSide, OwnSide]]  # what each local rank has on both sides
    loaders: Mapping[int, Loader | None]
    rename: Callable[[str], str]  # from the source's names

    @cached_property
    def arrays(self) -> tuple[Views, Views]:
        """Source and destination arrays, of what is moved."""
        source, destination = ({r: sides[i].arrays for r, sides in self.declared.items()} for i in (0, 1))
        return source, destination

    @cached_property
    def delivery(self) -> Delivery:
        """Takes full tensors."""
        return Delivery(self.loaders, self.matched.laid_out, self.arrays[1])

    def without_arrays(self) -> Joined:
        """The same, but for everything that keeps arrays alive."""
        return replace(self, declared={}, loaders={})


@dataclass(frozen=True)
class _Own:
    """What one local rank brings, checked."""

    options: RefitOptions
    sides: tuple[OwnSide, OwnSide]
    loader: Loader | None
    rename: Callable[[str], str]


def join_sides(
    transport: Transport,
    declared: tuple[Parameters, Parameters],
    options: Callable[[], RefitOptions],
    names: Names | None,
    load: Loader | Mapping[int, Loader] | None,
) -> Joined:
    """Exchange what every rank declares, check it, and match it by name. Collective.

    Args:
        transport: Joins the ranks.
        declared: The source and the destination side, as `Refit` is given them.
        options: Gives what was chosen, or raises.
        names: As `Refit` is given them.
        load: Likewise.

    Raises:
        M2nError: On every rank, whatever is wrong on one.
    """

    def own(rank: int) -> _Own:
        chosen, rename = (
            options(),
            new_names(names),
        )  # first: what is wrong there is wrong for every parameter
        sides = _described(transport, rank, declared, rename)
        return _Own(chosen, sides, loader_of(load, transport, rank), rename)

    every = together(transport, "refit", own, facts=lambda made: first_of(made).options.facts())
    found = exchange_descriptions(transport, {rank: one.sides for rank, one in every.items()})
    chosen = first_of(every).options
    matched = match_sides(*found, chosen)
    joined = Joined(
        chosen,
        chosen.topology or Topology(transport.discover_domains()),
        matched,
        {r: (one.sides[0].only(matched.names), one.sides[1].only(matched.names)) for r, one in every.items()},
        {rank: one.loader for rank, one in every.items()},
        first_of(every).rename,
    )
    _require_takers(transport, joined)
    return joined


def rejoined(
    transport: Transport, joined: Joined, declared: tuple[Parameters | None, Parameters | None]
) -> Joined:
    """The same sides with other arrays. Collective.

    Args:
        transport: Joins the ranks.
        joined: What was declared before.
        declared: The source and the destination side anew; None: as before.

    Raises:
        LayoutError: On every rank, if one of them declares anything else than before.
    """

    def own(rank: int) -> tuple[OwnSide, OwnSide]:
        before = joined.declared[rank]
        now = _described(transport, rank, tuple(side or () for side in declared), joined.rename)
        for side, given, old, new in zip(SIDES, declared, before, now, strict=True):
            if given is not None:
                new.require_like(old, side)
        source, destination = (
            old if given is None else new.only(joined.matched.names)
            for given, old, new in zip(declared, before, now, strict=True)
        )
        return source, destination

    made = replace(joined, declared=together(transport, "refit: rebind", own))
    _require_takers(transport, made)
    return made


def _require_takers(transport: Transport, joined: Joined) -> None:
    """Refuse full tensors that a rank would get and has no loader or no fitting array for. Collective."""
    if not joined.matched.whole:
        return
    laid_out = Plan.of(joined.matched.laid_out, joined.topology, PlanOptions())
    arrays = moved_by(laid_out, joined.arrays[1])

    def check(rank: int) -> None:
        joined.delivery.require(joined.matched.whole, rank)
        Given(laid_out, rank, SIDES[1], arrays[rank], gpu_of(transport, rank))

    together(transport, "refit: who takes full tensors", check)


def _described(
    transport: Transport, rank: int, declared: Sequence[Parameters], rename: Callable[[str], str]
) -> tuple[OwnSide, OwnSide]:
    """What a local rank declares on both sides."""
    held = [parameters_of(p, transport, rank, s) for p, s in zip(declared, SIDES, strict=True)]
    return describe_side(0, held[0], rename), describe_side(1, held[1])


def first_of(made: Mapping[int, Result]) -> Result:
    """Of what this process's ranks found, all alike, the first."""
    return next(iter(made.values()))
