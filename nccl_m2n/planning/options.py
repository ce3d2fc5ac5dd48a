# SPDX-License-Identifier: Apache-2.0
"""What may be chosen about a plan."""

from __future__ import annotations

from dataclasses import dataclass

from nccl_m2n.checks import byte_count, choice

METHOD_NAMES = ("reshard", "direct", "gather_broadcast")
DEFAULT_STAGING_BYTES = 256 << 20


@dataclass(frozen=True)
class PlanOptions:
    """What may be chosen about a plan, apart from its transfers and topology.

    Args:
        method: ``"reshard"``; or, to compare with, ``"direct"`` (a holder serves every needer by itself) and
            ``"gather_broadcast"`` (whole tensors by way of one rank).
        chunk_bytes: Upper bound of a chunk, in bytes (one of 16 can always be); None chooses.
        staging_bytes: Staging that a rank may need, in bytes. More rounds are made to stay below.

    Raises:
        PlanError: If one of them is out of range.
    """

    method: str = "reshard"
    chunk_bytes: int | None = None
    staging_bytes: int = DEFAULT_STAGING_BYTES

    def __post_init__(self) -> None:
        choice(self.method, "method", METHOD_NAMES)
        object.__setattr__(self, "staging_bytes", byte_count(self.staging_bytes, "staging_bytes"))
        if self.chunk_bytes is not None:
            object.__setattr__(self, "chunk_bytes", byte_count(self.chunk_bytes, "chunk_bytes"))
