# SPDX-License-Identifier: Apache-2.0
"""Views of real storage: frameworks' fused arrays as parameters with published names.

Nothing is copied. Each function takes one rank's arrays under the names its framework gives them and
returns that rank's :class:`~nccl_m2n.refit.Parameter` list for :class:`~nccl_m2n.refit.Refit`:

- :func:`megatron`: Megatron-Core, with or without Transformer Engine;
- :func:`vllm`: vLLM and SGLang;
- :func:`fsdp`: FSDP2 and HSDP, with TP or without.

Arrays are anything with NumPy's `shape`, basic slicing, `reshape` and `swapaxes`: NumPy, CuPy, torch.
"""

from __future__ import annotations

from nccl_m2n.storage.declare import padded_rows
from nccl_m2n.storage.fsdp import fsdp
from nccl_m2n.storage.megatron import megatron, split_qkv
from nccl_m2n.storage.vllm import vllm

__all__ = ["fsdp", "megatron", "padded_rows", "split_qkv", "vllm"]
