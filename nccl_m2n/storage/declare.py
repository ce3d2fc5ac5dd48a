# SPDX-License-Identifier: Apache-2.0
"""What the storage helpers share: collecting a rank's views, and refusing those that do not fit."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence

from nccl_m2n.checks import plain_text, several, shown, table_of, truth, whole_number
from nccl_m2n.errors import CommandError
from nccl_m2n.layout.fit import factor_shape
from nccl_m2n.refit.parameter import Parameter
from nccl_m2n.sharding.model_layouts import ModelLayouts
from nccl_m2n.typing import Array


def padded_rows(vocab: int, multiple: int = 64, ranks: int = 1) -> int:
    """Rows of an embedding padded to a multiple that its ranks share evenly.

    vLLM and SGLang pad to 64; Megatron to ``make_vocab_size_divisible_by`` (128 by default) times its ranks.
    """
    for value, what in ((vocab, "vocab"), (multiple, "multiple"), (ranks, "ranks")):
        whole_number(value, what, least=1, error=CommandError)
    unit = multiple * ranks
    return -(-vocab // unit) * unit


# What projections of an expert are called: those that widen, then the one that narrows.
_PROJECTIONS = ((("gate_proj", "up_proj"), "down_proj"), (("w1", "w3"), "w2"), (("up_proj",), "down_proj"))


class RankViews:
    """Collects one rank's parameters.

    Args:
        side: Makes the layouts.
        rank: The rank that declares.
        skip: Patterns of names that this side leaves out.
        zero_padding: Set the padding rows of vocabularies to zero now; else they are left alone.
    """

    def __init__(
        self, side: ModelLayouts, rank: int, skip: Sequence[str] = (), zero_padding: bool = False
    ) -> None:
        self.side = side
        first, last = side.start_rank, side.start_rank + side.parallelism.size - 1
        self.rank = whole_number(rank, "a rank of this side", least=first, most=last, error=CommandError)
        self._skip = tuple(
            plain_text(p, "a pattern", error=CommandError)
            for p in several(skip, "patterns", error=CommandError)
        )
        self._zero_padding = truth(zero_padding, "zero_padding", error=CommandError)
        self._made: dict[str, Parameter] = {}

    def knows(self, name: str) -> bool:
        """Whether the model has the parameter."""
        return name in self.side.manifest

    def projections(self, at: str) -> tuple[tuple[str, ...], str]:
        """What the projections of an expert, or of a feed-forward block, are called below `at`."""
        known = (
            p
            for p in _PROJECTIONS
            if self.knows(f"{at}{p[0][0]}.weight") and self.knows(f"{at}{p[1]}.weight")
        )
        return next(known, _PROJECTIONS[0])

    def local(self, name: str) -> tuple[int, ...]:
        """The shape that this rank's part must have.

        Raises:
            CommandError: If the model has no such parameter, or none of it is this rank's.
        """
        if not self.knows(name):
            raise CommandError(f"the model {self.side.manifest!r} has no parameter {name}")
        layout = self.side.layout(name)
        if self.rank not in layout.ranks:
            raise CommandError(f"rank {self.rank} has storage for {name}, which is on other ranks: {layout}")
        return layout.local_shape(self.rank)

    def add(self, name: str, array: Array, stored: str) -> None:
        """Declare a view; `stored` is the storage's own name, for messages."""
        if self._left_out(name):
            return
        expected = self.local(name)
        if factor_shape(tuple(array.shape), expected) is None:
            raise CommandError(
                f"{stored} on rank {self.rank}: expected {expected} for {name} of shape "
                f"{self.side.manifest[name].shape}, got {tuple(array.shape)}; is it stored as its "
                f"framework builds it, for the parallel sizes {self.side.parallelism}?"
            )
        self._made[name] = Parameter(name, self.side.layout(name), array)

    def add_stack(self, names: Sequence[str], array: Array, stored: str, dim: int = 0) -> None:
        """Declare parts that lie end to end along one dimension of the fused array."""
        at = 0
        for name in names:
            extent = self.local(name)[dim]
            self.add(name, array[(slice(None),) * dim + (slice(at, at + extent),)], stored)
            at += extent
        if at != array.shape[dim]:
            raise CommandError(
                f"{stored} on rank {self.rank}: expected {at} along dimension {dim} for {' + '.join(names)}, "
                f"got shape {tuple(array.shape)}"
            )

    def add_vocabulary(self, names: Iterable[str], array: Array, stored: str) -> None:
        """Declare the rows that the model has of a vocabulary that may be padded."""
        for name in names:
            if self.rank not in self.side.layout(name).ranks:
                continue  # a copy that another parameter is made of
            rows = self.local(name)[0]
            share = (self.side.padded_vocab or 0) // self.side.parallelism.tp or rows
            if array.shape[0] != share:
                raise CommandError(
                    f"{stored} on rank {self.rank}: expected {share} rows, got shape {tuple(array.shape)}; "
                    f"set padded_vocab to the padded rows of all tensor-parallel ranks together"
                )
            self.add(name, array[:rows], stored)
            if self._zero_padding and rows < share:
                array[rows:] = 0

    def slots(self, name: str) -> tuple[int, ...]:
        """The slots of this rank that hold the expert whose parameter this is."""
        home, expert = self.side.home, self.side.expert(name)
        assert home is not None
        assert expert is not None
        return dict(home.owners[expert])[self.side.expert_rank(self.rank)]

    def add_experts(self, names: Sequence[str], stack: Array, stored: str) -> None:
        """Declare an expert's parts of arrays stacked by slot: shape (slots, rows of all parts, columns).

        A view spans from the expert's first slot to its last one; the layout says which rows between are its.
        """
        row = 0
        for name in names:
            slots = self.slots(name)
            span = slots[-1] - slots[0] + 1
            rows = self.local(name)[0] // span
            view = stack[slots[0] : slots[-1] + 1] if span > 1 else stack[slots[0]]
            at = (slice(None),) * (span > 1) + (slice(row, row + rows),)
            self.add(name, view[at], stored)
            row += rows
        if row != stack.shape[1]:
            raise CommandError(
                f"{stored} on rank {self.rank}: expected {row} rows an expert, got shape {tuple(stack.shape)}"
            )

    def finish(self, whole_side: bool = False) -> list[Parameter]:
        """The rank's parameters, in the model's order.

        Args:
            whole_side: List also, without an array, those of which this rank holds nothing.

        Raises:
            CommandError: If a part that the layouts give this rank was not declared.
        """
        truth(whole_side, "whole_side", error=CommandError)
        made: list[Parameter] = []
        missing: list[str] = []
        for name in self.side.manifest:
            if name in self._made:
                made.append(self._made[name])
            elif not self._left_out(name):
                layout = self.side.layout(name)
                if layout.pieces(self.rank) and any(p.box.size for p in layout.pieces(self.rank)):
                    missing.append(name)
                elif whole_side:
                    made.append(Parameter(name, layout))
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise CommandError(
                f"rank {self.rank} has no storage for {missing[0]}{more}, of which it holds a part; "
                f"pass its array, or name it in skip="
            )
        return made

    def _left_out(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self._skip)


def named_arrays(arrays: Mapping[str, Array]) -> Iterable[tuple[str, Array]]:
    """A rank's arrays by the storage's names, or an error."""
    made = table_of(arrays, "from stored name to array", error=CommandError)
    for stored, array in made.items():
        if not isinstance(stored, str) or not hasattr(array, "shape") or isinstance(array, type):
            raise CommandError(
                f"expected names and arrays with a shape, got {shown(array)} as {shown(stored)}"
            )
    return made.items()
