# SPDX-License-Identifier: Apache-2.0
"""All ranks in one process, in host memory: for notebooks and tests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from nccl_m2n.checks import MAX_RANKS, whole_number
from nccl_m2n.errors import TransportError
from nccl_m2n.transport.base import Message, PreparedRound, Transport
from nccl_m2n.typing import Bytes, Communicator


class LocalTransport(Transport):
    """Every rank in this process; a message is a copy.

    Args:
        ranks: How many ranks there are.

    Example:
        >>> from nccl_m2n import LocalTransport
        >>> LocalTransport(ranks=4).local_ranks
        (0, 1, 2, 3)
    """

    kind, carrier, launchers = "local", "copies within one process", ("none",)

    def __init__(self, ranks: int) -> None:
        self.size = whole_number(ranks, "the number of ranks", least=1, most=MAX_RANKS, error=TransportError)
        self.local_ranks = tuple(range(self.size))

    @classmethod
    def join(cls, launcher: str, world: Communicator, ranks: int | None) -> LocalTransport:
        """All ranks in this process, as many as wanted."""
        return cls(ranks or 1)

    def _gather(self, messages: Mapping[int, bytes], deadline: float) -> list[bytes]:
        return [messages[rank] for rank in self.local_ranks]

    def prepare(self, messages: Sequence[Message]) -> PreparedRound:
        """Pair sends with receives: within a pair of ranks in posting order, as NCCL and MPI do."""
        self.require_usable()
        pairs: dict[tuple[int, int], list[list[Bytes]]] = defaultdict(lambda: [[], []])
        for m in messages:
            ends = (m.rank, m.peer) if m.send else (m.peer, m.rank)
            pairs[ends][not m.send].append(m.buffer)
        copies = []
        for ends, (sends, receives) in pairs.items():
            if [len(b) for b in sends] != [len(b) for b in receives]:
                raise TransportError(
                    f"expected rank {ends[1]} to receive what rank {ends[0]} sends, got other sizes"
                )
            copies += list(zip(receives, sends, strict=True))
        return _LocalRound(self, copies)

    def domain_labels(self) -> dict[int, str]:
        """One domain: one process."""
        return dict.fromkeys(self.local_ranks, "process")

    def __repr__(self) -> str:
        return f"LocalTransport(ranks={self.size})"


class _LocalRound(PreparedRound):
    def __init__(self, transport: LocalTransport, copies: Sequence[tuple[Bytes, Bytes]]) -> None:
        self._transport, self._copies = transport, copies

    def start(self, stream: object = None) -> None:
        self._transport.require_usable()
        for receive, send in self._copies:
            np.copyto(receive, send)

    def finish(self, deadline: float | None = None) -> None:
        """All copies were done at the start."""
