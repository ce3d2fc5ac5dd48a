# SPDX-License-Identifier: Apache-2.0
"""Who sends what to whom, when: pure functions of values."""

from nccl_m2n.planning.planner import plan
from nccl_m2n.planning.plans import Plan
from nccl_m2n.planning.topology import Topology
from nccl_m2n.planning.transfer import Transfer

__all__ = ["Plan", "Topology", "Transfer", "plan"]
