# SPDX-License-Identifier: Apache-2.0
"""What the rules of families are made of: column- and row-parallel modules, attention, feed-forward, experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from nccl_m2n.sharding.rules import Rule

if TYPE_CHECKING:
    from typing_extensions import Unpack

Rules = tuple[Rule, ...]


class Where(TypedDict, total=False):
    """The stage of a module that is not a layer's."""

    stage: str | None


class Units(Where, total=False):
    """What the dimension of a module consists of."""

    units: int | str | None
    repeat: bool


class Options(Units, total=False):
    """What rules of a module may say beside its pattern and its dimension."""

    segments: int | tuple[int | str, ...]
    shape: tuple[int | str | None, ...] | None


LAYER = "{text}layers.{layer}."
QUERY: Units = {"units": "num_attention_heads", "repeat": False}
KEY_VALUE: Units = {"units": "num_key_value_heads"}


def column(at: str, *modules: str, **options: Unpack[Options]) -> Rules:
    """Modules whose output features are shared out: dimension 0 of the weight, and the bias along with it."""
    return tuple(Rule(f"{at}{m}.{kind}", tp=0, **options) for m in modules for kind in ("weight", "bias"))


def row(at: str, *modules: str, **options: Unpack[Options]) -> Rules:
    """Modules whose input features are shared out: dimension 1 of the weight; the bias is whole."""
    rules = (
        (Rule(f"{at}{m}.weight", tp=1, **options), Rule(f"{at}{m}.bias", stage=options.get("stage")))
        for m in modules
    )
    return tuple(rule for pair in rules for rule in pair)


def whole(at: str, *names: str, **options: Unpack[Options]) -> Rules:
    """What every rank of its stage has."""
    return tuple(Rule(f"{at}{name}", **options) for name in names)


def norms(at: str = LAYER, *more: str, **options: Unpack[Where]) -> Rules:
    """Norms, wherever they are in a layer; vectors only."""
    return whole(at, "*norm*.weight", "*norm*.bias", *more, shape=(None,), **options)


def attention(at: str = f"{LAYER}self_attn.", output: str = "o_proj") -> Rules:
    """Query, key, value and output projections, by heads."""
    return (
        *column(at, "q_proj", **QUERY),
        *column(at, "[kv]_proj", **KEY_VALUE),
        *row(at, output, **QUERY),
    )


def mlp(
    at: str = f"{LAYER}mlp.", up: tuple[str, ...] = ("gate_proj", "up_proj"), down: str = "down_proj"
) -> Rules:
    """A feed-forward block."""
    return column(at, *up) + row(at, down)


def experts(
    at: str = f"{LAYER}mlp.", up: tuple[str, ...] = ("gate_proj", "up_proj"), down: str = "down_proj"
) -> Rules:
    """Routed experts, each by itself; those that every token visits; and routers, which every rank has."""
    return (
        *mlp(f"{at}experts.{{expert}}.", up, down),
        *mlp(f"{at}shared_expert*.", up, down),
        *whole(at, "gate.weight", "router.weight", "router.bias", "shared_expert_gate.weight"),
        *whole(at, "*e_score_correction_bias", "expert_bias"),
    )


def stacked(at: str = f"{LAYER}mlp.") -> Rules:
    """All experts of a layer in one tensor, (experts, gate | up, hidden), as transformers 5 keeps them in memory."""
    return (
        Rule(f"{at}experts.gate_up_proj", tp=1, ep=0, segments=2),
        Rule(f"{at}experts.down_proj", tp=2, ep=0),
    )


def ends(
    embedding: str = "{text}embed_tokens.weight", norm: str = "{text}norm.*", head: str = "{text}lm_head"
) -> Rules:
    """What a decoder has before and behind its layers."""
    return (
        Rule(embedding, tp=0, padded=True, stage="tied"),
        Rule(norm, stage="last"),
        *(Rule(f"{head}.{kind}", tp=0, padded=True, stage="last") for kind in ("weight", "bias")),
    )
