# SPDX-License-Identifier: Apache-2.0
"""What moves some of a refit's parameters, or all: planned once, bound when it is to run."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator

from nccl_m2n.execution.bound import Bound
from nccl_m2n.execution.staging import Staging
from nccl_m2n.planning import Plan, Transfer
from nccl_m2n.refit.broadcast import Broadcast, fill_buckets, moved_by
from nccl_m2n.refit.join import Joined
from nccl_m2n.refit.report import report_of
from nccl_m2n.transport.base import Transport
from nccl_m2n.typing import Stream

MAX_SUBSETS = 8  # that are kept, beside everything


class Subset:
    """The plans of some parameters: of those that go from shard to shard, and of those that go as full tensors.

    Args:
        joined: Both sides.
        names: The names of the parameters that this is for.
    """

    def __init__(self, joined: Joined, names: Collection[str]) -> None:
        matched, options = joined.matched, joined.options

        def planned(transfers: list[Transfer]) -> Plan:
            return Plan.of(transfers, joined.topology, options.plan)

        sharded, whole = ([t for t in every if t.name in names] for every in (matched.sharded, matched.whole))
        self.plan = planned(sharded)
        self.buckets = [planned(bucket) for bucket in fill_buckets(whole, options.bucket_bytes)]
        resharded = sharded if options.plan.method == "reshard" else []
        self.report = report_of([self.plan, *self.buckets], resharded, sharded + whole, matched.left_out)
        self.moving: Moving | None = None  # while it is bound

    @property
    def staging_bytes(self) -> int:
        """Bytes of staging of the rank that needs most; the same on all ranks."""
        return max(int(plan.staging.max(initial=0)) for plan in (self.plan, *self.buckets))


class Moving:
    """A subset, bound to arrays. Collective.

    Args:
        transport: Joins the ranks.
        joined: Has the arrays.
        subset: What to move.
        staging: Where to take staging from.
    """

    def __init__(self, transport: Transport, joined: Joined, subset: Subset, staging: Staging) -> None:
        delta = joined.options.delta  # what it keeps and stages is its own
        source, destination = (moved_by(subset.plan, side) for side in joined.arrays)
        self.bound = subset.plan.bind(transport, source, destination, None if delta else staging, delta)
        self.broadcast: Broadcast | None = None
        if subset.buckets:
            try:
                self.broadcast = Broadcast(
                    transport, subset.buckets, joined.arrays[0], joined.delivery, staging
                )
            except BaseException:
                self.bound.close()
                raise

    def end(self, kind: object = None, error: BaseException | None = None, trace: object = None) -> None:
        """Release everything; with an error, as `Bound.__exit__` does."""
        bounds: list[Bound] = [self.bound, *(self.broadcast.bounds if self.broadcast else ())]
        for bound in bounds:
            bound.__exit__(kind, error, trace)


class Subsets:
    """All parameters and the last few subsets, on one piece of staging, for one of them runs at a time.

    What it does is the same on all ranks, for all of them name the same subsets in the same order.

    Args:
        transport: Joins the ranks.
        joined: Both sides.
    """

    def __init__(self, transport: Transport, joined: Joined) -> None:
        self._transport, self._joined = transport, joined
        self._kept: OrderedDict[frozenset[str], Subset] = OrderedDict()  # the last used at the end
        self._staging, self._staging_bytes = Staging(transport), 0
        self.all = Subset(joined, joined.matched.names)
        self._latest: Subset | None = None  # what ran last: what it sent is what destinations have
        self.bind(self.all)

    def known(self, names: frozenset[str]) -> Subset | None:
        """The subset of some names, if it is kept."""
        return self.all if names == self._joined.matched.names else self._kept.get(names)

    def of(self, names: frozenset[str]) -> Subset:
        """The subset of some names, planned where it is not kept. No run of another one may be under way."""
        if names == self._joined.matched.names:
            return self.all
        if names not in self._kept:
            while len(self._kept) >= MAX_SUBSETS:
                self._end(self._kept.popitem(last=False)[1])
            self._kept[names] = Subset(self._joined, names)
        self._kept.move_to_end(names)
        return self._kept[names]

    def bind(self, subset: Subset) -> Moving:
        """Bind a subset where it is not bound. Collective then; no run may be under way."""
        if subset.moving is None:
            if subset.staging_bytes > self._staging_bytes:  # for all to share the larger one
                self.release()
                self._staging_bytes = subset.staging_bytes
            subset.moving = Moving(self._transport, self._joined, subset, self._staging)
        return subset.moving

    def begin(self, subset: Subset, stream: Stream) -> None:
        """Start a run of a bound subset. Where only changes are sent, what another subset wrote is not known to it."""
        if subset.moving is not None:
            if self._latest is not subset:
                subset.moving.bound.forget()
            self._latest = subset
            subset.moving.bound.run(stream)

    def forget(self, ranks: Collection[int] | None) -> None:
        """Have the next run send everything that goes to some ranks, all if None."""
        for subset in self:
            if subset.moving is not None:
                subset.moving.bound.forget(ranks)

    def rebind(self, joined: Joined) -> None:
        """Go on with other arrays; if they do not fit, with those of before. Collective."""
        made = Moving(self._transport, joined, self.all, self._staging)
        for subset in self:
            self._end(subset)
        self._joined, self.all.moving = joined, made

    def release(self) -> None:
        """Let go of staging, buffers and messages, until they are needed again."""
        for subset in self:
            self._end(subset)
        self._staging, self._staging_bytes = Staging(self._transport), 0

    def close(self, kind: object = None, error: BaseException | None = None, trace: object = None) -> None:
        """Release everything, and let go of the arrays; with an error, as `Bound.__exit__` does."""
        try:
            for subset in self:
                self._end(subset, kind, error, trace)
        finally:
            self._joined = self._joined.without_arrays()

    def _end(
        self, subset: Subset, kind: object = None, error: BaseException | None = None, trace: object = None
    ) -> None:
        moving, subset.moving = subset.moving, None
        if moving is not None:
            moving.end(kind, error, trace)

    def __iter__(self) -> Iterator[Subset]:
        return iter([self.all, *self._kept.values()])
