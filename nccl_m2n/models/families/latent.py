# SPDX-License-Identifier: Apache-2.0
"""Decoders with latent attention: DeepSeek and those of its make."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from nccl_m2n.models.config import Config
from nccl_m2n.models.families.experts import Experts, shared_width, sparse
from nccl_m2n.models.families.parts import Entry, Layer, decoder, linear, mlp
from nccl_m2n.models.families.quantised import with_scales

_EXPERTS = Experts(correction="gate.e_score_correction_bias", shared="shared_experts")


def latent_attention(c: Config, at: str) -> Iterator[Entry]:
    """Multi-head latent attention."""
    hidden, heads, bias = c["hidden_size"], c["num_attention_heads"], c.flag("attention_bias")
    query = heads * (c["qk_nope_head_dim"] + c["qk_rope_head_dim"])
    latent, rank = c["kv_lora_rank"], c.number("q_lora_rank", 0)
    if rank:
        yield from linear(f"{at}.q_a_proj", rank, hidden, c.dtype, bias)
        yield f"{at}.q_a_layernorm.weight", (rank,), c.dtype
        yield from linear(f"{at}.q_b_proj", query, rank, c.dtype)
    else:
        yield from linear(f"{at}.q_proj", query, hidden, c.dtype)
    yield from linear(f"{at}.kv_a_proj_with_mqa", latent + c["qk_rope_head_dim"], hidden, c.dtype, bias)
    yield f"{at}.kv_a_layernorm.weight", (latent,), c.dtype
    yield from linear(f"{at}.kv_b_proj", heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), latent, c.dtype)
    yield from linear(f"{at}.o_proj", hidden, heads * c["v_head_dim"], c.dtype, bias)


def indexer(c: Config, at: str) -> Iterator[Entry]:
    """What chooses the tokens of sparse attention."""
    heads, rows, hidden = c["index_n_heads"], c["index_head_dim"], c["hidden_size"]
    yield from linear(f"{at}.wq_b", heads * rows, c["q_lora_rank"], c.dtype)
    yield from linear(f"{at}.wk", rows, hidden, c.dtype)
    yield f"{at}.k_norm.weight", (rows,), c.dtype
    yield f"{at}.k_norm.bias", (rows,), c.dtype
    yield from linear(f"{at}.weights_proj", heads, hidden, c.dtype)


def _prediction(c: Config, at: str, layer: Iterator[Entry]) -> Iterator[Entry]:
    """A prediction layer behind the others, with an embedding and a head of its own."""
    hidden, vocabulary = c["hidden_size"], c["vocab_size"]
    yield f"{at}.embed_tokens.weight", (vocabulary, hidden), c.dtype
    yield f"{at}.enorm.weight", (hidden,), c.dtype
    yield f"{at}.hnorm.weight", (hidden,), c.dtype
    yield f"{at}.eh_proj.weight", (hidden, 2 * hidden), c.dtype
    yield from layer
    yield f"{at}.shared_head.norm.weight", (hidden,), c.dtype
    yield f"{at}.shared_head.head.weight", (vocabulary, hidden), c.dtype


def deepseek(
    experts: Experts | None = _EXPERTS, sparse_attention: bool = False
) -> Callable[[Config], Iterator[Entry]]:
    """DeepSeek-V2, V3, V3.2, R1, Kimi-K2, GLM-5: routed and shared experts, prediction layers at the end.

    With ``fp8`` the matrices are float8 with one float32 scale for each 128 × 128 block, as published.
    """

    def family(c: Config) -> Iterator[Entry]:
        fp8, mtp = c.option("fp8", False), c.option("mtp", True)
        layers = c["num_hidden_layers"]
        extra = c.number("num_nextn_predict_layers", 0) if mtp else 0

        def inner(index: int, at: str) -> Iterator[Entry]:
            yield from latent_attention(c, f"{at}.self_attn")
            if sparse_attention:
                yield from indexer(c, f"{at}.self_attn.indexer")
            if experts is None or not (index >= layers or sparse(c, index)):
                yield from mlp(c, f"{at}.mlp", c["intermediate_size"])
            else:
                yield from experts.block(c, at, shared_width(c))

        def layer(index: int, at: str) -> Iterator[Entry]:
            made = inner(index, at)
            return _prediction(c, at, made) if index >= layers else made

        made = decoder(c, layer, extra=extra)
        return with_scales(c, made) if fp8 and not c.quantization else made

    return family


def longcat(c: Config) -> Iterator[Entry]:
    """LongCat-Flash: two attentions and two dense blocks a layer beside its experts, some of which do nothing."""
    experts, hidden = c["num_experts"], c["hidden_size"]
    slots = experts + c.number("zero_expert_num", 0)

    def layer(index: int, at: str) -> Iterator[Entry]:
        for half in (0, 1):
            yield from latent_attention(c, f"{at}.self_attn.{half}")
            yield from mlp(c, f"{at}.mlps.{half}", c["ffn_hidden_size"])
            for name in ("input_layernorm", "post_attention_layernorm"):
                yield f"{at}.{name}.{half}.weight", (hidden,), c.dtype
        yield from linear(f"{at}.mlp.router.classifier", slots, hidden, c.dtype, c.flag("router_bias"))
        yield f"{at}.mlp.router.e_score_correction_bias", (slots,), "float32"
        for expert in range(experts):
            yield from mlp(c, f"{at}.mlp.experts.{expert}", c["expert_ffn_hidden_size"])

    return _without_norms(c, layer)


def _without_norms(c: Config, layer: Layer) -> Iterator[Entry]:
    return (
        e
        for e in decoder(c, layer)
        if not e[0].endswith(("input_layernorm.weight", "attention_layernorm.weight"))
    )


_MLA = deepseek()
_SPARSE = deepseek(sparse_attention=True)
GENERATORS: dict[str, Callable[[Config], Iterator[Entry]]] = {
    "deepseek_v2": deepseek(Experts(shared="shared_experts")),
    **dict.fromkeys(("deepseek_v3", "kimi_k2", "glm4_moe_lite"), _MLA),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), _SPARSE),
    "minicpm3": deepseek(None),
    "longcat_flash": longcat,
}
