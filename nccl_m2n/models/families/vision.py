# SPDX-License-Identifier: Apache-2.0
"""Models that see: a vision part beside a language part that another family describes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from nccl_m2n.models.config import Config
from nccl_m2n.models.families import dense, experts, hybrid
from nccl_m2n.models.families.parts import SPLIT, Entry, Style, attention, decoder, linear, mlp, norm, plain

Part = Callable[[Config], Iterator[Entry]]


def beside(
    vision: Part, language: Part, prefix: str = "model.language_model.", head: str = "lm_head."
) -> Part:
    """A language family with its names under a prefix, and a vision part."""

    def family(c: Config) -> Iterator[Entry]:
        yield from vision(c)
        for name, shape, dtype in language(c):
            outside, inside = name.startswith("lm_head."), name.removeprefix("model.")
            yield (head + name.removeprefix("lm_head.") if outside else prefix + inside), shape, dtype

    return family


def qwen_blocks(c: Config, v: Config, at: str, width: int, names: Style, bias: bool) -> Iterator[Entry]:
    """The blocks of Qwen's towers, and what turns patches into their input."""
    hidden = v["embed_dim"] if "embed_dim" in v else v["hidden_size"]
    patch = v["patch_size"]
    size = (hidden, v.number("in_channels", 3), v.number("temporal_patch_size", 2), patch, patch)
    yield f"{at}.patch_embed.proj.weight", size, c.dtype
    for index in range(v["depth"]):
        here = f"{at}.blocks.{index}"
        yield from linear(f"{here}.attn.qkv", 3 * hidden, hidden, c.dtype, True)
        yield from linear(f"{here}.attn.proj", hidden, hidden, c.dtype, True)
        for name in names.up:
            yield from linear(f"{here}.mlp.{name}", width, hidden, c.dtype, True)
        yield from linear(f"{here}.mlp.{names.down}", hidden, width, c.dtype, True)
        yield from norm(f"{here}.norm1", hidden, c.dtype, bias)
        yield from norm(f"{here}.norm2", hidden, c.dtype, bias)


def qwen2_vision(c: Config) -> Iterator[Entry]:
    """Qwen2-VL's and Qwen2.5-VL's tower."""
    v, at = c.part("vision_config"), "visual"
    older = "embed_dim" in v and "mlp_ratio" in v
    hidden = v["embed_dim"] if older else v["hidden_size"]
    width = v["mlp_ratio"] * hidden if older else v["intermediate_size"]
    names = Style(up=("fc1",), down="fc2") if older else Style()
    yield from qwen_blocks(c, v, at, width, names, older)
    joined = hidden * v.number("spatial_merge_size", 2) ** 2
    yield from norm(f"{at}.merger.ln_q", hidden, c.dtype, older)
    yield from linear(f"{at}.merger.mlp.0", joined, joined, c.dtype, True)
    yield from linear(
        f"{at}.merger.mlp.2", v["hidden_size" if older else "out_hidden_size"], joined, c.dtype, True
    )


def qwen3_vision(c: Config) -> Iterator[Entry]:
    """Qwen3-VL's and Qwen3.5's tower."""
    v, at = c.part("vision_config"), "model.visual"
    hidden, names = v["hidden_size"], Style(up=("linear_fc1",), down="linear_fc2")
    yield from qwen_blocks(c, v, at, v["intermediate_size"], names, True)
    yield f"{at}.patch_embed.proj.bias", (hidden,), c.dtype
    yield f"{at}.pos_embed.weight", (v["num_position_embeddings"], hidden), c.dtype
    joined = hidden * v.number("spatial_merge_size", 2) ** 2
    deep = range(len(v.numbers("deepstack_visual_indexes")))
    for name, size in (("merger", hidden), *((f"deepstack_merger_list.{i}", joined) for i in deep)):
        yield from norm(f"{at}.{name}.norm", size, c.dtype, True)
        yield from linear(f"{at}.{name}.linear_fc1", joined, joined, c.dtype, True)
        yield from linear(f"{at}.{name}.linear_fc2", v["out_hidden_size"], joined, c.dtype, True)


def _tower(c: Config, v: Config, at: str, style: Style, norms: tuple[str, ...]) -> Iterator[Entry]:
    """A vision transformer's layers; biases everywhere but where the style has none."""
    for index in range(v["num_hidden_layers"]):
        here = f"{at}.{index}"
        block, forward = ("attention", "feed_forward") if style.up == SPLIT else ("self_attn", "mlp")
        yield from attention(v, f"{here}.{block}", style)
        yield from mlp(v, f"{here}.{forward}", v["intermediate_size"], style)
        for name in norms:
            yield from norm(f"{here}.{name}", v["hidden_size"], c.dtype, style.norm_bias)


_VIT = Style(bias=True, mlp_bias=True, norm_bias=True, up=("fc1",), down="fc2")
_SIGLIP = Style(bias=True, mlp_bias=True, norm_bias=True, up=("fc1",), down="fc2", output="out_proj")


