# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's storage, with or without Transformer Engine."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from nccl_m2n.checks import choice, shown, whole_number, whole_numbers
from nccl_m2n.errors import CommandError
from nccl_m2n.models.manifest import Manifest, as_manifest
from nccl_m2n.refit.parameter import Parameter
from nccl_m2n.sharding.families import rules_for
from nccl_m2n.sharding.model_layouts import ModelLayouts
from nccl_m2n.sharding.parallelism import Parallelism
from nccl_m2n.sharding.rules import Rule
from nccl_m2n.storage.declare import RankViews, named_arrays
from nccl_m2n.typing import Array

# Where Megatron divides otherwise than the shipped rules say.
RULES = (Rule("*.eh_proj.weight", tp=0),)
# Latent attention's down projections as ColumnParallelLinear has them; TELinear repeats them.
_CUT = (Rule("*.q_a_proj.weight", tp=0), Rule("*.kv_a_proj_with_mqa.weight", tp=0))

# A layer's array -> the same parameter under its published name; of several the one that the model has.
_PLAIN: dict[str, tuple[str, ...]] = {
    "input_layernorm.weight": ("input_layernorm.weight",),
    "self_attention.linear_qkv.layer_norm_weight": ("input_layernorm.weight",),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    "self_attention.linear_proj.bias": ("self_attn.o_proj.bias",),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight", "self_attn.q_a_layernorm.weight"),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight",),
    "self_attention.kv_layernorm.weight": ("self_attn.kv_a_layernorm.weight",),
    "self_attention.linear_q_proj.weight": ("self_attn.q_proj.weight",),
    "self_attention.linear_q_down_proj.weight": ("self_attn.q_a_proj.weight",),
    "self_attention.linear_q_up_proj.weight": ("self_attn.q_b_proj.weight",),
    "self_attention.linear_q_up_proj.layer_norm_weight": ("self_attn.q_a_layernorm.weight",),
    "self_attention.linear_kv_down_proj.weight": ("self_attn.kv_a_proj_with_mqa.weight",),
    "self_attention.linear_kv_up_proj.weight": ("self_attn.kv_b_proj.weight",),
    "self_attention.linear_kv_up_proj.layer_norm_weight": ("self_attn.kv_a_layernorm.weight",),
    "self_attention.core_attention.softmax_offset": ("self_attn.sinks",),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
    "mlp.linear_fc1.layer_norm_weight": ("post_attention_layernorm.weight",),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
    "mlp.linear_fc2.bias": ("mlp.down_proj.bias",),
    "mlp.router.weight": ("mlp.gate.weight", "mlp.router.weight", "block_sparse_moe.gate.weight"),
    "mlp.router.bias": ("mlp.router.bias",),
    "mlp.router.expert_bias": (
        "mlp.gate.e_score_correction_bias",
        "block_sparse_moe.e_score_correction_bias",
    ),
    "mlp.shared_experts.linear_fc2.weight": (
        "mlp.shared_experts.down_proj.weight",
        "mlp.shared_expert.down_proj.weight",
    ),
    "mlp.shared_experts.gate_weight": ("mlp.shared_expert_gate.weight",),
    "enorm.weight": ("enorm.weight",),
    "hnorm.weight": ("hnorm.weight",),
    "eh_proj.weight": ("eh_proj.weight",),
    "final_layernorm.weight": ("shared_head.norm.weight",),
}
# A layer's array -> parts that lie end to end in it; of several the first that the model has.
_STACKED: dict[str, tuple[tuple[str, ...], ...]] = {
    "self_attention.linear_qkv_down_proj.weight": (
        ("self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"),
    ),
    "mlp.linear_fc1.weight": (
        ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        ("mlp.gate_up_proj.weight",),
    ),
    "mlp.linear_fc1.bias": (("mlp.gate_proj.bias", "mlp.up_proj.bias"),),
    "mlp.shared_experts.linear_fc1.weight": (
        ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),
        ("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"),
    ),
}
_IN_LAYER = re.compile(r"(decoder|mtp)\.layers\.(\d+)\.(?:(?:transformer_layer|mtp_model_layer)\.)?(.+)")
_ONE_EXPERT = re.compile(
    r"mlp\.experts\."
    r"(?:linear_fc([12])\.(weight|bias)(\d+)|local_experts\.(\d+)\.linear_fc([12])\.(weight|bias))"
)
_ALL_EXPERTS = re.compile(r"mlp\.experts\.weight([12])")


