# SPDX-License-Identifier: Apache-2.0
"""One side of a benchmark in a few characters: ``2x4: R S(0)``."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from nccl_m2n.errors import CommandError
from nccl_m2n.layout import Layout, Mesh, Placement, Replicate, Shard, StridedShard

_WORD = re.compile(r"\s*(?:(R)|S\((\d+)\)|SS\((\d+), *(\d+)\))(?=\s|$)")


@dataclass(frozen=True)
class Side:
    """A mesh shape and a placement for each of its axes.

    Args:
        mesh: Ranks along each axis; empty where the number of ranks is still to be said.
        placements: What each axis does to the tensor.

    Example:
        >>> from nccl_m2n.cli.side import Side
        >>> side = Side.parse("2x4: R S(0)")
        >>> side.size, side.placements
        (8, (Replicate(), Shard(0)))
    """

    mesh: tuple[int, ...]
    placements: tuple[Placement, ...]

    @classmethod
    def parse(cls, text: str) -> Side:
        """Read ``MESH: PLACEMENT …``, or one placement alone; placements print themselves likewise.

        Raises:
            CommandError: Saying what was expected.
        """
        shape, colon, words = text.rpartition(":")
        mesh = tuple(int(n) for n in shape.split("x") if n.strip().isdecimal() and int(n) > 0)
        placements, at = [], 0
        while match := _WORD.match(words, at):
            placements.append(_placement(match))
            at = match.end()
        if words[at:].strip() or (colon and len(mesh) != shape.count("x") + 1):
            raise CommandError(
                f"expected a mesh and placements out of R, S(dim) and SS(dim, factor), such as '2x4: R S(0)', "
                f"got {text!r}"
            )
        if len(placements) != max(1, len(mesh)):
            raise CommandError(
                f"expected one placement for each of the {max(1, len(mesh))} mesh axes, got {text!r}"
            )
        return cls(mesh, tuple(placements))

    @property
    def size(self) -> int:
        """Its number of ranks."""
        return math.prod(self.mesh)

    @property
    def ndim(self) -> int:
        """Dimensions that a tensor must have."""
        dims = [p.dim for p in self.placements if p.dim is not None]
        return max(dims, default=0) + 1

    def over(self, ranks: int) -> Side:
        """The same with its ranks said, where they were not."""
        return self if self.mesh else replace(self, mesh=(ranks,))

    def layout(self, shape: tuple[int, ...], first: int) -> Layout:
        """The layout of a tensor on the ranks from `first` on."""
        return Layout(shape, Mesh.arange(self.mesh, start=first), self.placements)

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.mesh))}: {' '.join(map(str, self.placements))}"


def _placement(match: re.Match[str]) -> Placement:
    replicate, dim, strided, factor = match.groups()
    if replicate:
        return Replicate()
    return Shard(int(dim)) if dim else StridedShard(int(strided), int(factor))
