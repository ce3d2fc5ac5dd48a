# SPDX-License-Identifier: Apache-2.0
"""Meshes and layouts out of PyTorch's, told by duck typing, so that PyTorch need not be installed."""

from __future__ import annotations

from typing import Any

import numpy as np

from nccl_m2n.errors import LayoutError
from nccl_m2n.layout import Layout, Mesh


def as_mesh(mesh: Any) -> Mesh:
    """A mesh from a `Mesh`, a PyTorch ``DeviceMesh``, an ``nccl.m2n.Mesh``, or nested sequences or an array of ranks.

    Raises:
        LayoutError: If it is no mesh.
    """
    if isinstance(mesh, Mesh):
        return mesh
    if hasattr(mesh, "mesh") and hasattr(mesh, "mesh_dim_names"):
        return Mesh(np.asarray(mesh.mesh.tolist()), mesh.mesh_dim_names)
    if hasattr(mesh, "dims") and hasattr(mesh, "start_rank"):
        return Mesh.arange(tuple(mesh.dims)[: mesh.ndims], start=mesh.start_rank)
    return Mesh(mesh)


def layout_of(tensor: Any) -> Layout:
    """The layout of a PyTorch DTensor.

    The tensor's strides do not matter: a layout speaks of indices. Bind ``tensor.to_local()``.

    Raises:
        LayoutError: If it is no DTensor, or has values still to be summed (``Partial``).
    """
    if not hasattr(tensor, "device_mesh") or not hasattr(tensor, "placements"):
        raise LayoutError(
            f"expected a DTensor, got {type(tensor).__name__}; describe it with Layout(shape, mesh, …)"
        )
    return Layout(tuple(tensor.shape), as_mesh(tensor.device_mesh), tensor.placements)
