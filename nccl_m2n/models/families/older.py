# SPDX-License-Identifier: Apache-2.0
"""Decoders from before Llama: other names, query, key and value in one matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from nccl_m2n.models.config import Config
from nccl_m2n.models.families.parts import Entry, Layer, Style, attention, head, linear, mlp, norm


def _stack(c: Config, at: str, layer: Layer, norms: tuple[str, ...], bias: bool = True) -> Iterator[Entry]:
    """Layers and their norms."""
    for index in range(c["num_hidden_layers"]):
        here = f"{at}.{index}"
        yield from layer(index, here)
        for name in norms:
            yield from norm(f"{here}.{name}", c["hidden_size"], c.dtype, bias)


def _embedding(c: Config, name: str) -> Entry:
    return f"{name}.weight", (c["vocab_size"], c["hidden_size"]), c.dtype


def _fused(
    c: Config, at: str, names: tuple[str, str, str, str], width: int, bias: bool = True
) -> Iterator[Entry]:
    """Query, key and value in one; output; the two matrices between."""
    hidden, (packed, output, up, down) = c["hidden_size"], names
    yield from linear(f"{at}.{packed}", 3 * hidden, hidden, c.dtype, bias)
    yield from linear(f"{at}.{output}", hidden, hidden, c.dtype, bias)
    yield from linear(f"{at}.{up}", width, hidden, c.dtype, bias)
    yield from linear(f"{at}.{down}", hidden, width, c.dtype, bias)


def gpt2(c: Config) -> Iterator[Entry]:
    """GPT-2, its matrices as (in, out)."""
    names = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")

    def layer(index: int, at: str) -> Iterator[Entry]:
        for name, shape, dtype in _fused(c, at, names, c.number("intermediate_size", 4 * c["hidden_size"])):
            yield name, shape[::-1], dtype

    yield _embedding(c, "transformer.wte")
    yield "transformer.wpe.weight", (c["max_position_embeddings"], c["hidden_size"]), c.dtype
    yield from _stack(c, "transformer.h", layer, ("ln_1", "ln_2"))
    yield from norm("transformer.ln_f", c["hidden_size"], c.dtype, True)
    yield from head(c, Style(tied=True))


def gpt_bigcode(c: Config) -> Iterator[Entry]:
    """StarCoder: GPT-2 with one key-value head."""
    hidden, width = c["hidden_size"], c.number("intermediate_size", 4 * c["hidden_size"])
    packed = hidden + 2 * c.head_dim if c.flag("multi_query", True) else 3 * hidden

    def layer(index: int, at: str) -> Iterator[Entry]:
        yield from linear(f"{at}.attn.c_attn", packed, hidden, c.dtype, True)
        yield from linear(f"{at}.attn.c_proj", hidden, hidden, c.dtype, True)
        yield from mlp(c, f"{at}.mlp", width, Style(mlp_bias=True, up=("c_fc",), down="c_proj"))

    yield _embedding(c, "transformer.wte")
    yield "transformer.wpe.weight", (c["max_position_embeddings"], hidden), c.dtype
    yield from _stack(c, "transformer.h", layer, ("ln_1", "ln_2"))
    yield from norm("transformer.ln_f", hidden, c.dtype, True)
    yield from head(c, Style(tied=True))


def gptj(c: Config) -> Iterator[Entry]:
    """GPT-J."""
    style = Style(bias=False, mlp_bias=True, output="out_proj", up=("fc_in",), down="fc_out", head_bias=True)

    def layer(index: int, at: str) -> Iterator[Entry]:
        yield from attention(c, f"{at}.attn", style)
        yield from mlp(c, f"{at}.mlp", c.number("intermediate_size", 4 * c["hidden_size"]), style)

    yield _embedding(c, "transformer.wte")
    yield from _stack(c, "transformer.h", layer, ("ln_1",))
    yield from norm("transformer.ln_f", c["hidden_size"], c.dtype, True)
    yield from head(c, style)


_NEOX = ("query_key_value", "dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
_BLOCK_NORMS = ("input_layernorm", "post_attention_layernorm")


def bloom(c: Config) -> Iterator[Entry]:
    """BLOOM."""
    hidden, at = c["hidden_size"], "self_attention."
    names = (f"{at}{_NEOX[0]}", f"{at}{_NEOX[1]}", *_NEOX[2:])
    yield _embedding(c, "transformer.word_embeddings")
    yield from norm("transformer.word_embeddings_layernorm", hidden, c.dtype, True)
    yield from _stack(c, "transformer.h", lambda i, here: _fused(c, here, names, 4 * hidden), _BLOCK_NORMS)
    yield from norm("transformer.ln_f", hidden, c.dtype, True)
    yield from head(c, Style(tied=True))


def gpt_neox(c: Config) -> Iterator[Entry]:
    """GPT-NeoX and Pythia."""
    names = (f"attention.{_NEOX[0]}", f"attention.{_NEOX[1]}", *_NEOX[2:])

    def layer(index: int, at: str) -> Iterator[Entry]:
        return _fused(c, at, names, c["intermediate_size"], c.flag("attention_bias", True))

    yield _embedding(c, "gpt_neox.embed_in")
    yield from _stack(c, "gpt_neox.layers", layer, _BLOCK_NORMS)
    yield from norm("gpt_neox.final_layer_norm", c["hidden_size"], c.dtype, True)
    yield from head(c, Style(), "embed_out")


def persimmon(c: Config) -> Iterator[Entry]:
    """Persimmon."""
    names = (f"self_attn.{_NEOX[0]}", f"self_attn.{_NEOX[1]}", *_NEOX[2:])

    def layer(index: int, at: str) -> Iterator[Entry]:
        yield from _fused(c, at, names, c["intermediate_size"])
        for name in ("q_layernorm", "k_layernorm") if c.flag("qk_layernorm", True) else ():
            yield from norm(f"{at}.self_attn.{name}", c.head_dim, c.dtype, True)

    yield _embedding(c, "model.embed_tokens")
    yield from _stack(c, "model.layers", layer, _BLOCK_NORMS)
    yield from norm("model.final_layernorm", c["hidden_size"], c.dtype, True)
    yield from head(c, Style())


def opt(c: Config) -> Iterator[Entry]:
    """OPT: learnt positions, two more than there are."""
    hidden, bias, at = c["hidden_size"], c.flag("enable_bias", True), "model.decoder"
    embedded = c.number("word_embed_proj_dim", hidden)
    style = Style(bias=bias, mlp_bias=bias, output="out_proj", up=("fc1",), down="fc2", tied=True)

    def layer(index: int, here: str) -> Iterator[Entry]:
        yield from attention(c, f"{here}.self_attn", style)
        yield from mlp(c, here, c["intermediate_size"], style)

    yield f"{at}.embed_tokens.weight", (c["vocab_size"], embedded), c.dtype
    yield f"{at}.embed_positions.weight", (c["max_position_embeddings"] + 2, hidden), c.dtype
    if embedded != hidden:
        yield from linear(f"{at}.project_in", hidden, embedded, c.dtype)
        yield from linear(f"{at}.project_out", embedded, hidden, c.dtype)
    affine = c.flag("layer_norm_elementwise_affine", True)
    yield from _stack(
        c, f"{at}.layers", layer, ("self_attn_layer_norm", "final_layer_norm") if affine else ()
    )
    if affine and c.flag("do_layer_norm_before", True):
        yield from norm(f"{at}.final_layer_norm", hidden, c.dtype, True)


def mpt(c: Config) -> Iterator[Entry]:
    """MPT."""
    hidden, bias = c["hidden_size"], not c.flag("no_bias", True)
    names = ("attn.Wqkv", "attn.out_proj", "ffn.up_proj", "ffn.down_proj")
    width = c.number("expansion_ratio", 4) * hidden
    yield _embedding(c, "transformer.wte")
    yield from _stack(
        c, "transformer.blocks", lambda i, at: _fused(c, at, names, width, bias), ("norm_1", "norm_2"), bias
    )
    yield from norm("transformer.norm_f", hidden, c.dtype, bias)


GENERATORS: dict[str, Callable[[Config], Iterator[Entry]]] = {
    "gpt2": gpt2,
    "gpt_bigcode": gpt_bigcode,
    "gptj": gptj,
    "bloom": bloom,
    "gpt_neox": gpt_neox,
    "persimmon": persimmon,
    "opt": opt,
    "mpt": mpt,
}
