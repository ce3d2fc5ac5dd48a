# SPDX-License-Identifier: Apache-2.0
"""Whole models: what they consist of, who holds which part, and keeping two sides in step."""

from __future__ import annotations

from nccl_m2n.refit.manifest import Manifest, TensorInfo

__all__ = ["Manifest", "TensorInfo"]
