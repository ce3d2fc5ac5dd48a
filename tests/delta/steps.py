# SPDX-License-Identifier: Apache-2.0
"""A scenario moved several times, with some of its values changed in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from nccl_m2n.transport.base import Transport
from tests.scenarios import UNTOUCHED, Scenario, SideOfRank

SHARES = (0.02, 0.3, 0.0, 1.0, 0.01)  # list, map, nothing, dense, list again


class Steps:
    """The arrays of some ranks in a scenario, and the global values behind them.

    Args:
        scenario: What moves.
        ranks: Whose arrays this process has.
        seed: Chooses what changes; equal on all ranks.
        side_of_rank: Makes the memory.
    """

    def __init__(
        self,
        scenario: Scenario,
        ranks: tuple[int, ...],
        seed: int = 0,
        side_of_rank: Callable[..., SideOfRank] = SideOfRank,
    ) -> None:
        self.scenario, self.ranks = scenario, ranks
        self.random = np.random.default_rng(seed)
        self.values = {f"t{i}": tensor.values(0).copy() for i, tensor in enumerate(scenario.tensors)}
        self.sides = {
            side: {rank: side_of_rank(scenario, rank, side) for rank in ranks}
            for side in ("source", "destination")
        }
        for rank in ranks:
            self.sides["destination"][rank].fill(0)
        self.fill()

    def run(self, transport: Transport, shares: Sequence[float], **options: Any) -> list[str]:
        """Move once whole, then after each change what changed; the arrays that went wrong."""
        wrong = []
        bound = self.scenario.plan(**options).bind(
            transport, self.given("source"), self.given("destination"), delta=True
        )
        with bound:
            for turn, share in enumerate((0.0, *shares)):
                self.change(share)
                bound.run()
                bound.wait(timeout=60)
                wrong += [f"{what} in turn {turn}" for what in self.wrong()]
        return wrong

    def given(self, side: str) -> dict[str, Any]:
        """One side's arrays as `Plan.bind` takes them."""
        held = {rank: self.sides[side][rank].arrays for rank in self.ranks}
        if len(self.ranks) == 1:
            return held[self.ranks[0]]
        return {
            name: {rank: arrays[name] for rank, arrays in held.items() if name in arrays}
            for name in self.values
        }

    def change(self, share: float) -> int:
        """Swap some elements' values for those of others; return how many elements there are."""
        for values in self.values.values():
            flat = values.reshape(-1)
            chosen = np.flatnonzero(self.random.random(flat.size) < share)
            flat[chosen] = flat[self.random.permutation(flat.size)[: chosen.size]]
        self.fill()
        return sum(values.size for values in self.values.values())

    def fill(self) -> None:
        """Put the values in the sources."""
        for rank in self.ranks:
            side = self.sides["source"][rank]
            for name, storage in side.storage.items():
                for piece in side.tensors[name].source.pieces(rank):
                    storage.array[piece.local_slices] = self.values[name][piece.box.slices]
            side.upload()

    def wrong(self) -> list[str]:
        """The destination arrays that are not what they should be, to the last byte around them."""
        return list(self._wrong())

    def _wrong(self) -> Iterator[str]:
        for rank in self.ranks:
            side = self.sides["destination"][rank]
            side.download()
            for name, storage in side.storage.items():
                memory = np.empty_like(storage.base)
                memory.reshape(-1).view(np.uint8)[...] = UNTOUCHED
                expected = storage.view(memory)
                values = self.values[name].astype(storage.base.dtype)
                for piece in side.tensors[name].destination.pieces(rank):
                    expected[piece.local_slices] = values[piece.box.slices]
                if storage.base.tobytes() != memory.tobytes():
                    yield f"{name} on rank {rank}"
