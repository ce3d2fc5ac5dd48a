# SPDX-License-Identifier: Apache-2.0
"""From a manifest, parallel sizes and rules to one layout for each parameter."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from nccl_m2n.errors import CommandError
from nccl_m2n.layout import Box, Layout, Mesh, Placement, Replicate, Segment, Shard, StridedShard
from nccl_m2n.models.manifest import Manifest
from nccl_m2n.sharding.experts import GATE_UP, Home, Owners, Stack, in_slots
from nccl_m2n.sharding.parallelism import DENSE_AXES, EXPERT_AXES, Parallelism
from nccl_m2n.sharding.rules import Matcher, Rule, rules_for
from nccl_m2n.sharding.scales import from_boxes, scale_layout

_LAYER = re.compile(r"(?:^|\.)(?:layers?|blocks|h)\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.(.+)")
_SCALE = "_scale_inv"


def layouts(
    manifest: Manifest,
    parallelism: Parallelism,
    rules: Iterable[Rule] | None = None,
    start_rank: int = 0,
    *,
    padded_vocab: int | None = None,
    expert_slots: Sequence[int] | None = None,
) -> dict[str, Layout]:
    """The layout of every parameter on one side.

    Args:
        manifest: The model.
        parallelism: The side's parallel sizes.
        rules: Rules in order; left out, the shipped ones of the model.
        start_rank: The side's first rank; it takes ``parallelism.size`` ranks from there on.
        padded_vocab: Rows of the embedding with padding, over all tensor-parallel ranks: each of them holds
            an equal share, of which the layout names the rows that the model has.
        expert_slots: The expert in each slot, all expert-parallel ranks' slots end to end, where some experts
            have several (redundant experts). Left out: each has one, consecutive ones on one rank.

    Returns:
        Name to layout, in the manifest's order. Parameters placed alike share one Layout object.

    Raises:
        CommandError: If the model cannot be divided so.
    """
    return Placer(manifest, parallelism, rules, start_rank, padded_vocab, expert_slots).all()


class Placer:
    """Makes the layouts of one side; see :func:`layouts`."""

    def __init__(
        self,
        manifest: Manifest,
        parallelism: Parallelism,
        rules: Iterable[Rule] | None = None,
        start_rank: int = 0,
        padded_vocab: int | None = None,
        expert_slots: Sequence[int] | None = None,
        stacked_dim: int | None = None,
    ) -> None:
        self.manifest = manifest
        self.parallelism = parallelism
        self.start_rank = start_rank
        self.padded_vocab = padded_vocab
        self.config = manifest.config or {}
        self._match = Matcher(rules_for(manifest) if rules is None else rules)
        self._cache: dict[tuple[object, ...], Layout] = {}
        self._grids: dict[tuple[tuple[int, ...], bool], npt.NDArray[np.int64]] = {}
        found = sorted({int(m[1]) for m in map(_LAYER.search, manifest) if m})
        self.layer_count = int(self.config.get("num_hidden_layers") or (found[-1] + 1 if found else 0))
        self.prediction_layers = tuple(n for n in found if n >= self.layer_count)
        self._stages = parallelism.stages(self.layer_count)
        self._stage_of = {layer: stage for stage, owned in enumerate(self._stages) for layer in owned}
        numbers = {int(m[1]) for m in map(_EXPERT.search, manifest) if m}
        self.home = Home.of(max(numbers) + 1, parallelism.ep, expert_slots) if numbers else None
        # Experts that every owner has in one slot share their layouts, whichever slot it is.
        self._owner_table: list[Owners] = [
            tuple((rank, (0,)) for rank, _ in held) if all(len(slots) == 1 for _, slots in held) else held
            for held in (self.home.owners if self.home else ())
        ]
        self._stacked_dim = stacked_dim
        self._stacks: dict[object, Stack] = {}
        if stacked_dim is not None and parallelism.etp != 1:
            raise CommandError(
                f"stacked experts are not divided by tensor parallelism, got etp={parallelism.etp}"
            )

    def all(self) -> dict[str, Layout]:
        """Every parameter's layout."""
        return {name: self.layout(name) for name in self.manifest}

    def layout(self, name: str) -> Layout:
        """One parameter's layout."""
        base = name.removesuffix(_SCALE)
        if base == name or base not in self.manifest:
            base = name
        rule = self._match(base)
        stages, expert = self._stages_of(base, rule), _expert_of(base, rule)
        shapes = self.manifest[base].shape, self.manifest[name].shape
        alike = (rule.tp, rule.ep, rule.units, rule.padded, rule.fsdp)
        key: tuple[object, ...] = (alike, shapes, stages, self._owners(expert))
        if expert is not None and self._stacked_dim is not None:
            key = (*key, expert, part_of(base))
        if key not in self._cache:
            try:
                self._cache[key] = self._make(base, rule, stages, expert, None if base == name else shapes[1])
            except ValueError as error:  # a rule that does not fit; name the parameter
                raise CommandError(
                    f"{name} of shape {shapes[1]} cannot be placed by {rule}: {error}"
                ) from None
        return self._cache[key]

    def expert(self, name: str) -> int | None:
        """The number of the expert whose own tensor this is."""
        return _expert_of(name, self._match(name.removesuffix(_SCALE)))

    def stack(self, name: str) -> Stack:
        """The stacked tensor that has an expert's projection for a slice."""
        part = part_of(name)
        parts = GATE_UP if part in GATE_UP else (part,)
        stages, (rows, *rest) = self._stages_of(name, self._match(name)), self.manifest[name].shape
        shape = (len(self.home.owners) if self.home else 0, len(parts) * rows, *rest)
        key = (stages, shape, parts)
        if key not in self._stacks:
            rule = Rule("*", ep=0, fsdp=self._stacked_dim or 0)
            self._stacks[key] = Stack(self._on_grid(rule, shape, stages, None), parts)
        return self._stacks[key]

    def stage_layers(self, rank: int) -> tuple[int, ...]:
        """The layers of the pipeline stage that `rank` belongs to, in the stage's order."""
        return self._stages[self.stage(rank)]

    def stage(self, rank: int) -> int:
        """The pipeline stage of `rank`.

        Raises:
            CommandError: If the rank is not of this side.
        """
        for stage in range(self.parallelism.pp):
            if (self.parallelism.dense(stage, self.start_rank) == rank).any():
                return stage
        last = self.start_rank + self.parallelism.size - 1
        raise CommandError(f"rank {rank} is not of this side, whose ranks are {self.start_rank} to {last}")

    def expert_rank(self, rank: int) -> int:
        """The coordinate of `rank` among the expert-parallel ranks."""
        grid = self.parallelism.experts(self.stage(rank), self.start_rank)
        return int(np.argwhere(grid == rank)[0][2])

    def _stages_of(self, name: str, rule: Rule) -> tuple[int, ...]:
        last = self.parallelism.pp - 1
        layer = _LAYER.search(name)
        if layer:
            return (self._stage_of.get(int(layer[1]), last),)  # prediction layers follow the last one
        where = self._match(name).stage
        if (
            where == "first"
            and name.endswith("embed_tokens.weight")
            and "lm_head.weight" not in self.manifest
        ):
            return (0, last) if last else (0,)  # tied: the last stage needs it for the output
        return {"first": (0,), "last": (last,), "all": tuple(range(last + 1))}[where]

    def _owners(self, expert: int | None) -> Owners | None:
        return None if expert is None else self._owner_table[expert]

    def _grid(self, stages: tuple[int, ...], experts: bool) -> npt.NDArray[np.int64]:
        key = (stages, experts)
        if key not in self._grids:
            of = self.parallelism.experts if experts else self.parallelism.dense
            self._grids[key] = np.stack([of(stage, self.start_rank) for stage in stages])
        return self._grids[key]

    def _make(
        self,
        name: str,
        rule: Rule,
        stages: tuple[int, ...],
        expert: int | None,
        scales: tuple[int, ...] | None,
    ) -> Layout:
        shape, owners = self.manifest[name].shape, self._owners(expert)
        if expert is not None and self._stacked_dim is not None:
            layout = self.stack(name).layout_of(expert, part_of(name))
        elif rule.padded and self.padded_vocab not in (None, shape[0]):
            layout = self._padded(rule, shape, stages)
        else:
            layout = self._on_grid(rule, shape, stages, owners)
        if scales is not None:
            layout = scale_layout(layout, scales)
        if owners is not None and any(len(slots) > 1 for _, slots in owners):
            layout = in_slots(layout, self._grid(stages, True), owners)
        return layout

    def _on_grid(
        self,
        rule: Rule,
        shape: tuple[int, ...],
        stages: tuple[int, ...],
        owners: Owners | None,
    ) -> Layout:
        grid = self._grid(stages, rule.ep is not None)
        if owners is not None:
            grid = grid[:, :, :, [rank for rank, _ in owners]]
        placements = self._placements(rule, shape, grid.shape)
        names = DENSE_AXES if rule.ep is None else EXPERT_AXES
        kept = [axis for axis, size in enumerate(grid.shape) if size > 1] or [grid.ndim - 1]
        mesh = Mesh(grid.reshape([grid.shape[a] for a in kept]), names=[names[a] for a in kept])
        return Layout(shape, mesh, [placements[a] for a in kept])

    def _placements(self, rule: Rule, shape: tuple[int, ...], grid: tuple[int, ...]) -> list[Placement]:
        """One placement for each grid axis: pp, dp, fsdp, cp or ep, tp."""
        fsdp, middle, tp = grid[2:]
        inner: list[Placement] = [Replicate(), Replicate()]
        if isinstance(rule.ep, int):
            inner[0] = Shard(rule.ep)
        if rule.tp is not None:
            inner[1] = self._tensor_parallel(rule, shape, tp)
        outer: Placement = Replicate()
        if fsdp > 1 and shape:
            # FSDP shards what TP and EP have left, though its mesh axis stands before theirs
            later = zip(inner, (middle, tp), strict=True)
            cut = [n for p, n in later if isinstance(p, Shard) and p.dim == rule.fsdp and n > 1]
            if cut and any(isinstance(p, Shard) and p.segments for p in inner):
                raise CommandError("fsdp over units that tensor-parallel ranks repeat is not supported")
            outer = StridedShard(rule.fsdp, int(np.prod(cut))) if cut else Shard(rule.fsdp)
        return [Replicate(), Replicate(), outer, *inner]

    def _tensor_parallel(self, rule: Rule, shape: tuple[int, ...], tp: int) -> Placement:
        assert rule.tp is not None
        units = self.config.get(rule.units) if isinstance(rule.units, str) else rule.units
        if units is None or tp <= int(units) or not 0 <= rule.tp < len(shape):
            return Shard(rule.tp)
        if tp % int(units):
            raise CommandError(f"{tp} tensor-parallel ranks cannot repeat {units} units evenly")
        return Shard(rule.tp, segments=(Segment(shape[rule.tp], parts=int(units)),))

    def _padded(self, rule: Rule, shape: tuple[int, ...], stages: tuple[int, ...]) -> Layout:
        """Equal shares of the padded vocabulary, less the padding."""
        tp, rows = self.parallelism.tp, int(self.padded_vocab or 0)
        if rows % tp or rows < shape[0] or self.parallelism.fsdp > 1:
            raise CommandError(
                f"padded_vocab={rows} cannot hold {shape[0]} rows in equal shares of {tp} ranks"
                + (" under fsdp, which does not pad" if self.parallelism.fsdp > 1 else "")
            )
        if rows // tp == -(-shape[0] // tp):
            return self._on_grid(rule, shape, stages, None)
        pieces: dict[int, list[Box]] = {}
        grid, share = self._grid(stages, False), rows // tp
        for position in range(tp):
            start, stop = (min((position + i) * share, shape[0]) for i in (0, 1))
            box = [Box((start, *[0] * (len(shape) - 1)), (stop, *shape[1:]))] if start < stop else []
            pieces.update({int(rank): box for rank in grid[..., position].flat})
        return from_boxes(shape, pieces)


def part_of(name: str) -> str:
    """Which projection of its expert a parameter is, such as ``"gate_proj"``."""
    match = _EXPERT.search(name)
    return match[2].removesuffix(".weight") if match else name


def _expert_of(name: str, rule: Rule) -> int | None:
    if rule.ep != "name":
        return None
    match = _EXPERT.search(name)
    if match is None:
        raise CommandError(f"{name} has no expert number, but its rule says ep='name'")
    return int(match[1])
