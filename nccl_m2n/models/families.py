# SPDX-License-Identifier: Apache-2.0
"""One generator for each architecture family: a configuration in, every (name, shape, dtype) out.

Names are those of the published checkpoints, so experts are one by one where the checkpoints have them so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from nccl_m2n.dtypes import dtype_name
from nccl_m2n.errors import CommandError

Entry = tuple[str, tuple[int, ...], str]
_BLOCK = 128  # rows and columns that share one fp8 scale


class Config:
    """A configuration read key by key, with errors that name the key; and the caller's options."""

    def __init__(self, values: Mapping[str, Any], label: str, options: Mapping[str, Any]) -> None:
        self._values = values
        self._label = label
        self._options = dict(options)
        stated = values.get("torch_dtype", values.get("dtype")) or "bfloat16"
        self.dtype = dtype_name(self.option("dtype", stated))

    def __getitem__(self, key: str) -> int:
        try:
            return int(self._values[key])
        except KeyError:
            raise CommandError(f"{self._label} lacks the key {key!r}") from None
        except (TypeError, ValueError):
            raise CommandError(f"{self._label} has {self._values[key]!r} for {key!r}, not a number") from None

    def get(self, key: str, default: Any) -> Any:
        """The value of a key that may be absent or null."""
        value = self._values.get(key)
        return default if value is None else value

    def option(self, key: str, default: Any) -> Any:
        """One of the caller's options, taken off the list of those not yet understood."""
        return self._options.pop(key, default)

    def refuse_leftovers(self, family: str) -> None:
        """Raise if the caller gave an option that the family does not know."""
        if self._options:
            raise CommandError(
                f"{', '.join(self._options)}: no such option for a manifest of family {family}"
            )

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, key-value heads, rows of one head."""
        heads = self["num_attention_heads"]
        return (
            heads,
            self.get("num_key_value_heads", heads),
            self.get("head_dim", self["hidden_size"] // heads),
        )


def _linear(name: str, rows: int, columns: int, dtype: str, bias: bool = False) -> Iterator[Entry]:
    yield f"{name}.weight", (rows, columns), dtype
    if bias:
        yield f"{name}.bias", (rows,), dtype


def _attention(c: Config, at: str, bias: bool, output_bias: bool, norms: bool = False) -> Iterator[Entry]:
    heads, kv_heads, rows = c.heads
    hidden = c["hidden_size"]
    yield from _linear(f"{at}.q_proj", heads * rows, hidden, c.dtype, bias)
    yield from _linear(f"{at}.k_proj", kv_heads * rows, hidden, c.dtype, bias)
    yield from _linear(f"{at}.v_proj", kv_heads * rows, hidden, c.dtype, bias)
    yield from _linear(f"{at}.o_proj", hidden, heads * rows, c.dtype, output_bias)
    if norms:
        yield f"{at}.q_norm.weight", (rows,), c.dtype
        yield f"{at}.k_norm.weight", (rows,), c.dtype


def _mlp(c: Config, at: str, width: int, bias: bool = False) -> Iterator[Entry]:
    hidden = c["hidden_size"]
    yield from _linear(f"{at}.gate_proj", width, hidden, c.dtype, bias)
    yield from _linear(f"{at}.up_proj", width, hidden, c.dtype, bias)
    yield from _linear(f"{at}.down_proj", hidden, width, c.dtype, bias)


def _decoder(c: Config, layer: Callable[[int, str], Iterator[Entry]], extra: int = 0) -> Iterator[Entry]:
    """Embedding, layers with their two norms, final norm, output head."""
    hidden = c["hidden_size"]
    yield "model.embed_tokens.weight", (c["vocab_size"], hidden), c.dtype
    for index in range(c["num_hidden_layers"] + extra):
        at = f"model.layers.{index}"
        yield from layer(index, at)
        yield f"{at}.input_layernorm.weight", (hidden,), c.dtype
        yield f"{at}.post_attention_layernorm.weight", (hidden,), c.dtype
    yield "model.norm.weight", (hidden,), c.dtype
    if not c.get("tie_word_embeddings", False):
        yield "lm_head.weight", (c["vocab_size"], hidden), c.dtype


def llama(c: Config) -> Iterator[Entry]:
    """Llama 2 and 3, Mistral, and others of their make."""
    bias, mlp_bias = c.get("attention_bias", False), c.get("mlp_bias", False)

    def layer(index: int, at: str) -> Iterator[Entry]:
        yield from _attention(c, f"{at}.self_attn", bias, bias)
        yield from _mlp(c, f"{at}.mlp", c["intermediate_size"], mlp_bias)

    return _decoder(c, layer)


def qwen2(c: Config) -> Iterator[Entry]:
    """Qwen2 and Qwen2.5 dense: a bias on query, key and value."""

    def layer(index: int, at: str) -> Iterator[Entry]:
        yield from _attention(c, f"{at}.self_attn", True, False)
        yield from _mlp(c, f"{at}.mlp", c["intermediate_size"])

    return _decoder(c, layer)


def qwen3(c: Config) -> Iterator[Entry]:
    """Qwen3 dense: a norm on each query and key head."""
    bias = c.get("attention_bias", False)

    def layer(index: int, at: str) -> Iterator[Entry]:
        yield from _attention(c, f"{at}.self_attn", bias, bias, norms=True)
        yield from _mlp(c, f"{at}.mlp", c["intermediate_size"])

    return _decoder(c, layer)


def qwen3_moe(c: Config) -> Iterator[Entry]:
    """Qwen3 with experts."""
    bias, experts, step = c.get("attention_bias", False), c["num_experts"], c.get("decoder_sparse_step", 1)
    dense = set(c.get("mlp_only_layers", ()))

    def layer(index: int, at: str) -> Iterator[Entry]:
        yield from _attention(c, f"{at}.self_attn", bias, bias, norms=True)
        if index in dense or experts == 0 or (index + 1) % step:
            yield from _mlp(c, f"{at}.mlp", c["intermediate_size"])
            return
        yield f"{at}.mlp.gate.weight", (experts, c["hidden_size"]), c.dtype
        for expert in range(experts):
            yield from _mlp(c, f"{at}.mlp.experts.{expert}", c["moe_intermediate_size"])

    return _decoder(c, layer)


def deepseek_v3(c: Config) -> Iterator[Entry]:
    """DeepSeek-V3, R1 and Kimi-K2: latent attention, routed and shared experts, prediction layers at the end.

    With ``fp8`` the matrices are float8 with one float32 scale for each 128 × 128 block, as published.
    """
    fp8, mtp = c.option("fp8", False), c.option("mtp", True)
    extra = c.get("num_nextn_predict_layers", 0) if mtp else 0
    return _with_scales(c, _deepseek_layers(c, extra)) if fp8 else _deepseek_layers(c, extra)


def _deepseek_layers(c: Config, extra: int) -> Iterator[Entry]:
    hidden, experts, layers = c["hidden_size"], c["n_routed_experts"], c["num_hidden_layers"]
    first, every = c["first_k_dense_replace"], c.get("moe_layer_freq", 1)

    def layer(index: int, at: str) -> Iterator[Entry]:
        if index >= layers:
            yield f"{at}.embed_tokens.weight", (c["vocab_size"], hidden), c.dtype
            yield f"{at}.enorm.weight", (hidden,), c.dtype
            yield f"{at}.hnorm.weight", (hidden,), c.dtype
            yield f"{at}.eh_proj.weight", (hidden, 2 * hidden), c.dtype
        yield from _latent_attention(c, f"{at}.self_attn")
        if index < first or index % every:
            yield from _mlp(c, f"{at}.mlp", c["intermediate_size"])
        else:
            yield f"{at}.mlp.gate.weight", (experts, hidden), c.dtype
            yield f"{at}.mlp.gate.e_score_correction_bias", (experts,), "float32"
            for expert in range(experts):
                yield from _mlp(c, f"{at}.mlp.experts.{expert}", c["moe_intermediate_size"])
            shared = c.get("n_shared_experts", 0)
            if shared:
                yield from _mlp(c, f"{at}.mlp.shared_experts", shared * c["moe_intermediate_size"])
        if index >= layers:
            yield f"{at}.shared_head.norm.weight", (hidden,), c.dtype
            yield f"{at}.shared_head.head.weight", (c["vocab_size"], hidden), c.dtype

    return _decoder(c, layer, extra)


def _latent_attention(c: Config, at: str) -> Iterator[Entry]:
    hidden, heads, bias = c["hidden_size"], c["num_attention_heads"], c.get("attention_bias", False)
    query = heads * (c["qk_nope_head_dim"] + c["qk_rope_head_dim"])
    latent = c["kv_lora_rank"]
    if c.get("q_lora_rank", 0):
        yield from _linear(f"{at}.q_a_proj", c["q_lora_rank"], hidden, c.dtype, bias)
        yield f"{at}.q_a_layernorm.weight", (c["q_lora_rank"],), c.dtype
        yield from _linear(f"{at}.q_b_proj", query, c["q_lora_rank"], c.dtype)
    else:
        yield from _linear(f"{at}.q_proj", query, hidden, c.dtype)
    yield from _linear(f"{at}.kv_a_proj_with_mqa", latent + c["qk_rope_head_dim"], hidden, c.dtype, bias)
    yield f"{at}.kv_a_layernorm.weight", (latent,), c.dtype
    yield from _linear(f"{at}.kv_b_proj", heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), latent, c.dtype)
    yield from _linear(f"{at}.o_proj", hidden, heads * c["v_head_dim"], c.dtype, bias)


def _with_scales(c: Config, entries: Iterator[Entry]) -> Iterator[Entry]:
    """The same tensors as published in fp8: projections in float8, each followed by its scales."""
    for name, shape, dtype in entries:
        if not name.endswith(("_proj.weight", "_mqa.weight")) or ".eh_proj." in name:
            yield name, shape, dtype
            continue
        yield name, shape, "float8_e4m3fn"
        yield f"{name}_scale_inv", tuple(-(-n // _BLOCK) for n in shape), "float32"


def gpt_oss(c: Config) -> Iterator[Entry]:
    """GPT-OSS: stacked experts, gate and up columns interleaved; ``mxfp4`` gives the published 4-bit form."""
    experts, hidden, width = c["num_local_experts"], c["hidden_size"], c["intermediate_size"]
    mxfp4 = c.option("mxfp4", False)

    def matrix(name: str, rows: int, columns: int) -> Iterator[Entry]:
        if mxfp4:  # 32 values of 4 bits to a block, one scale each, the matrix transposed
            yield f"{name}_blocks", (experts, rows, columns // 32, 16), "uint8"
            yield f"{name}_scales", (experts, rows, columns // 32), "uint8"
        else:
            yield name, (experts, columns, rows), c.dtype
        yield f"{name}_bias", (experts, rows), c.dtype

    def layer(index: int, at: str) -> Iterator[Entry]:
        yield f"{at}.self_attn.sinks", (c["num_attention_heads"],), c.dtype
        bias = c.get("attention_bias", True)
        yield from _attention(c, f"{at}.self_attn", bias, bias)
        yield from _linear(f"{at}.mlp.router", experts, hidden, c.dtype, True)
        yield from matrix(f"{at}.mlp.experts.gate_up_proj", 2 * width, hidden)
        yield from matrix(f"{at}.mlp.experts.down_proj", hidden, width)

    return _decoder(c, layer)


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
            yield from _linear(f"{at}.attention.self.{part}", hidden, hidden, c.dtype, True)
        yield from _linear(f"{at}.attention.output.dense", hidden, hidden, c.dtype, True)
        yield from norm(f"{at}.attention.output")
        yield from _linear(f"{at}.intermediate.dense", width, hidden, c.dtype, True)
        yield from _linear(f"{at}.output.dense", hidden, width, c.dtype, True)
        yield from norm(f"{at}.output")
    yield from _linear("pooler.dense", hidden, hidden, c.dtype, True)


FAMILIES: dict[str, Callable[[Config], Iterator[Entry]]] = {
    "llama": llama,
    "mistral": llama,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "deepseek_v3": deepseek_v3,
    "kimi_k2": deepseek_v3,
    "gpt_oss": gpt_oss,
    "bert": bert,
}
