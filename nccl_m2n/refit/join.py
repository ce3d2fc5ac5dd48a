# SPDX-License-Identifier: Apache-2.0
"""Joining two sides: what all ranks find out together before anything is planned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from nccl_m2n.execution.given import SIDES
from nccl_m2n.execution.views import ArrayView
from nccl_m2n.planning import Topology
from nccl_m2n.refit.broadcast import Views
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
    arrays: tuple[Views, Views]  # source and destination, of what is moved
    delivery: Delivery

    def without_arrays(self) -> Joined:
        """The same, but for everything that keeps arrays alive."""
        return replace(self, arrays=({}, {}), delivery=Delivery({}, (), {}))


@dataclass(frozen=True)
class _Own:
    """What one local rank brings, checked."""

    options: RefitOptions
    sides: tuple[OwnSide, OwnSide]
    loader: Loader | None


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
        chosen = options()  # first: what is wrong there is wrong for every parameter
        held = [parameters_of(p, transport, rank, s) for p, s in zip(declared, SIDES, strict=True)]
        sides = describe_side(0, held[0], new_names(names)), describe_side(1, held[1])
        return _Own(chosen, sides, loader_of(load, transport, rank))

    every = together(transport, "refit", own, facts=lambda made: first_of(made).options.facts())
    chosen = first_of(every).options
    sides = exchange_descriptions(transport, {rank: one.sides for rank, one in every.items()})
    matched = match_sides(*sides, chosen)
    source, destination = (
        {rank: _only(one.sides[side].arrays, matched) for rank, one in every.items()} for side in (0, 1)
    )
    delivery = Delivery({rank: one.loader for rank, one in every.items()}, matched.laid_out, destination)
    if matched.whole:
        together(transport, "refit: loaders", lambda rank: delivery.require(matched.whole, rank))
    topology = chosen.topology or Topology(transport.discover_domains())
    return Joined(chosen, topology, matched, (source, destination), delivery)


def _only(arrays: Mapping[str, ArrayView], matched: Matched) -> dict[str, ArrayView]:
    return {name: view for name, view in arrays.items() if name in matched.names}


def first_of(made: Mapping[int, Result]) -> Result:
    """Of what this process's ranks found, all alike, the first."""
    return next(iter(made.values()))