def siglip(c: Config) -> Iterator[Entry]:
    """Gemma 3's tower and what joins it to the language part."""
    v, at = c.part("vision_config"), "vision_tower.vision_model"
    hidden, patch = v["hidden_size"], v["patch_size"]
    yield (
        f"{at}.embeddings.patch_embedding.weight",
        (hidden, v.number("num_channels", 3), patch, patch),
        c.dtype,
    )
    yield f"{at}.embeddings.patch_embedding.bias", (hidden,), c.dtype
    yield f"{at}.embeddings.position_embedding.weight", ((v["image_size"] // patch) ** 2, hidden), c.dtype
    yield from _tower(c, v, f"{at}.encoder.layers", _SIGLIP, ("layer_norm1", "layer_norm2"))
    yield from norm(f"{at}.post_layernorm", hidden, c.dtype, True)
    yield "multi_modal_projector.mm_input_projection_weight", (hidden, c["hidden_size"]), c.dtype
    yield "multi_modal_projector.mm_soft_emb_norm.weight", (hidden,), c.dtype


def llama4_vision(c: Config) -> Iterator[Entry]:
    """Llama 4's tower."""
    v, at = c.part("vision_config"), "vision_model"
    hidden, patch = v["hidden_size"], v["patch_size"]
    yield f"{at}.class_embedding", (hidden,), c.dtype
    yield f"{at}.positional_embedding_vlm", ((v["image_size"] // patch) ** 2 + 1, hidden), c.dtype
    yield from linear(f"{at}.patch_embedding.linear", hidden, v.number("num_channels", 3) * patch**2, c.dtype)
    yield from norm(f"{at}.layernorm_pre", hidden, c.dtype, True)
    yield from norm(f"{at}.layernorm_post", hidden, c.dtype, True)
    yield from _tower(c, v, f"{at}.model.layers", _VIT, ("input_layernorm", "post_attention_layernorm"))
    projected = v["projector_input_dim"]
    yield from linear(f"{at}.vision_adapter.mlp.fc1", projected, v["intermediate_size"], c.dtype)
    yield from linear(f"{at}.vision_adapter.mlp.fc2", v["projector_output_dim"], projected, c.dtype)
    yield from linear("multi_modal_projector.linear_1", c["hidden_size"], v["vision_output_dim"], c.dtype)


def pixtral(c: Config) -> Iterator[Entry]:
    """Mistral 3's tower."""
    v, at, joint = c.part("vision_config"), "vision_tower", "multi_modal_projector"
    hidden, patch, bias = v["hidden_size"], v["patch_size"], c.flag("multimodal_projector_bias")
    yield f"{at}.patch_conv.weight", (hidden, v.number("num_channels", 3), patch, patch), c.dtype
    yield f"{at}.ln_pre.weight", (hidden,), c.dtype
    style = Style(bias=False, mlp_bias=False)
    yield from _tower(c, v, f"{at}.transformer.layers", style, ("attention_norm", "ffn_norm"))
    yield f"{joint}.norm.weight", (hidden,), c.dtype
    merged = hidden * c.number("spatial_merge_size", 2) ** 2
    yield from linear(f"{joint}.patch_merger.merging_layer", hidden, merged, c.dtype)
    yield from linear(f"{joint}.linear_1", c["hidden_size"], hidden, c.dtype, bias)
    yield from linear(f"{joint}.linear_2", c["hidden_size"], c["hidden_size"], c.dtype, bias)


def qwen3_vl_moe(c: Config) -> Iterator[Entry]:
    """Qwen3-VL's language part with experts: stacked, as transformers 5 writes them."""
    count, hidden, width = c["num_experts"], c["hidden_size"], c["moe_intermediate_size"]

    def layer(index: int, at: str) -> Iterator[Entry]:
        yield from attention(c, f"{at}.self_attn", dense.QWEN3)
        if not experts.sparse(c, index):
            yield from mlp(c, f"{at}.mlp", c["intermediate_size"])
            return
        yield from linear(f"{at}.mlp.gate", count, hidden, c.dtype)
        yield f"{at}.mlp.experts.gate_up_proj", (count, 2 * width, hidden), c.dtype
        yield f"{at}.mlp.experts.down_proj", (count, hidden, width), c.dtype

    return decoder(c, layer, dense.QWEN3)


_OUTER, _OUTER_HEAD = "language_model.model.", "language_model.lm_head."
GENERATORS: dict[str, Part] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), beside(qwen2_vision, plain(dense.QWEN2), "model.")),
    "qwen3_vl": beside(qwen3_vision, plain(dense.QWEN3)),
    "qwen3_vl_moe": beside(qwen3_vision, qwen3_vl_moe),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), beside(qwen3_vision, hybrid.qwen3_next(packed=False))),
    "gemma3": beside(siglip, plain(dense.GEMMA3), _OUTER, _OUTER_HEAD),
    "llama4": beside(llama4_vision, experts.llama4, _OUTER, _OUTER_HEAD),
    "mistral3": beside(pixtral, plain(dense.PLAIN), _OUTER, _OUTER_HEAD),
}
