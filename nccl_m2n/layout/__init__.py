# SPDX-License-Identifier: Apache-2.0
"""Who holds what: pure integer geometry."""

from nccl_m2n.layout.box import Box, Piece
from nccl_m2n.layout.layout import Layout
from nccl_m2n.layout.mesh import Mesh
from nccl_m2n.layout.placement import Placement
from nccl_m2n.layout.replicate import Replicate
from nccl_m2n.layout.shard import Segment, Shard
from nccl_m2n.layout.strided_shard import StridedShard

__all__ = ["Box", "Layout", "Mesh", "Piece", "Placement", "Replicate", "Segment", "Shard", "StridedShard"]
