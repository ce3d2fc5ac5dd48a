# SPDX-License-Identifier: Apache-2.0
"""How fast bytes move: the numbers that a cost model needs of a cluster."""

from __future__ import annotations

from dataclasses import dataclass, fields

from nccl_m2n.checks import real_number


@dataclass(frozen=True)
class Links:
    """The speed of each rank's links; GB are 1e9 bytes.

    Args:
        nic_gbytes: GB/s of a rank's network interface, in each direction.
        nvlink_gbytes: GB/s of a rank's links within its domain, in each direction.
        round_seconds: What a round costs a rank that takes part in it, before any byte moves.
        pack_gbytes: GB/s at which a rank packs and unpacks, beside the messages under way.
        compare_gbytes: GB/s at which a rank compares what it packed with what it sent last.

    Raises:
        PlanError: For a speed of 0 or less, or a negative cost.
    """

    nic_gbytes: float = 50.0
    nvlink_gbytes: float = 450.0
    round_seconds: float = 20e-6
    pack_gbytes: float = 1000.0
    compare_gbytes: float = 1500.0

    def __post_init__(self) -> None:
        for field in fields(self):
            real_number(getattr(self, field.name), field.name, zero=field.name == "round_seconds")
