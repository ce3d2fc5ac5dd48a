# SPDX-License-Identifier: Apache-2.0
"""Decoders without experts."""

from __future__ import annotations

from collections.abc import Iterator

from nccl_m2n.models.config import Config
from nccl_m2n.models.families.parts import Entry, attention, decoder, mlp


def llama(c: Config) -> Iterator[Entry]:
    """Llama 2 and 3, Mistral, and others of their make."""
    bias, mlp_bias = c.flag("attention_bias"), c.flag("mlp_bias")

    def layer(index: int, at: str) -> Iterator[Entry]:
        yield from attention(c, f"{at}.self_attn", bias, bias)
        yield from mlp(c, f"{at}.mlp", c["intermediate_size"], mlp_bias)

    return decoder(c, layer)


def qwen2(c: Config) -> Iterator[Entry]:
    """Qwen2 and Qwen2.5 dense: a bias on query, key and value."""

    def layer(index: int, at: str) -> Iterator[Entry]:
        yield from attention(c, f"{at}.self_attn", True, False)
        yield from mlp(c, f"{at}.mlp", c["intermediate_size"])

    return decoder(c, layer)


def qwen3(c: Config) -> Iterator[Entry]:
    """Qwen3 dense: a norm on each query and key head."""
    bias = c.flag("attention_bias")

    def layer(index: int, at: str) -> Iterator[Entry]:
        yield from attention(c, f"{at}.self_attn", bias, bias, norms=True)
        yield from mlp(c, f"{at}.mlp", c["intermediate_size"])

    return decoder(c, layer)


GENERATORS = {"llama": llama, "mistral": llama, "qwen2": qwen2, "qwen3": qwen3}
