# SPDX-License-Identifier: Apache-2.0
"""What the descriptions of families are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from nccl_m2n.models.config import Config

Entry = tuple[str, tuple[int, ...], str]  # name, shape, dtype


def linear(name: str, rows: int, columns: int, dtype: str, bias: bool = False) -> Iterator[Entry]:
    """A matrix and its bias."""
    yield f"{name}.weight", (rows, columns), dtype
    if bias:
        yield f"{name}.bias", (rows,), dtype


def attention(c: Config, at: str, bias: bool, output_bias: bool, norms: bool = False) -> Iterator[Entry]:
    """Query, key, value and output projections, each by itself."""
    heads, kv_heads, rows = c.heads, c.kv_heads, c.head_dim
    hidden = c["hidden_size"]
    yield from linear(f"{at}.q_proj", heads * rows, hidden, c.dtype, bias)
    yield from linear(f"{at}.k_proj", kv_heads * rows, hidden, c.dtype, bias)
    yield from linear(f"{at}.v_proj", kv_heads * rows, hidden, c.dtype, bias)
    yield from linear(f"{at}.o_proj", hidden, heads * rows, c.dtype, output_bias)
    if norms:
        yield f"{at}.q_norm.weight", (rows,), c.dtype
        yield f"{at}.k_norm.weight", (rows,), c.dtype


def mlp(c: Config, at: str, width: int, bias: bool = False) -> Iterator[Entry]:
    """Gate, up and down projections."""
    hidden = c["hidden_size"]
    yield from linear(f"{at}.gate_proj", width, hidden, c.dtype, bias)
    yield from linear(f"{at}.up_proj", width, hidden, c.dtype, bias)
    yield from linear(f"{at}.down_proj", hidden, width, c.dtype, bias)


def decoder(c: Config, layer: Callable[[int, str], Iterator[Entry]], extra: int = 0) -> Iterator[Entry]:
    """Embedding, layers with their two norms, final norm, output head."""
    hidden = c["hidden_size"]
    yield "model.embed_tokens.weight", (c["vocab_size"], hidden), c.dtype
    for index in range(c["num_hidden_layers"] + extra):
        at = f"model.layers.{index}"
        yield from layer(index, at)
        yield f"{at}.input_layernorm.weight", (hidden,), c.dtype
        yield f"{at}.post_attention_layernorm.weight", (hidden,), c.dtype
    yield "model.norm.weight", (hidden,), c.dtype
    if not c.flag("tie_word_embeddings"):
        yield "lm_head.weight", (c["vocab_size"], hidden), c.dtype
