# SPDX-License-Identifier: Apache-2.0
"""Topology: which ranks NVLink joins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from nccl_m2n.checks import MAX_RANKS, made_by, rank_number, several, whole_number, whole_numbers
from nccl_m2n.errors import PlanError
from nccl_m2n.typing import Ints


@dataclass(frozen=True, init=False)
class Topology:
    """Ranks grouped in domains: NVLink (or shared memory) within, only the network between.

    A rank's position within its domain is its *rail*: real clusters join equal rails by the shortest way.

    Args:
        domains: The ranks of each domain; every rank in one domain.

    Raises:
        PlanError: If a rank is in two domains, a domain is empty, or there is none.

    Example:
        >>> from nccl_m2n import Topology
        >>> Topology.regular(ranks=8, per_domain=4).domains
        ((0, 1, 2, 3), (4, 5, 6, 7))
    """

    domains: tuple[tuple[int, ...], ...]

    def __init__(self, domains: Sequence[Iterable[int]]) -> None:
        hint = "one list of ranks for each domain; Topology.single(ranks) makes one of all"
        made = tuple(
            _ranks(domain, "the ranks of a domain", hint)
            for domain in several(domains, "domains", error=PlanError, hint=hint)
        )
        object.__setattr__(self, "domains", made)
        if not made:
            raise PlanError("expected at least one domain, got none; Topology.single(ranks) makes one of all")
        ranks = [r for domain in made for r in domain]
        if len(set(ranks)) != len(ranks) or not all(made):
            twice = [r for r, times in sorted(Counter(ranks).items()) if times > 1]
            raise PlanError(
                "expected each rank in one domain and no domain empty, got "
                + (f"rank {', '.join(map(str, twice))} in several domains" if twice else f"domains {made}")
            )

    @classmethod
    def regular(cls, ranks: int, per_domain: int) -> Topology:
        """Ranks ``0 … ranks - 1`` in domains of `per_domain` neighbours; the last may have fewer."""
        ranks = whole_number(ranks, "the number of ranks", least=1, most=MAX_RANKS, error=PlanError)
        per_domain = whole_number(per_domain, "ranks a domain", least=1, error=PlanError)
        return cls([range(a, min(a + per_domain, ranks)) for a in range(0, ranks, per_domain)])

    @classmethod
    def single(cls, ranks: Iterable[int]) -> Topology:
        """All ranks in one domain: one machine."""
        return cls([_ranks(ranks, "the ranks of a domain")])

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, ascending."""
        return tuple(sorted(r for domain in self.domains for r in domain))

    @cached_property
    def domain_table(self) -> Ints:
        """Domain number by rank; as many entries as domains where a rank is in none."""
        table = np.full(self.ranks[-1] + 1, len(self.domains), np.int64)
        for number, domain in enumerate(self.domains):
            table[list(domain)] = number
        return table

    @cached_property
    def rail_table(self) -> Ints:
        """Place within the domain, by rank."""
        table = np.zeros(self.ranks[-1] + 1, np.int64)
        for domain in self.domains:
            table[list(domain)] = np.arange(len(domain))
        return table

    def domain_of(self, rank: int) -> int:
        """The number of the domain that `rank` is in.

        Raises:
            PlanError: If it is in none.
        """
        rank = rank_number(rank, error=PlanError)
        self.require([rank])
        return int(self.domain_table[rank])

    def require(self, ranks: Iterable[int]) -> None:
        """Refuse ranks that are in no domain."""
        missing = sorted(set(_ranks(ranks, "ranks")) - set(self.ranks))
        if missing:
            raise PlanError(
                f"expected every rank of the plan in a domain of the topology, got none for rank "
                f"{', '.join(map(str, missing[:8]))}{' …' if len(missing) > 8 else ''}; the topology has "
                f"{len(self.ranks)} ranks in {len(self.domains)} domains"
            )

    def __str__(self) -> str:
        sizes = sorted({len(domain) for domain in self.domains})
        domains = f"{len(self.domains)} domain" + "s" * (len(self.domains) != 1)
        return f"{len(self.ranks)} ranks in {domains} of {'-'.join(map(str, sizes))}"


def as_topology(value: Any) -> Topology:
    """A topology as it is, or an error."""
    return made_by(value, Topology, "topology", error=PlanError, hint="write Topology(domains)")


def _ranks(ranks: Iterable[int], what: str, hint: str = "") -> tuple[int, ...]:
    if isinstance(ranks, set | frozenset):
        ranks = sorted(ranks)
    return whole_numbers(ranks, what, least=0, most=MAX_RANKS - 1, error=PlanError, hint=hint)
