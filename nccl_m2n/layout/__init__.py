# SPDX-License-Identifier: Apache-2.0
"""Who holds what: pure integer geometry."""

from nccl_m2n.layout.box import Box, Piece
from nccl_m2n.layout.layout import Layout
from nccl_m2n.layout.mesh import Mesh
from nccl_m2n.layout.placement import Placement, Replicate, Segment, Shard, StridedShard

__all__ = ["Box", "Layout", "Mesh", "Piece", "Placement", "Replicate", "Segment", "Shard", "StridedShard"]