def megatron(
    manifest: Manifest,
    parallelism: Parallelism,
    rank: int,
    arrays: Mapping[str, Array],
    *,
    start_rank: int = 0,
    rules: Iterable[Rule] | None = None,
    padded_vocab: int | None = None,
    layers: Sequence[int] | None = None,
    skip: Sequence[str] = (),
    zero_padding: bool = False,
    whole_side: bool = False,
    down_projections: str = "repeated",
) -> list[Parameter]:
    """One rank's parameters out of Megatron-Core's arrays, as views.

    Args:
        manifest: The model under its published names.
        parallelism: The side's parallel sizes.
        rank: This rank.
        arrays: The rank's arrays by the names of ``GPTModel.state_dict()`` (``decoder.layers.0.…``): fused
            ``linear_qkv`` interleaved by query group, ``linear_fc1`` as [gate; up], experts one by one
            (``linear_fc1.weight0``, ``local_experts.0.…``) or all in one (``experts.weight1``).
        start_rank: The side's first rank.
        rules: Rules in order; left out, the shipped ones and Megatron's own.
        padded_vocab: Rows of the padded vocabulary over all tensor-parallel ranks; left out, it has none.
        layers: The model's layer for each of the rank's layers; left out, those of its stage in order.
        skip: Patterns of published names that this side leaves out.
        zero_padding: Set padding rows to zero now; else they are left alone.
        whole_side: List also, without an array, the parameters of which this rank holds nothing.
        down_projections: What tensor-parallel ranks have of latent attention's down projections:
            ``"repeated"``, all of them, as Transformer Engine's ``TELinear`` keeps them, or ``"cut"``, as
            ``ColumnParallelLinear`` does.

    Raises:
        CommandError: If an array is unknown, missing or has another shape than the layouts say.
    """
    as_manifest(manifest)
    cut = choice(down_projections, "down_projections", ("repeated", "cut"), error=CommandError) == "cut"
    rules = (*(_CUT if cut else ()), *RULES, *rules_for(manifest)) if rules is None else rules
    side = ModelLayouts(manifest, parallelism, rules, start_rank, padded_vocab)
    reader = _Reader(RankViews(side, rank, skip, zero_padding), layers)
    for stored, array in named_arrays(arrays):
        reader.read(stored, array)
    return reader.declared.finish(whole_side)


def split_qkv(array: Array, groups: int, queries: int, head_dim: int) -> tuple[Array, Array, Array]:
    """Query, key and value out of an array that interleaves them by query group, as views.

    Args:
        array: Shape (groups × (queries + 2) × head_dim, …): a weight, or its bias.
        groups: Query groups (key-value heads) in this array.
        queries: Query heads of one group.
        head_dim: Rows of one head.

    Returns:
        Views of shape (groups, rows, …), in the order in which the published tensors have the rows.
    """
    for value, what in ((groups, "groups"), (queries, "queries"), (head_dim, "head_dim")):
        whole_number(value, what, least=1, error=CommandError)
    shape = getattr(array, "shape", None) or (None,)
    rows = groups * (queries + 2) * head_dim
    if isinstance(array, type) or shape[0] != rows:
        raise CommandError(
            f"expected an array of {groups} × ({queries} + 2) × {head_dim} = {rows} rows, got {shown(array)}"
        )
    rest = tuple(array.shape[1:])
    grouped = array.reshape((groups, (queries + 2) * head_dim, *rest))
    at = queries * head_dim
    return grouped[:, :at], grouped[:, at : at + head_dim], grouped[:, at + head_dim :]


def _numbers(layers: Sequence[int]) -> tuple[int, ...]:
    return whole_numbers(layers, "layers", least=0, error=CommandError)


