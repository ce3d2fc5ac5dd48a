# SPDX-License-Identifier: Apache-2.0
"""What all ranks agree on at a step: which parameters it moves, and whether it may be stamped with its version."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Set

from nccl_m2n.checks import rank_number, several, whole_number
from nccl_m2n.refit.join import first_of
from nccl_m2n.refit.names import chosen
from nccl_m2n.transport.agree import together
from nccl_m2n.transport.base import Transport


def agreed_names(
    transport: Transport, only: Iterable[str] | None, known: frozenset[str], purpose: str
) -> frozenset[str]:
    """The names that `only` means, on all ranks the same ones. Collective, but where None stands for all.

    Raises:
        LayoutError: On every rank, if it means none on one of them.
        DisagreementError: If the ranks mean different ones.
    """
    if only is None:
        return known
    every = together(
        transport,
        f"refit: {purpose}",
        lambda rank: chosen(only, known),
        facts=lambda made: {"only": sorted(first_of(made))},
    )
    return first_of(every)


def agreed_version(
    transport: Transport, version: object, failures: Mapping[int, Exception], deadline: float | None
) -> int | None:
    """The version that all ranks give, once each of them has everything. Collective.

    Args:
        transport: Joins the ranks.
        version: What this process was given.
        failures: What went wrong at local ranks, to be raised everywhere.
        deadline: On the clock of `time.monotonic`; None: the transport's own limit.

    Raises:
        M2nError: On every rank, if something went wrong on one.
        DisagreementError: If the ranks give different versions.
    """

    def complete(rank: int) -> int | None:
        if rank in failures:
            raise failures[rank]
        return None if version is None else whole_number(version, "version")

    every = together(
        transport,
        "refit: version",
        complete,
        facts=lambda made: {"the version": first_of(made)},
        limit=None if deadline is None else max(0.0, deadline - time.monotonic()),
    )
    return first_of(every)


def agreed_ranks(transport: Transport, ranks: Iterable[int] | None) -> list[int] | None:
    """The ranks that all ranks name, None for all of them. Collective."""

    def named(rank: int) -> list[int] | None:
        if ranks is None:
            return None
        listed = several(tuple(ranks) if isinstance(ranks, Set) else ranks, "ranks to forget")
        return sorted({rank_number(r, "rank to forget") for r in listed})

    every = together(
        transport, "refit: forget", named, facts=lambda made: {"the ranks to forget": first_of(made)}
    )
    return first_of(every)
