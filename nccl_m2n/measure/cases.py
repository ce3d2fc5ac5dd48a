# SPDX-License-Identifier: Apache-2.0
"""The named problems that are measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nccl_m2n.layout import Layout, Mesh, Placement, Replicate, Shard
from nccl_m2n.planning import Transfer


@dataclass(frozen=True)
class Case:
    """One problem on a cluster of `hosts` × `per_host` ranks; elements of two bytes, as bfloat16 has them."""

    name: str
    hosts: int
    per_host: int
    nic_gbit: float  # 0: as fast as the emulation goes
    sources: tuple[int, ...]  # mesh shape, from rank 0 on
    source_placements: tuple[Placement, ...]
    destinations: tuple[int, ...]  # mesh shape, of the ranks after the sources
    destination_placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    tensors: int = 1

    def transfers(self) -> list[Transfer]:
        """The transfers of the problem."""
        source = Mesh.arange(self.sources)
        destination = Mesh.arange(self.destinations, start=source.size)
        before = Layout(self.shape, source, self.source_placements)
        after = Layout(self.shape, destination, self.destination_placements)
        return [Transfer(before, after, "uint16", f"t{i}") for i in range(self.tensors)]

    def domains(self) -> list[list[int]]:
        """The ranks of each host."""
        k = self.per_host
        return [list(range(h * k, (h + 1) * k)) for h in range(self.hosts)]


R = Replicate()
MATRIX = (16384, 8192)  # 256 MiB of two-byte elements


def _case(
    name: str,
    cluster: tuple[int, int, float],
    source: tuple[Sequence[int], Sequence[Placement]],
    destination: tuple[Sequence[int], Sequence[Placement]],
    shape: tuple[int, ...] = MATRIX,
    tensors: int = 1,
) -> Case:
    sides = [(tuple(mesh), tuple(placements)) for mesh, placements in (source, destination)]
    return Case(name, *cluster, *sides[0], *sides[1], shape, tensors)


CASES = {
    case.name: case
    for case in [
        _case("rows to replicas, 2x4", (2, 4, 4), ((4,), [Shard(0)]), ((4,), [R])),
        _case("replicas to rows, 2x4", (2, 4, 4), ((4,), [R]), ((2, 2), [R, Shard(0)])),
        _case("rows to replicas, 4x2", (4, 2, 4), ((2,), [Shard(0)]), ((6,), [R])),
        _case("rows to replicas, 3x4", (3, 4, 2), ((4,), [Shard(0)]), ((8,), [R])),
        _case("rows to columns, 3x4", (3, 4, 2), ((4,), [Shard(0)]), ((8,), [Shard(1)])),
        _case("1,024 tensors TP4 to DP4", (2, 4, 0), ((4,), [Shard(0)]), ((4,), [R]), (128, 1024), 1024),
        _case("16,384 tensors TP4 to DP4", (2, 4, 0), ((4,), [Shard(0)]), ((4,), [R]), (8, 1024), 16384),
        _case("TP4 to TP2xDP2", (1, 8, 0), ((4,), [Shard(0)]), ((2, 2), [R, Shard(0)]), (65536, 8192)),
    ]
}