class _Reader:
    """Knows where each of a rank's arrays belongs."""

    def __init__(self, declared: RankViews, layers: Sequence[int] | None) -> None:
        self.declared = declared
        self.side = declared.side
        self.layers = self.side.stage_layers(declared.rank) if layers is None else _numbers(layers)

    def read(self, stored: str, array: Array) -> None:
        """Declare what one array holds."""
        match = _IN_LAYER.fullmatch(stored)
        if match is not None:
            self._in_layer(self._number(match[1], int(match[2]), stored), match[3], array, stored)
        elif stored == "embedding.word_embeddings.weight":
            self._vocabulary("model.embed_tokens.weight", ".embed_tokens.weight", array, stored)
        elif stored == "output_layer.weight":
            tied = not self.declared.knows("lm_head.weight")
            main = "model.embed_tokens.weight" if tied else "lm_head.weight"
            self._vocabulary(main, ".shared_head.head.weight", array, stored)
        elif stored == "decoder.final_layernorm.weight":
            self.declared.add("model.norm.weight", array, stored)
        else:
            raise CommandError(f"{stored} is no array of Megatron-Core's that has a published name here")

    def _number(self, part: str, local: int, stored: str) -> int:
        if part == "mtp":
            return self.side.layer_count + local
        if local >= len(self.layers):
            raise CommandError(f"{stored}: this rank's stage has {len(self.layers)} layers: {self.layers}")
        return self.layers[local]

    def _vocabulary(self, main: str, in_layer: str, array: Array, stored: str) -> None:
        """The vocabulary itself, and the prediction layers' copies of it."""
        copies = [f"model.layers.{n}{in_layer}" for n in self.side.prediction_layers]
        self.declared.add_vocabulary([n for n in (main, *copies) if self.declared.knows(n)], array, stored)

    def _in_layer(self, layer: int, tail: str, array: Array, stored: str) -> None:
        at = f"model.layers.{layer}."
        if tail in _PLAIN:
            names = [at + name for name in _PLAIN[tail]]
            self.declared.add(next(filter(self.declared.knows, names), names[0]), array, stored)
        elif tail in _STACKED:
            ways = [[at + name for name in names] for names in _STACKED[tail]]
            self.declared.add_stack(
                next((w for w in ways if self.declared.knows(w[0])), ways[0]), array, stored
            )
        elif tail.startswith("self_attention.linear_qkv."):
            self._qkv(at, tail.rpartition(".")[2], array, stored)
        elif (one := _ONE_EXPERT.fullmatch(tail)) is not None:
            which, kind = (one[1], one[2]) if one[1] else (one[5], one[6])
            self._expert(at, which, kind, int(one[3] or one[4]), array, stored)
        elif (every := _ALL_EXPERTS.fullmatch(tail)) is not None:
            self._experts(at, every[1], array, stored)
        else:
            raise CommandError(f"{stored} is no array of Megatron-Core's that has a published name here")

    def _qkv(self, at: str, kind: str, array: Array, stored: str) -> None:
        config = self.side.config
        names = [f"{at}self_attn.{part}_proj.{kind}" for part in "qkv"]
        heads, groups = config.size("num_attention_heads"), config.size("num_key_value_heads")
        tp = self.side.parallelism.tp
        if groups % tp:
            raise CommandError(
                f"{stored}: {groups} query groups cannot be divided among {tp} tensor-parallel ranks"
            )
        head_dim = self.side.manifest[names[1]].shape[0] // groups
        rows = groups // tp * (heads // groups + 2) * head_dim
        if array.shape[0] != rows:
            raise CommandError(
                f"{stored} on rank {self.declared.rank}: expected {rows} rows, got {tuple(array.shape)}"
            )
        views = split_qkv(array, groups // tp, heads // groups, head_dim)
        for name, view in zip(names, views, strict=True):
            self.declared.add(name, view, stored)

    def _expert(self, at: str, which: str, kind: str, local: int, array: Array, stored: str) -> None:
        home = self.side.home
        own = () if home is None else home.slots[self.side.expert_rank(self.declared.rank)]
        if local >= len(own):
            raise CommandError(f"{stored}: rank {self.declared.rank} owns {len(own)} experts")
        block = "block_sparse_moe" if self.declared.knows(f"{at}block_sparse_moe.gate.weight") else "mlp"
        expert = f"{at}{block}.experts.{own[local]}."
        up, down = self.declared.projections(expert)
        if self.declared.knows(f"{expert}gate_up_proj"):
            self._interleaved(expert, which, kind, array, stored)
        elif which == "2":
            self.declared.add(f"{expert}{down}.{kind}", array, stored)
        else:
            self.declared.add_stack([f"{expert}{part}.{kind}" for part in up], array, stored)

    def _interleaved(self, expert: str, which: str, kind: str, array: Array, stored: str) -> None:
        """GPT-OSS: published as (in, out) with gate and up in turn, kept as [gate; up] of (out, in)."""
        name = f"{expert}{'gate_up_proj' if which == '1' else 'down_proj'}"
        if which == "1":
            array = array.reshape((2, array.shape[0] // 2, *array.shape[1:]))
        turned = array.swapaxes(0, -1) if array.ndim > 1 else array
        self.declared.add(name if kind == "weight" else f"{name}_{kind}", turned, stored)

    def _experts(self, at: str, which: str, array: Array, stored: str) -> None:
        """All of a rank's experts in one array, each one's matrix transposed."""
        home = self.side.home
        own = () if home is None else home.slots[self.side.expert_rank(self.declared.rank)]
        hidden = int(array.shape[0 if which == "1" else 1])
        stack = array.reshape((len(own), hidden, -1) if which == "1" else (len(own), -1, hidden))
        for local in range(len(own)):
            self._expert(at, which, "weight", local, stack[local].swapaxes(0, 1), stored)
