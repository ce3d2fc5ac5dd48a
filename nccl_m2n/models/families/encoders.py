# SPDX-License-Identifier: Apache-2.0
"""Encoders."""

from __future__ import annotations

from collections.abc import Iterator

from nccl_m2n.models.config import Config
from nccl_m2n.models.families.parts import Entry, linear


def bert(c: Config) -> Iterator[Entry]:
    """BERT encoders as saved from ``BertModel``: no prefix, with the pooler."""
    hidden, width = c["hidden_size"], c["intermediate_size"]

    def norm(name: str) -> Iterator[Entry]:
        yield f"{name}.LayerNorm.weight", (hidden,), c.dtype
        yield f"{name}.LayerNorm.bias", (hidden,), c.dtype

    yield "embeddings.word_embeddings.weight", (c["vocab_size"], hidden), c.dtype
    yield "embeddings.position_embeddings.weight", (c["max_position_embeddings"], hidden), c.dtype
    yield "embeddings.token_type_embeddings.weight", (c["type_vocab_size"], hidden), c.dtype
    yield from norm("embeddings")
    for index in range(c["num_hidden_layers"]):
        at = f"encoder.layer.{index}"
        for part in ("query", "key", "value"):
            yield from linear(f"{at}.attention.self.{part}", hidden, hidden, c.dtype, True)
        yield from linear(f"{at}.attention.output.dense", hidden, hidden, c.dtype, True)
        yield from norm(f"{at}.attention.output")
        yield from linear(f"{at}.intermediate.dense", width, hidden, c.dtype, True)
        yield from linear(f"{at}.output.dense", hidden, width, c.dtype, True)
        yield from norm(f"{at}.output")
    yield from linear("pooler.dense", hidden, hidden, c.dtype, True)


GENERATORS = {"bert": bert}
