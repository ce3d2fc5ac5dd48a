# SPDX-License-Identifier: Apache-2.0
"""From a manifest, parallel sizes and rules to one layout for each parameter."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from nccl_m2n.checks import MAX_RANKS, made_by, several, whole_number, whole_numbers
from nccl_m2n.errors import CommandError
from nccl_m2n.layout import Layout
from nccl_m2n.models.config import Config
from nccl_m2n.models.manifest import Manifest, as_manifest
from nccl_m2n.sharding.companions import Companion, companion_layout, companion_of
from nccl_m2n.sharding.divide import cut_by_fsdp, on_grid, padded
from nccl_m2n.sharding.experts import GATE_UP, Home, Owners, StackedExperts, in_slots, part_of
from nccl_m2n.sharding.families import rules_for
from nccl_m2n.sharding.parallelism import Parallelism
from nccl_m2n.sharding.rules import Matched, Matcher, Rule

_HEADS = ("lm_head.weight", "embed_out.weight", "lm_head.linear.weight")  # output heads
_ADAPTED = "base_model.model."
_INSTEAD = (
    ", or pass replicate_unknown=True (--replicate-unknown) to leave what is not known whole on every rank"
)


def layouts(
    manifest: Manifest,
    parallelism: Parallelism,
    rules: Iterable[Rule] | None = None,
    start_rank: int = 0,
    *,
    padded_vocab: int | None = None,
    expert_slots: Sequence[int] | None = None,
    replicate_unknown: bool = False,
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
        replicate_unknown: Leave what no rule matches whole on every rank, instead of refusing it.

    Returns:
        Name to layout, in the manifest's order. Parameters placed alike share one Layout object.

    Raises:
        CommandError: If the model cannot be divided so.
    """
    return ModelLayouts(
        manifest,
        parallelism,
        rules,
        start_rank,
        padded_vocab,
        expert_slots,
        replicate_unknown=replicate_unknown,
    ).all()


