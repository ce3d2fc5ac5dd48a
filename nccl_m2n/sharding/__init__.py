# SPDX-License-Identifier: Apache-2.0
"""Who holds which parameter: parallel sizes and rules make one layout for each parameter of a model."""

from __future__ import annotations

from nccl_m2n.sharding.parallelism import Parallelism
from nccl_m2n.sharding.placer import layouts
from nccl_m2n.sharding.rules import Rule, load_rules, rules_for

__all__ = ["Parallelism", "Rule", "layouts", "load_rules", "rules_for"]
