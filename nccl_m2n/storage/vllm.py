# SPDX-License-Identifier: Apache-2.0
"""vLLM's and SGLang's storage."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from nccl_m2n.errors import CommandError
from nccl_m2n.models.manifest import Manifest, as_manifest
from nccl_m2n.refit.parameter import Parameter
from nccl_m2n.sharding.model_layouts import ModelLayouts
from nccl_m2n.sharding.parallelism import Parallelism
from nccl_m2n.sharding.rules import Rule
from nccl_m2n.storage.declare import RankViews, named_arrays, padded_rows
from nccl_m2n.typing import Array

# The fused module -> the published modules that lie end to end in it.
_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}
_EXPERTS = re.compile(r"(.+\.experts)\.(?:routed_experts\.)?(w13|w2)_(weight|weight_scale_inv|bias)")


def vllm(
    manifest: Manifest,
    parallelism: Parallelism,
    rank: int,
    arrays: Mapping[str, Array],
    *,
    start_rank: int = 0,
    rules: Iterable[Rule] | None = None,
    padded_vocab: int | None = None,
    expert_slots: Sequence[int] | None = None,
    skip: Sequence[str] = (),
    zero_padding: bool = False,
    whole_side: bool = False,
) -> list[Parameter]:
    """One rank's parameters out of vLLM's or SGLang's arrays, as views.

    Args:
        manifest: The model under its published names.
        parallelism: The side's parallel sizes. For vLLM give ``order="vllm"``, and ``ep=`` where experts are
            parallel (all of a stage's ranks, that is tp × dp); for SGLang the default order.
        rank: This rank.
        arrays: The rank's arrays by the names of ``model.named_parameters()``: ``qkv_proj``,
            ``gate_up_proj``, ``experts.w13_weight`` of shape (slots, 2 × width, hidden),
            ``experts.w2_weight`` …, and all others under their published names. They must be as the framework
            builds them: a kernel's own order (Marlin, FlashInfer, …) has lost the rows that a layout names.
        start_rank: The side's first rank.
        rules: Rules in order; left out, the shipped ones.
        padded_vocab: Rows of the padded vocabulary over all tensor-parallel ranks; left out, padded to 64.
        expert_slots: The expert in each slot of all expert-parallel ranks, where some are redundant.
        skip: Patterns of published names that this side leaves out.
        zero_padding: Set padding rows to zero now; else they are left alone.
        whole_side: List also, without an array, the parameters of which this rank holds nothing.

    Raises:
        CommandError: If an array is unknown, missing or has another shape than the layouts say.
    """
    as_manifest(manifest)
    side = ModelLayouts(manifest, parallelism, rules, start_rank, padded_vocab, expert_slots)
    if padded_vocab is None:
        rows = [info.shape[0] for name, info in manifest.items() if side.is_vocabulary(name)]
        side.padded_vocab = padded_rows(max(rows)) if rows else None
    declared = RankViews(side, rank, skip, zero_padding)
    for stored, array in named_arrays(arrays):
        _read(declared, stored, array)
    return declared.finish(whole_side)


def _read(declared: RankViews, stored: str, array: Array) -> None:
    at, _, kind = stored.rpartition(".")
    at, _, module = at.rpartition(".")
    experts = _EXPERTS.fullmatch(stored)
    tied = declared.side.embedding() if stored.endswith("lm_head.weight") else None
    if declared.knows(stored) and declared.side.is_vocabulary(stored):
        declared.add_vocabulary([stored], array, stored)
    elif declared.knows(stored):
        declared.add(stored, array, stored)
    elif tied is not None:
        declared.add_vocabulary([tied], array, stored)
    elif module in _FUSED:
        declared.add_stack([f"{at}.{part}.{kind}" for part in _FUSED[module]], array, stored)
    elif experts is not None:
        _experts(declared, experts[1], experts[2], experts[3], array, stored)
    else:
        raise CommandError(
            f"{stored} is neither a parameter of {declared.side.manifest!r} nor one that fuses some"
        )


def _experts(declared: RankViews, at: str, which: str, kind: str, array: Array, stored: str) -> None:
    block = at.removesuffix(".experts")
    if declared.knows(f"{block}.input_linear.weight"):  # Granite's name for all of them
        declared.add(f"{block}.{'input' if which == 'w13' else 'output'}_linear.{kind}", array, stored)
        return
    if declared.knows(f"{at}.gate_up_proj"):  # the published checkpoint stacks the experts too
        name = f"{at}.{'gate_up_proj' if which == 'w13' else 'down_proj'}"
        weight = kind == "weight"
        turned = weight and declared.side.matched[f"{at}.gate_up_proj"].rule.tp == 2  # (experts, in, out)
        declared.add(name if weight else f"{name}_{kind}", array.swapaxes(1, 2) if turned else array, stored)
        return
    home = declared.side.home
    if home is None:
        raise CommandError(f"{stored} holds experts, but {declared.side.manifest!r} has none")
    own = home.slots[declared.side.expert_rank(declared.rank)]
    if array.shape[0] != len(own):
        raise CommandError(
            f"{stored} on rank {declared.rank}: expected {len(own)} slots for the experts "
            f"{list(own)}, got shape {tuple(array.shape)}"
        )
    up, down = declared.projections(f"{at}.{own[0] if own else 0}.")
    parts = up if which == "w13" else (down,)
    stacked = f"{at}.{own[0]}.gate_up_proj" if own else ""
    for expert in dict.fromkeys(own):
        if declared.knows(stacked):  # stacked in the checkpoint, and taken one by one
            name = f"{at}.{expert}.{'gate_up_proj' if which == 'w13' else 'down_proj'}"
            turned = array.swapaxes(1, 2) if kind == "weight" else array
            declared.add_experts([name if kind == "weight" else f"{name}_{kind}"], turned, stored)
        else:
            declared.add_experts([f"{at}.{expert}.{part}.{kind}" for part in parts], array, stored)
