# SPDX-License-Identifier: Apache-2.0
"""What a run that sent only what changed did: the same numbers on every rank."""

from __future__ import annotations

from dataclasses import dataclass

from nccl_m2n.planning.delta import Chunks
from nccl_m2n.planning.delta_sizes import Sizes
from nccl_m2n.typing import Ints


@dataclass(frozen=True)
class Changes:
    """How much changed, and what it saved; of all ranks."""

    changed: float  # share of the units that were sent: elements, where a chunk's are of one size
    network_bytes: int  # that crossed the network
    dense_bytes: int  # that the whole plan would have sent over it

    @classmethod
    def of(cls, chunks: Chunks, entries: Ints, sizes: Sizes) -> Changes:
        """Count a run's chunks."""
        crossing = chunks.hop_chunk[chunks.hop_network]
        units = int((chunks.nbytes // chunks.unit).sum())
        return cls(
            int(entries.sum()) / units if units else 0.0,
            int(sizes.nbytes[crossing].sum()),
            int(chunks.nbytes[crossing].sum()),
        )
