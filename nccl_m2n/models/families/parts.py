# SPDX-License-Identifier: Apache-2.0
"""What the descriptions of families are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nccl_m2n.models.config import Config

Entry = tuple[str, tuple[int, ...], str]  # name, shape, dtype
Layer = Callable[[int, str], Iterator[Entry]]  # of a layer's number and the beginning of its names
Switch = bool | str  # on or off, or the key of the configuration that says it

SPLIT = ("gate_proj", "up_proj")
FUSED = "gate_up_proj"


@dataclass(frozen=True)
class Style:
    """How a family builds its decoder; as Llama does where nothing is said.

    Args:
        bias: Of query, key and value.
        output_bias: Of the output projection; left out, as `bias`.
        mlp_bias: Of the feed-forward matrices.
        head_bias: Of the output head.
        norm_bias: Norms have a bias.
        qkv: The name of one matrix for query, key and value, where it is one.
        output: The name of the output projection.
        up: The names of the matrices that widen; `FUSED` holds gate and up.
        down: The name of the one that narrows.
        norms: Norms of a layer beside its blocks.
        final: The last norm; empty where there is none.
        head_norms: Norms of query and key, a head's rows long.
        all_norms: The same, over all heads.
        tied: Whether the embedding is the output head where the configuration does not say.
    """

    bias: Switch = "attention_bias"
    output_bias: Switch | None = None
    mlp_bias: Switch = "mlp_bias"
    head_bias: Switch = False
    norm_bias: bool = False
    qkv: str = ""
    output: str = "o_proj"
    up: tuple[str, ...] = SPLIT
    down: str = "down_proj"
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    final: str = "norm"
    head_norms: tuple[str, ...] = ()
    all_norms: tuple[str, ...] = ()
    tied: bool = False


def switch(c: Config, value: Switch) -> bool:
    """Whether something is on."""
    return c.flag(value) if isinstance(value, str) else value


def linear(name: str, rows: int, columns: int, dtype: str, bias: bool = False) -> Iterator[Entry]:
    """A matrix and its bias."""
    yield f"{name}.weight", (rows, columns), dtype
    if bias:
        yield f"{name}.bias", (rows,), dtype


def norm(name: str, size: int, dtype: str, bias: bool = False) -> Iterator[Entry]:
    """A norm's weight, and its bias."""
    yield f"{name}.weight", (size,), dtype
    if bias:
        yield f"{name}.bias", (size,), dtype


def attention(c: Config, at: str, s: Style, wide: int = 1) -> Iterator[Entry]:
    """Query, key, value and output projections; `wide` times the rows of queries, where these have gates."""
    heads, groups, rows, hidden = c.heads, c.kv_heads, c.head_dim, c["hidden_size"]
    bias = switch(c, s.bias)
    if s.qkv:
        yield from linear(f"{at}.{s.qkv}", (heads + 2 * groups) * rows, hidden, c.dtype, bias)
    else:
        yield from linear(f"{at}.q_proj", heads * rows * wide, hidden, c.dtype, bias)
        yield from linear(f"{at}.k_proj", groups * rows, hidden, c.dtype, bias)
        yield from linear(f"{at}.v_proj", groups * rows, hidden, c.dtype, bias)
    output_bias = bias if s.output_bias is None else switch(c, s.output_bias)
    yield from linear(f"{at}.{s.output}", hidden, heads * rows, c.dtype, output_bias)
    for name in s.head_norms:
        yield f"{at}.{name}.weight", (rows,), c.dtype
    for name, count in zip(s.all_norms, (heads, groups), strict=False):
        yield f"{at}.{name}.weight", (count * rows,), c.dtype


def mlp(c: Config, at: str, width: int, s: Style | None = None) -> Iterator[Entry]:
    """The matrices of a feed-forward block."""
    s, hidden = s or Style(mlp_bias=False), c["hidden_size"]
    bias = switch(c, s.mlp_bias)
    for name in s.up:
        yield from linear(f"{at}.{name}", (2 if name == FUSED else 1) * width, hidden, c.dtype, bias)
    yield from linear(f"{at}.{s.down}", hidden, width, c.dtype, bias)


def decoder(
    c: Config, layer: Layer, s: Style | None = None, extra: int = 0, at: str = "model"
) -> Iterator[Entry]:
    """Embedding, layers with their norms, final norm, output head."""
    s, hidden = s or Style(), c["hidden_size"]
    yield f"{at}.embed_tokens.weight", (c["vocab_size"], hidden), c.dtype
    for index in range(c["num_hidden_layers"] + extra):
        here = f"{at}.layers.{index}"
        yield from layer(index, here)
        for name in s.norms:
            yield from norm(f"{here}.{name}", hidden, c.dtype, s.norm_bias)
    if s.final:
        yield from norm(f"{at}.{s.final}", hidden, c.dtype, s.norm_bias)
    yield from head(c, s)


def head(c: Config, s: Style, name: str = "lm_head") -> Iterator[Entry]:
    """The output head of a model whose embedding is not its head."""
    if not c.tied(s.tied):
        yield from linear(name, c["vocab_size"], c["hidden_size"], c.dtype, switch(c, s.head_bias))


def plain(s: Style) -> Callable[[Config], Iterator[Entry]]:
    """The generator of a family whose layers are one attention and one feed-forward block."""

    def family(c: Config) -> Iterator[Entry]:
        def layer(index: int, at: str) -> Iterator[Entry]:
            yield from attention(c, f"{at}.self_attn", s)
            yield from mlp(c, f"{at}.mlp", c["intermediate_size"], s)

        return decoder(c, layer, s)

    return family
