# SPDX-License-Identifier: Apache-2.0
"""Meshes, placements and layouts of other libraries, told by what they look like."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

from nccl_m2n import Layout, LayoutError, Mesh, Shard, TransportError
from nccl_m2n.interop import as_mesh, as_transport, layout_of


@dataclass(frozen=True)
class NvidiaMesh:
    """Looks as ``nccl.m2n.Mesh`` does, which pads its dims to two."""

    dims: tuple[int, ...]
    start_rank: int
    ndims: int


@pytest.mark.parametrize(
    ("given", "mesh"),
    [
        (Mesh([2, 0]), Mesh([2, 0])),
        ([[0, 1], [2, 3]], Mesh([[0, 1], [2, 3]])),
        (np.arange(3, 6), Mesh([3, 4, 5])),
        (SimpleNamespace(mesh=np.array([[4, 5]]), mesh_dim_names=("dp", "tp")), Mesh([[4, 5]])),
        (NvidiaMesh((2, 3), 4, 2), Mesh.arange((2, 3), start=4)),
        (NvidiaMesh((3, 1), 1, 1), Mesh([1, 2, 3])),
    ],
)
def test_meshes(given: object, mesh: Mesh) -> None:
    assert as_mesh(given) == mesh


def test_layout_of_a_dtensor() -> None:
    mesh = SimpleNamespace(mesh=np.array([0, 1]), mesh_dim_names=None)
    tensor = SimpleNamespace(shape=(5, 3), device_mesh=mesh, placements=(Shard(0),))
    assert layout_of(tensor) == Layout((5, 3), Mesh([0, 1]), [Shard(0)])


def test_what_is_no_dtensor() -> None:
    with pytest.raises(LayoutError, match="expected a DTensor, got ndarray"):
        layout_of(np.zeros(3))


@pytest.mark.parametrize("comm", [None, "comm", SimpleNamespace(rank=0, size=2), 2.0, True])
def test_what_is_no_communicator_is_told_before_nccl_is_looked_for(comm: object) -> None:
    with pytest.raises(
        TransportError, match="the address of a communicator, got .*pass a transport, an mpi4py"
    ):
        as_transport(comm)
