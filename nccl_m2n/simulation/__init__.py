# SPDX-License-Identifier: Apache-2.0
"""How long a plan would take on given links: a cost model of plans, pure like them."""

from nccl_m2n.simulation.links import Links
from nccl_m2n.simulation.model import simulate
from nccl_m2n.simulation.timeline import Timeline

__all__ = ["Links", "Timeline", "simulate"]
