# SPDX-License-Identifier: Apache-2.0
"""Whole models: what they consist of, who holds which part, and keeping two sides in step."""

from __future__ import annotations

from nccl_m2n.refit.manifest import Manifest, TensorInfo
from nccl_m2n.refit.parallelism import Parallelism
from nccl_m2n.refit.parameter import Parameter
from nccl_m2n.refit.placing import layouts
from nccl_m2n.refit.report import Report
from nccl_m2n.refit.rules import Rule, load_rules, rules_for
from nccl_m2n.refit.session import Refit

__all__ = [
    "Manifest",
    "Parallelism",
    "Parameter",
    "Refit",
    "Report",
    "Rule",
    "TensorInfo",
    "layouts",
    "load_rules",
    "rules_for",
]
