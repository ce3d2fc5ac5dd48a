# SPDX-License-Identifier: Apache-2.0
"""What all ranks say together of a refit: that a version is complete, and whose weights are lost."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Set

from nccl_m2n.checks import rank_number, several, whole_number
from nccl_m2n.refit.join import first_of
from nccl_m2n.transport.agree import together
from nccl_m2n.transport.base import Transport


def agreed_version(
    transport: Transport, version: object, failures: Mapping[int, Exception], deadline: float | None
) -> int | None:
    """The version, if all ranks have everything and give the same one. Collective.

    Args:
        transport: Joins the ranks.
        version: What this process was given.
        failures: Of its ranks that have not everything.
        deadline: On the clock of `time.monotonic`; None waits for ever.
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
