# SPDX-License-Identifier: Apache-2.0
"""Encoders."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from nccl_m2n.models.config import Config
from nccl_m2n.models.families.parts import Entry, linear, norm


def bert(c: Config, prefix: str = "", pooler: bool = True) -> Iterator[Entry]:
    """BERT as saved from ``BertModel``: no prefix, with the pooler."""
    hidden, width, at = c["hidden_size"], c["intermediate_size"], f"{prefix}embeddings"
    yield f"{at}.word_embeddings.weight", (c["vocab_size"], hidden), c.dtype
    yield f"{at}.position_embeddings.weight", (c["max_position_embeddings"], hidden), c.dtype
    yield f"{at}.token_type_embeddings.weight", (c["type_vocab_size"], hidden), c.dtype
    yield from norm(f"{at}.LayerNorm", hidden, c.dtype, True)
    for index in range(c["num_hidden_layers"]):
        at = f"{prefix}encoder.layer.{index}"
        for part in ("query", "key", "value"):
            yield from linear(f"{at}.attention.self.{part}", hidden, hidden, c.dtype, True)
        yield from linear(f"{at}.attention.output.dense", hidden, hidden, c.dtype, True)
        yield from norm(f"{at}.attention.output.LayerNorm", hidden, c.dtype, True)
        yield from linear(f"{at}.intermediate.dense", width, hidden, c.dtype, True)
        yield from linear(f"{at}.output.dense", hidden, width, c.dtype, True)
        yield from norm(f"{at}.output.LayerNorm", hidden, c.dtype, True)
    if pooler:
        yield from linear(f"{prefix}pooler.dense", hidden, hidden, c.dtype, True)


def roberta(c: Config) -> Iterator[Entry]:
    """RoBERTa with its head for words, as published."""
    hidden = c["hidden_size"]
    yield from bert(c, "roberta.", pooler=False)
    yield from linear("lm_head.dense", hidden, hidden, c.dtype, True)
    yield from norm("lm_head.layer_norm", hidden, c.dtype, True)
    yield "lm_head.bias", (c["vocab_size"],), c.dtype


def distilbert(c: Config) -> Iterator[Entry]:
    """DistilBERT as saved from ``DistilBertModel``."""
    hidden, width = c["hidden_size"], c["hidden_dim"]
    yield "embeddings.word_embeddings.weight", (c["vocab_size"], hidden), c.dtype
    yield "embeddings.position_embeddings.weight", (c["max_position_embeddings"], hidden), c.dtype
    yield from norm("embeddings.LayerNorm", hidden, c.dtype, True)
    for index in range(c["num_hidden_layers"]):
        at = f"transformer.layer.{index}"
        for part in ("q", "k", "v", "out"):
            yield from linear(f"{at}.attention.{part}_lin", hidden, hidden, c.dtype, True)
        yield from linear(f"{at}.ffn.lin1", width, hidden, c.dtype, True)
        yield from linear(f"{at}.ffn.lin2", hidden, width, c.dtype, True)
        for name in ("sa_layer_norm", "output_layer_norm"):
            yield from norm(f"{at}.{name}", hidden, c.dtype, True)


def modernbert(c: Config) -> Iterator[Entry]:
    """ModernBERT as saved from ``ModernBertModel``: the first layer has no norm before its attention."""
    hidden, width, bias = c["hidden_size"], c["intermediate_size"], c.flag("norm_bias")
    attention, wide = c.flag("attention_bias"), c.flag("mlp_bias")
    yield "embeddings.tok_embeddings.weight", (c["vocab_size"], hidden), c.dtype
    yield from norm("embeddings.norm", hidden, c.dtype, bias)
    for index in range(c["num_hidden_layers"]):
        at = f"layers.{index}"
        if index:
            yield from norm(f"{at}.attn_norm", hidden, c.dtype, bias)
        yield from linear(f"{at}.attn.Wqkv", 3 * hidden, hidden, c.dtype, attention)
        yield from linear(f"{at}.attn.Wo", hidden, hidden, c.dtype, attention)
        yield from norm(f"{at}.mlp_norm", hidden, c.dtype, bias)
        yield from linear(f"{at}.mlp.Wi", 2 * width, hidden, c.dtype, wide)
        yield from linear(f"{at}.mlp.Wo", hidden, width, c.dtype, wide)
    yield from norm("final_norm", hidden, c.dtype, bias)


GENERATORS: dict[str, Callable[[Config], Iterator[Entry]]] = {
    "bert": bert,
    "roberta": roberta,
    "distilbert": distilbert,
    "modernbert": modernbert,
}
