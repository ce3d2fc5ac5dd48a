# SPDX-License-Identifier: Apache-2.0
"""FSDP2's and HSDP's storage: local shards of DTensors, with TP or without."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from nccl_m2n.errors import CommandError
from nccl_m2n.models.manifest import Manifest
from nccl_m2n.refit.parameter import Parameter
from nccl_m2n.sharding.experts import GATE_UP
from nccl_m2n.sharding.model_layouts import ModelLayouts
from nccl_m2n.sharding.parallelism import Parallelism
from nccl_m2n.sharding.rules import Rule
from nccl_m2n.storage.declare import RankViews, named_arrays
from nccl_m2n.typing import Array


def fsdp(
    manifest: Manifest,
    parallelism: Parallelism,
    rank: int,
    arrays: Mapping[str, Array],
    *,
    start_rank: int = 0,
    rules: Iterable[Rule] | None = None,
    stacked_dim: int | None = None,
    skip: Sequence[str] = (),
    whole_side: bool = False,
) -> list[Parameter]:
    """One rank's parameters out of FSDP2's local shards (``parameter.to_local()``), as views.

    Args:
        manifest: The model under its published names.
        parallelism: The side's sizes: ``fsdp`` shards, ``dp`` replicates (HSDP), ``tp`` and ``ep`` as usual.
        rank: This rank.
        arrays: The rank's local arrays by the names of ``model.named_parameters()``. Experts may be stacked
            as transformers 5 keeps them (``experts.gate_up_proj``, ``experts.down_proj``) though the
            published ones are one by one: then say `stacked_dim`.
        start_rank: The side's first rank.
        rules: Rules in order; left out, the shipped ones.
        stacked_dim: The dimension of stacked experts that FSDP ranks share out: 0, the experts, or 1.
        skip: Patterns of published names that this side leaves out.
        whole_side: List also, without an array, the parameters of which this rank holds nothing.

    Raises:
        CommandError: If an array is unknown, missing or has another shape than the layouts say.
    """
    side = ModelLayouts(manifest, parallelism, rules, start_rank, stacked_dim=stacked_dim)
    declared = RankViews(side, rank, skip)
    for stored, array in named_arrays(arrays):
        if declared.knows(stored):
            declared.add(stored, array, stored)
        elif stacked_dim is not None and ".experts." in stored:
            _stacked(declared, stored, array)
        else:
            raise CommandError(f"{stored} is no parameter of {manifest!r}; stacked experts need stacked_dim")
    return declared.finish(whole_side)


def _stacked(declared: RankViews, stored: str, array: Array) -> None:
    at, _, kind = stored.rpartition(".")
    suffix = "" if declared.knows(f"{at}.0.{kind}") else ".weight"
    parts = GATE_UP if suffix and kind == "gate_up_proj" else (kind,)
    stack = declared.side.stack(f"{at}.0.{parts[0]}{suffix}")
    expected = stack.layout.local_shape(declared.rank)
    if tuple(array.shape) != expected:
        raise CommandError(f"{stored} on rank {declared.rank}: expected {expected}, got {tuple(array.shape)}")
    for expert in range(stack.layout.shape[0]):
        for part in parts:
            where = stack.local(expert, part, declared.rank)
            if where is not None:
                declared.add(f"{at}.{expert}.{part}{suffix}", array[where], stored)
