# SPDX-License-Identifier: Apache-2.0
"""What a model is: its tensors' names, shapes and types, from a file, a configuration or a name."""

from __future__ import annotations

from nccl_m2n.models.manifest import Manifest, TensorInfo

__all__ = ["Manifest", "TensorInfo"]
