# SPDX-License-Identifier: Apache-2.0
"""How a side divides a model over its ranks: parallel sizes, their rank order, who owns which layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from nccl_m2n.checks import MAX_RANKS, choice, made_by, several, whole_number, whole_numbers
from nccl_m2n.errors import CommandError

MAX_LAYERS = 1 << 20
ORDERS = ("megatron", "vllm")
DENSE_AXES = ("pp", "dp", "fsdp", "cp", "tp")
EXPERT_AXES = ("pp", "edp", "efsdp", "ep", "etp")


@dataclass(frozen=True)
class Parallelism:
    """The parallel sizes of one side of a refit.

    Dense parameters lie on the grid (dp, fsdp, cp, tp) of each pipeline stage's ranks, experts on another
    grid (edp, efsdp, ep, etp) of the same ranks in the same order. Ranks along the last axis are neighbours.

    Args:
        tp: Tensor-parallel ranks.
        pp: Pipeline stages.
        ep: Expert-parallel ranks. They are no further ranks: they are the stage's, taken another way.
        etp: Tensor-parallel ranks of one expert. Left out: `tp` in Megatron's order; in vLLM's all ranks
            of a stage that expert parallelism leaves.
        cp: Context-parallel ranks; they hold replicas.
        dp: Data-parallel replicas. Left out: as few as `ep` and `etp` need, most often 1.
        fsdp: Ranks that shard each parameter among them (dimension 0, as FSDP2 does). With `dp` this is
            HSDP, with `tp` it is FSDP2 over TP. Where context-parallel ranks shard too, count them here.
        order: ``"megatron"`` (tp-cp-fsdp-dp-pp, the first fastest; SGLang's too) or ``"vllm"``
            (tp-cp-pp-fsdp-dp).
        layers: What each stage owns: numbers of layers, or the layers themselves. Left out: an even split;
            what is over goes to the first stages (Megatron) or to those before the last (vLLM).

    Example:
        >>> from nccl_m2n.sharding import Parallelism
        >>> trainer = Parallelism.parse("tp=2,pp=2,ep=2")
        >>> trainer.size, trainer.dp, trainer.etp, trainer.stages(5)
        (8, 2, 2, ((0, 1, 2), (3, 4)))
        >>> trainer.dense(stage=1)[0, 0, 0].tolist(), trainer.experts(stage=1)[0, 0].tolist()
        ([4, 5], [[4, 5], [6, 7]])
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    cp: int = 1
    dp: int | None = None
    fsdp: int = 1
    order: str = "megatron"
    layers: tuple[int | tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "ep", "etp", "cp", "dp", "fsdp"):
            value = getattr(self, name)
            if value is not None or name not in ("etp", "dp"):
                number = whole_number(value, name, least=1, most=MAX_RANKS, error=CommandError)
                object.__setattr__(self, name, number)
        choice(self.order, "order", ORDERS, error=CommandError)
        self._complete()
        if self.layers is not None:
            made = tuple(map(_stage, several(self.layers, "stages", error=CommandError)))
            object.__setattr__(self, "layers", made)
            if len(made) != self.pp:
                raise CommandError(
                    f"layers={_layers_text(made)} describes {len(made)} stages, pp is {self.pp}"
                )

    def _complete(self) -> None:
        """Fill in dp and etp where they were left out, and refuse an expert grid that does not fit."""
        inner = self.fsdp * self.cp * self.tp
        etp = self.etp if self.etp is not None else self.tp if self.order == "megatron" else 1
        needed = self.ep * etp
        dp = self.dp
        if dp is None:
            dp = 1 if self.ep == 1 else math.lcm(inner, needed) // inner
        shards = inner if self.fsdp > 1 else dp * inner  # FSDP shards experts only inside a replica
        if shards % needed:
            raise CommandError(
                f"experts need ep × etp = {self.ep} × {etp} ranks, which do not divide the {shards} of "
                f"{'a replica' if self.fsdp > 1 else 'a stage'} (dp={dp}, fsdp={self.fsdp}, cp={self.cp}, "
                f"tp={self.tp}); give dp a multiple of {math.lcm(inner, needed) // inner} or set etp"
            )
        object.__setattr__(self, "dp", dp)
        object.__setattr__(self, "etp", self._usual_etp() if self.etp is None else etp)

    @classmethod
    def parse(cls, text: str) -> Parallelism:
        """From text such as ``"tp=4,pp=2"``, ``"fsdp=8,tp=2"`` or ``"tp=8,ep=8,order=vllm"``.

        Uneven stages: ``"pp=3,layers=10:11:11"`` (numbers of layers), or the layers themselves:
        ``"pp=2,layers=0-3+8-11:4-7+12-15"``.

        Raises:
            CommandError: For an option that is unknown, given twice, or has a value that cannot be.
        """
        made_by(text, str, "parallel sizes", error=CommandError)
        known = [field.name for field in fields(cls)]
        options: dict[str, Any] = {}
        for item in filter(None, (part.strip() for part in text.split(","))):
            key, equals, value = (part.strip() for part in item.partition("="))
            if key not in known:
                raise CommandError(f"{key!r} in {text!r} is no parallel option; known are {', '.join(known)}")
            if not equals or not value:
                raise CommandError(f"{item!r} in {text!r} has no value; write {key}=NUMBER")
            if key in options:
                raise CommandError(f"{key} is given twice in {text!r}")
            options[key] = _value(key, value, text)
        return cls(**options)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.pp * self.stage_size

    @property
    def stage_size(self) -> int:
        """Number of ranks of one pipeline stage."""
        return int(self.dp or 1) * self.fsdp * self.cp * self.tp

    def _start(self, stage: int, start: int) -> tuple[int, int]:
        """A stage and the side's first rank, checked."""
        last = MAX_RANKS - self.size
        return (
            whole_number(stage, "stage", least=0, most=self.pp - 1, error=CommandError),
            whole_number(start, "the first rank", least=0, most=last, error=CommandError),
        )

    def dense(self, stage: int, start: int = 0) -> npt.NDArray[np.int64]:
        """Ranks of one stage on the grid of dense parameters, shape (dp, fsdp, cp, tp).

        Args:
            stage: Pipeline stage.
            start: The side's first rank.
        """
        stage, start = self._start(stage, start)
        dp, shape = int(self.dp or 1), (self.fsdp, self.cp, self.tp)
        if self.order == "megatron":
            grid = np.arange(self.size).reshape(self.pp, dp, *shape)[stage]
        else:
            grid = np.arange(self.size).reshape(dp, self.fsdp, self.pp, self.cp, self.tp)[:, :, stage]
        ranks: npt.NDArray[np.int64] = grid + start
        return ranks

    def experts(self, stage: int, start: int = 0) -> npt.NDArray[np.int64]:
        """Ranks of one stage on the grid of experts, shape (edp, efsdp, ep, etp)."""
        etp = int(self.etp or 1)
        if self.fsdp > 1:
            return self.dense(stage, start).reshape(int(self.dp or 1), -1, self.ep, etp)
        return self.dense(stage, start).reshape(-1, 1, self.ep, etp)

    def stages(self, layers: int) -> tuple[tuple[int, ...], ...]:
        """The layers that each pipeline stage owns, of a model of so many.

        Raises:
            CommandError: If there are fewer layers than stages, or `layers=` describes another model.
        """
        whole_number(layers, "the number of layers", least=0, most=MAX_LAYERS, error=CommandError)
        if self.layers is None:
            return _consecutive(self._even(layers))
        if all(isinstance(n, int) for n in self.layers):
            owned = _consecutive([int(n) for n in self.layers])  # type: ignore[arg-type]
        else:
            owned = tuple((n,) if isinstance(n, int) else n for n in self.layers)
        if sorted(n for stage in owned for n in stage) != list(range(layers)):
            raise CommandError(
                f"layers={_layers_text(self.layers)} does not give each of the {layers} layers to one stage"
            )
        return owned

    def _even(self, layers: int) -> list[int]:
        if layers < self.pp and self.pp > 1:
            raise CommandError(
                f"pp={self.pp} asks for {self.pp} pipeline stages of a model with {layers} layers"
            )
        counts, over = [layers // self.pp] * self.pp, layers % self.pp
        first = 0 if self.order == "megatron" else self.pp - 1 - over
        for i in range(first, first + over):
            counts[i] += 1
        return counts

    def require(self, ranks: int, side: str) -> None:
        """Raise unless so many ranks are enough for this side.

        Raises:
            CommandError: Saying how many ranks are needed.
        """
        if whole_number(ranks, "the number of ranks", least=1, error=CommandError) < self.size:
            raise CommandError(f"the {side} {self} needs {self.size} ranks, there are {ranks}")

    def __str__(self) -> str:
        given = [
            f"{k}={getattr(self, k)}" for k in ("tp", "pp", "ep", "cp", "dp", "fsdp") if getattr(self, k) != 1
        ]
        if self.etp != self._usual_etp():
            given.append(f"etp={self.etp}")
        if self.order != ORDERS[0]:
            given.append(f"order={self.order}")
        if self.layers is not None:
            given.append(f"layers={_layers_text(self.layers)}")
        return ",".join(given) or "tp=1"

    def _usual_etp(self) -> int:
        """What `etp` becomes when it is left out."""
        if self.order == "megatron":
            return self.tp
        replicas = 1 if self.fsdp > 1 else int(self.dp or 1)
        return max(1, replicas * self.fsdp * self.cp * self.tp // self.ep)


def _value(key: str, value: str, text: str) -> Any:
    if key == "order":
        return value
    try:
        if key != "layers":
            return int(value)
        stages = value.split(":")
        if not any("-" in stage or "+" in stage for stage in stages):
            return tuple(int(stage) for stage in stages)
        return tuple(_layer_list(stage) for stage in stages)
    except ValueError:
        expected = "10:11:11 or 0-3+8-11:4-7" if key == "layers" else "a whole number"
        raise CommandError(f"{key}={value} in {text!r}: expected {expected}") from None


def _layer_list(text: str) -> tuple[int, ...]:
    layers: list[int] = []
    for run in text.split("+"):
        first, dash, last = run.partition("-")
        layers.extend(range(int(first), int(last if dash else first) + 1))
    return tuple(layers)


def _layers_text(layers: Sequence[int | tuple[int, ...]]) -> str:
    return ":".join(str(n) if isinstance(n, int) else "+".join(_runs(n)) for n in layers)


def _runs(layers: Sequence[int]) -> list[str]:
    runs: list[list[int]] = []
    for n in layers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return [f"{a}-{b}" for a, b in runs]


def _consecutive(counts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    stages, at = [], 0
    for count in counts:
        stages.append(tuple(range(at, at + count)))
        at += count
    return tuple(stages)


def _stage(layers: Any) -> int | tuple[int, ...]:
    """How many layers a stage owns, or which."""
    if isinstance(layers, Sequence):
        return whole_numbers(layers, "the layers of a stage", least=0, error=CommandError)
    return whole_number(layers, "the number of layers of a stage", least=0, error=CommandError)
