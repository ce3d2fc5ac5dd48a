# SPDX-License-Identifier: Apache-2.0
"""What moves some of a refit's parameters: planned and bound once, run as often as wanted."""

from __future__ import annotations

from collections.abc import Collection

from nccl_m2n.execution.bound import Bound
from nccl_m2n.execution.staging import Staging
from nccl_m2n.planning import Plan, Transfer
from nccl_m2n.refit.broadcast import Broadcast, bind_views, fill_buckets
from nccl_m2n.refit.join import Joined
from nccl_m2n.refit.report import report_of
from nccl_m2n.transport.base import Transport


class Subset:
    """Some parameters, or all: those that go from shard to shard, and those that go as full tensors. Collective.

    Args:
        transport: Joins the ranks.
        joined: Both sides.
        names: The names of the parameters that this is for.
        staging: Where to take staging from, shared by all subsets: one runs at a time.
    """

    def __init__(
        self, transport: Transport, joined: Joined, names: Collection[str], staging: Staging
    ) -> None:
        matched, options = joined.matched, joined.options

        def planned(transfers: list[Transfer]) -> Plan:
            return Plan.of(transfers, joined.topology, options.plan)

        sharded, whole = ([t for t in every if t.name in names] for every in (matched.sharded, matched.whole))
        self.plan = planned(sharded)
        buckets = [planned(bucket) for bucket in fill_buckets(whole, options.bucket_bytes)]
        resharded = sharded if options.plan.method == "reshard" else []
        self.report = report_of([self.plan, *buckets], resharded, sharded + whole, matched.left_out)
        self.bound = bind_views(self.plan, transport, *joined.arrays, staging)
        self.broadcast: Broadcast | None = None
        if buckets:
            try:
                self.broadcast = Broadcast(transport, buckets, joined.arrays[0], joined.delivery, staging)
            except BaseException:
                self.bound.close()
                raise

    @property
    def bounds(self) -> list[Bound]:
        """Everything that is bound."""
        return [self.bound, *(self.broadcast.bounds if self.broadcast else ())]

    def end(self, kind: object = None, error: BaseException | None = None, trace: object = None) -> None:
        """Release everything; with an error, as `Bound.__exit__` does."""
        for bound in self.bounds:
            bound.__exit__(kind, error, trace)
        self.broadcast = None
