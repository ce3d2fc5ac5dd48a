# SPDX-License-Identifier: Apache-2.0
"""Named arrays on two sides of one model, kept in step. It knows no model: `models` and `sharding` do."""

from __future__ import annotations

from typing import Any

from nccl_m2n.refit.parameter import Parameter
from nccl_m2n.refit.report import Report
from nccl_m2n.refit.session import Refit

__all__ = ["Parameter", "Refit", "Report"]


def __getattr__(name: str) -> Any:  # names that were here once
    from nccl_m2n._moved import moved_name

    return moved_name(__name__, name)