class ModelLayouts:
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
        replicate_unknown: bool = False,
    ) -> None:
        self.manifest = as_manifest(manifest)
        self.parallelism = made_by(parallelism, Parallelism, "parallel sizes", error=CommandError)
        last = MAX_RANKS - parallelism.size
        self.start_rank = whole_number(start_rank, "start_rank", least=0, most=last, error=CommandError)
        if padded_vocab is not None:
            padded_vocab = whole_number(padded_vocab, "padded_vocab", least=1, error=CommandError)
        self.padded_vocab = padded_vocab
        if expert_slots is not None:
            expert_slots = whole_numbers(expert_slots, "expert_slots", least=0, error=CommandError)
        if rules is not None:
            each = several(rules, "rules", error=CommandError, hint="load_rules() makes them of data")
            rules = [made_by(rule, Rule, "each rule", error=CommandError) for rule in each]
        self.config = Config(manifest.config or {}, manifest.label or "the model")
        shipped = rules_for(manifest, replicate_unknown) if rules is None else tuple(rules)
        if replicate_unknown:
            _tell_of_unknown(manifest, shipped)
            shipped = (*shipped, Rule("*"))
        self._match = Matcher(shipped, self.config, _INSTEAD)
        self._cache: dict[object, Layout] = {}
        self._alike_rules: dict[Rule, Rule] = {}
        self._alike_by_id: dict[int, Rule] = {}  # of the rules that the matcher keeps
        self._layer_configs: dict[int | None, Config] = {}
        self._grids: dict[tuple[tuple[int, ...], bool], npt.NDArray[np.int64]] = {}
        self._companions = {n: c for n in manifest if (c := companion_of(n, manifest, self.config))}
        self.matched = {name: self._rule_of(name) for name in manifest}
        found = sorted({m.layer for m in self.matched.values() if m.layer is not None})
        self.layer_count = self.config.number("num_hidden_layers", found[-1] + 1 if found else 0)
        self.prediction_layers = tuple(n for n in found if n >= self.layer_count)
        self._stages = parallelism.stages(self.layer_count)
        self._stage_of = {layer: stage for stage, owned in enumerate(self._stages) for layer in owned}
        self._tied = not any(name.endswith(_HEADS) for name in manifest)
        numbers = {m.expert for m in self.matched.values() if m.expert is not None}
        self.home = Home.of(max(numbers) + 1, parallelism.ep, expert_slots) if numbers else None
        # Experts that every owner has in one slot share their layouts, whichever slot it is.
        self._owner_table: list[Owners] = [
            tuple((rank, (0,)) for rank, _ in held) if all(len(slots) == 1 for _, slots in held) else held
            for held in (self.home.owners if self.home else ())
        ]
        self._stacked_dim = stacked_dim
        self._stacks: dict[object, StackedExperts] = {}
        if stacked_dim is not None and parallelism.etp != 1:
            raise CommandError(
                f"stacked experts are not divided by tensor parallelism, got etp={parallelism.etp}"
            )

    def all(self) -> dict[str, Layout]:
        """Every parameter's layout."""
        return {name: self.layout(name) for name in self.manifest}

    def layout(self, name: str) -> Layout:
        """One parameter's layout.

        Raises:
            CommandError: If it cannot be divided so.
        """
        matched, companion = self.matched[name], self._companions.get(name)
        shape, stages = self.manifest[name].shape, self._stages_of(name, matched)
        owners = None if matched.expert is None else self._owner_table[matched.expert]
        steps = companion and (companion.shape, companion.steps)
        config = self._config_of(matched.layer)
        key: tuple[object, ...] = (id(self._alike(matched.rule)), shape, stages, owners, steps, config)
        if matched.expert is not None and self._stacked_dim is not None:
            key = (*key, matched.expert, part_of(name))
        if key not in self._cache:
            try:
                self._cache[key] = self._make(name, matched, stages, owners, companion)
            except ValueError as error:  # a rule that does not fit; name the parameter
                raise CommandError(
                    f"{name} of shape {shape} cannot be placed by {matched.rule}: {error}"
                ) from None
        return self._cache[key]

    def _alike(self, rule: Rule) -> Rule:
        """The first rule that says the same of whatever names."""
        found = self._alike_by_id.get(id(rule))
        if found is None:
            said = replace(rule, pattern="")
            found = self._alike_by_id[id(rule)] = self._alike_rules.setdefault(said, rule)
        return found

    def _config_of(self, layer: int | None) -> Config:
        if layer not in self._layer_configs:
            self._layer_configs[layer] = self.config.of_layer(layer)
        return self._layer_configs[layer]

    def is_vocabulary(self, name: str) -> bool:
        """Whether a parameter's dimension 0 counts the vocabulary, which storage may pad."""
        return self.matched[name].rule.padded

    def embedding(self) -> str | None:
        """The embedding that is the output head too, if the model has one."""
        return next((n for n, m in self.matched.items() if m.rule.stage == "tied" and self._tied), None)

    def expert(self, name: str) -> int | None:
        """The number of the expert whose own tensor this is."""
        return self.matched[name].expert

    def stack(self, name: str) -> StackedExperts:
        """The stacked tensor that has an expert's projection for a slice."""
        part = part_of(name)
        parts = GATE_UP if part in GATE_UP else (part,)
        stages, (rows, *rest) = self._stages_of(name, self.matched[name]), self.manifest[name].shape
        shape = (len(self.home.owners) if self.home else 0, len(parts) * rows, *rest)
        key = (stages, shape, parts)
        if key not in self._stacks:
            rule = Rule("*", ep=0, fsdp=self._stacked_dim or 0)
            self._stacks[key] = StackedExperts(
                on_grid(rule, shape, self._grid(stages, True), self.config), parts
            )
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

    def _rule_of(self, name: str) -> Matched:
        """A companion goes by its weight's rule, an adapter by that of what it adapts."""
        companion = self._companions.get(name)
        if companion is None:
            return self._match(name.removeprefix(_ADAPTED), self.manifest[name].shape)
        return self._match(companion.weight, companion.shape)

    def _stages_of(self, name: str, matched: Matched) -> tuple[int, ...]:
        last, where = self.parallelism.pp - 1, matched.rule.stage
        if where is None and matched.layer is not None:
            return (self._stage_of.get(matched.layer, last),)  # prediction layers follow the last one
        if where == "tied" or (where == "first" and name.endswith("embed_tokens.weight")):
            return (0, last) if last and self._tied else (0,)  # the last stage needs it for the output
        return {"first": (0,), "last": (last,)}.get(where or "all", tuple(range(last + 1)))

    def _grid(self, stages: tuple[int, ...], experts: bool) -> npt.NDArray[np.int64]:
        key = (stages, experts)
        if key not in self._grids:
            of = self.parallelism.experts if experts else self.parallelism.dense
            self._grids[key] = np.stack([of(stage, self.start_rank) for stage in stages])
        return self._grids[key]

    def _make(
        self,
        name: str,
        matched: Matched,
        stages: tuple[int, ...],
        owners: Owners | None,
        companion: Companion | None,
    ) -> Layout:
        rule, shape = matched.rule, self.manifest[name].shape
        grid = whole = self._grid(stages, rule.ep is not None)
        if owners is not None:
            grid = grid[:, :, :, [rank for rank, _ in owners]]
        if matched.expert is not None and self._stacked_dim is not None:
            layout = self.stack(name).layout_of(matched.expert, part_of(name))
        elif companion is not None:
            layout = self._companion(matched, grid, companion, shape)
        elif self._padding(rule, shape) is not None:
            layout = padded(rule, shape, grid, self._padding(rule, shape) or 0)
        else:
            layout = on_grid(rule, shape, grid, self._config_of(matched.layer))
        if owners is not None and any(len(slots) > 1 for _, slots in owners):
            layout = in_slots(layout, whole, owners)
        return layout

    def _padding(self, rule: Rule, shape: tuple[int, ...]) -> int | None:
        """The extent that storage pads the tensor-parallel dimension to; None where ceil chunks are the same."""
        if rule.tp is None or len(shape) <= rule.tp:
            return None
        extent, unit = shape[rule.tp], rule.multiple * self.parallelism.tp
        made = self.padded_vocab if rule.padded else -(-extent // unit) * unit if rule.multiple > 1 else None
        if made is None or made == extent:
            return None
        fits = made >= extent and made % self.parallelism.tp == 0 and self.parallelism.fsdp == 1
        same = fits and made // self.parallelism.tp == -(-extent // self.parallelism.tp)
        return None if same else made

    def _companion(
        self, matched: Matched, grid: npt.NDArray[np.int64], companion: Companion, shape: tuple[int, ...]
    ) -> Layout:
        """Cut as its weight is, and then by FSDP by itself."""
        stages, dp, fsdp, *inner = grid.shape
        replicas = grid.reshape(stages, dp * fsdp, 1, *inner)
        made = companion_layout(
            on_grid(matched.rule, companion.shape, replicas, self._config_of(matched.layer)),
            companion,
            shape,
        )
        return made if fsdp == 1 or not shape else cut_by_fsdp(made, grid, 0)


def unknown_names(manifest: Manifest, rules: Iterable[Rule]) -> list[str]:
    """The names of a model that none of the rules matches."""
    unknown = Rule("*")
    matched = ModelLayouts(manifest, Parallelism(), (*rules, unknown)).matched
    return [name for name, found in matched.items() if found.rule is unknown]


def _tell_of_unknown(manifest: Manifest, rules: Iterable[Rule]) -> None:
    names = unknown_names(manifest, rules)
    if names:
        share = sum(manifest[name].nbytes for name in names) / max(1, manifest.nbytes)
        warnings.warn(
            f"{len(names)} parameters that no rule knows, {share:.1%} of the bytes, are whole on every rank: "
            f"{', '.join(names[:3])}{', …' if len(names) > 3 else ''}",
            stacklevel=4,
        )
