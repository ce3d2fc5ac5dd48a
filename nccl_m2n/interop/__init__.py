# SPDX-License-Identifier: Apache-2.0
"""What other libraries call meshes, placements and communicators."""

from nccl_m2n.interop.communicators import as_transport
from nccl_m2n.interop.meshes import as_mesh, layout_of

__all__ = ["as_mesh", "as_transport", "layout_of"]
