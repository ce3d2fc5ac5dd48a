# SPDX-License-Identifier: Apache-2.0
"""What a refit moved, and how long it took."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from nccl_m2n.execution.delta.changes import Changes
from nccl_m2n.planning import Plan, Transfer
from nccl_m2n.text import bytes_text


@dataclass(frozen=True)
class Report:
    """What one run moved and how long it took on this rank."""

    seconds: float  # from `run` to the end of `wait`
    network_bytes: int  # between domains, all ranks together
    network_bytes_bound: int  # the least there can be
    nvlink_bytes: int
    local_bytes: int
    busiest_nic_bytes: int
    tensors: int
    resharded_bytes: int  # of the model, counted once: what went from shard to shard by Reshard
    other_bytes: int  # likewise: what went any other way
    skipped: int = 0  # parameters that one side alone declares, and that did not move
    changed: float | None = None  # share of the elements that had changed, where only these were sent
    dense_bytes: int = 0  # between domains, if everything had been sent

    @property
    def nic_gbytes(self) -> float:
        """Rate of the busiest NIC, in 1e9 bytes a second."""
        return self.busiest_nic_bytes / self.seconds / 1e9 if self.seconds else 0.0

    @property
    def share(self) -> float:
        """Share of the model's bytes that went from shard to shard, from 0 to 1."""
        total = self.resharded_bytes + self.other_bytes
        return self.resharded_bytes / total if total else 1.0

    def with_changes(self, changes: Changes | None) -> Report:
        """The same run, if it sent only what changed."""
        if changes is None:
            return self
        sent = self.network_bytes - changes.dense_bytes + changes.network_bytes
        return replace(self, network_bytes=sent, changed=changes.changed)

    def _compared(self) -> str:
        if self.changed is None:
            return f"least {bytes_text(self.network_bytes_bound)}"
        return f"{self.changed:.2%} changed, {bytes_text(self.dense_bytes)} in all"

    def __str__(self) -> str:
        return (
            f"{self.tensors} tensors{f' ({self.skipped} skipped)' if self.skipped else ''}, {self.share:.1%} of their "
            f"bytes by Reshard, in {self.seconds * 1e3:.1f} ms: "
            f"network {bytes_text(self.network_bytes)} ({self._compared()}), "
            f"NVLink {bytes_text(self.nvlink_bytes)}, local {bytes_text(self.local_bytes)}, "
            f"busiest NIC {self.nic_gbytes:.2f} GB/s"
        )


def report_of(
    plans: Sequence[Plan], resharded: Iterable[Transfer], every: Iterable[Transfer], skipped: int
) -> Report:
    """What one run of some plans moves, in no time yet.

    Args:
        plans: What is run, one after the other.
        resharded: The transfers that go from shard to shard by Reshard.
        every: All transfers.
        skipped: How many parameters only one side declares.
    """
    traffic = [plan.traffic() for plan in plans]
    share = sum(map(wire_bytes, resharded))
    return Report(
        0.0,
        sum(t.network_bytes for t in traffic),
        sum(t.network_bytes_bound for t in traffic),
        sum(t.nvlink_bytes for t in traffic),
        sum(t.local_bytes for t in traffic),
        sum(t.busiest for t in traffic),
        sum(len(plan.transfers) for plan in plans),
        share,
        sum(map(wire_bytes, every)) - share,
        skipped,
        dense_bytes=sum(t.network_bytes for t in traffic),
    )


def wire_bytes(transfer: Transfer) -> int:
    """Bytes of a whole tensor as it crosses the wire."""
    return math.prod(transfer.shape) * transfer.wire_size
