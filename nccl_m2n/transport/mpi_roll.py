# SPDX-License-Identifier: Apache-2.0
"""Who is there? Asked of the ranks of an MPI communicator by those whom a collective step makes wait for long."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from nccl_m2n.transport.ranks import Held

if TYPE_CHECKING:
    from mpi4py import MPI

LONGEST_GRACE = 1.0  # seconds before a time limit at which a rank asks; half of a shorter limit


class RollCall:
    """One rank's part in asking and answering, while it waits in one step.

    MPI's collectives do not say who keeps them from ending. So a rank that is about to give up tells the others
    that it is there, and every one that waits in the same step tells it so in turn. Who says nothing is missing.

    Args:
        comm: Joins the ranks; the roll call has `tag` of it for itself.
        tag: Of its messages.
        step: The number of what this rank waits in. Notes of other steps do not count.
        peers: Whom it may have to wait for.
        deadline: Its time limit, as `time.monotonic` counts; None for none.
    """

    def __init__(
        self, comm: MPI.Intracomm, tag: int, step: int, peers: Iterable[int], deadline: float | None
    ) -> None:
        self._comm, self._tag = comm, tag
        self._note = np.array([step], np.int64)
        self._peers, self._told = set(peers) - {comm.Get_rank()}, set[int]()
        self._here = {comm.Get_rank()}
        now = time.monotonic()
        self._asks_at = None if deadline is None else deadline - min(LONGEST_GRACE, (deadline - now) / 2)

    def look(self) -> None:
        """Take what others say, answer them, and ask once it is time to. Does not wait."""
        while self._comm.Iprobe(tag=self._tag):
            note = np.empty(1, np.int64)
            status = _status()
            self._comm.Recv(note, tag=self._tag, status=status)
            if note[0] == self._note[0]:
                self._here.add(status.source)
                self._tell({status.source})
        if self._asks_at is not None and time.monotonic() >= self._asks_at:
            self._tell(self._peers)

    def missing(self, among: Iterable[int] | None = None) -> list[int]:
        """Those, of the peers or of some ranks, of whom nothing was heard."""
        return sorted((self._peers if among is None else set(among)) - self._here)

    def _tell(self, ranks: Iterable[int]) -> None:
        for rank in sorted(set(ranks) - self._told):
            self._told.add(rank)
            request = self._comm.Isend(self._note, rank, self._tag)
            if not request.Test():  # so small a message is away at once, as a rule
                Held.hold((request, self._note))


def _status() -> MPI.Status:
    from mpi4py import MPI

    return MPI.Status()
