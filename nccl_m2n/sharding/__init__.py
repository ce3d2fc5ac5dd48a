# SPDX-License-Identifier: Apache-2.0
"""Who holds which parameter: parallel sizes and rules make one layout for each parameter of a model."""

from __future__ import annotations

from nccl_m2n.sharding.families import rules_for
from nccl_m2n.sharding.load import load_rules
from nccl_m2n.sharding.model_layouts import layouts
from nccl_m2n.sharding.parallelism import Parallelism
from nccl_m2n.sharding.rules import Rule

__all__ = ["Parallelism", "Rule", "layouts", "load_rules", "rules_for"]
