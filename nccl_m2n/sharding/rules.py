# SPDX-License-Identifier: Apache-2.0
"""Rules: which dimension of which parameter is divided among which ranks. They are data, open to the user."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from nccl_m2n.errors import CommandError
from nccl_m2n.models.manifest import Manifest

STAGES = ("first", "last", "all")


@dataclass(frozen=True, slots=True)
class Rule:
    """What becomes of parameters whose names match a pattern. Of several rules the first that matches counts.

    Args:
        pattern: A shell-style pattern for the whole name (``*`` is any run of characters, dots too).
        tp: The dimension that the tensor-parallel ranks share out (an expert's own: the ``etp`` ranks); with
            none, each of them holds all of it.
        ep: For experts. ``"name"``: the tensor is one expert's, whose number is in its name, and lives on the
            expert-parallel ranks that own it. A number: the tensor stacks all experts along that dimension.
        units: How many indivisible units the `tp` dimension has: a number, or the key of the model's
            configuration that says it. Where there are more ranks than units, neighbours hold the same unit.
        padded: Dimension 0 counts the vocabulary, which storage may pad.
        stage: The pipeline stages that own what has no layer number in its name: ``"first"``, ``"last"``
            or ``"all"``.
        fsdp: The dimension that FSDP ranks share out.
    """

    pattern: str
    tp: int | None = None
    ep: int | str | None = None
    units: int | str | None = None
    padded: bool = False
    stage: str = "all"
    fsdp: int = 0

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            raise CommandError(
                f"rule {self.pattern!r}: stage={self.stage!r}, expected one of {', '.join(STAGES)}"
            )
        if isinstance(self.ep, str) and self.ep != "name":
            raise CommandError(f"rule {self.pattern!r}: ep={self.ep!r}, expected a dimension or 'name'")


def _rules(*rows: tuple[str, dict[str, Any]]) -> tuple[Rule, ...]:
    return tuple(Rule(pattern, **options) for pattern, options in rows)


_KV = {"tp": 0, "units": "num_key_value_heads"}

# Attention and feed-forward of Llama, Mistral and Qwen, and all that a decoder has outside its layers.
DENSE = _rules(
    ("*.q_proj.weight", {"tp": 0}),
    ("*.q_proj.bias", {"tp": 0}),
    ("*.self_attn.[kv]_proj.weight", _KV),
    ("*.self_attn.[kv]_proj.bias", _KV),
    ("*.o_proj.weight", {"tp": 1}),
    ("*.mlp.gate_proj.*", {"tp": 0}),
    ("*.mlp.up_proj.*", {"tp": 0}),
    ("*.mlp.down_proj.weight", {"tp": 1}),
    ("model.embed_tokens.weight", {"tp": 0, "padded": True, "stage": "first"}),
    ("lm_head.weight", {"tp": 0, "padded": True, "stage": "last"}),
    ("model.norm.*", {"stage": "last"}),
    ("model.layers.*", {}),  # norms, biases of row-parallel matrices, routers
)

# One tensor for each projection of each expert, and experts that every token visits.
EXPERTS = _rules(
    ("*.experts.*.gate_proj.weight", {"tp": 0, "ep": "name"}),
    ("*.experts.*.up_proj.weight", {"tp": 0, "ep": "name"}),
    ("*.experts.*.down_proj.weight", {"tp": 1, "ep": "name"}),
    ("*.shared_expert*.gate_proj.weight", {"tp": 0}),
    ("*.shared_expert*.up_proj.weight", {"tp": 0}),
    ("*.shared_expert*.down_proj.weight", {"tp": 1}),
    # all experts of a layer in one tensor, as transformers 5 keeps them in memory
    ("*.experts.gate_up_proj", {"tp": 1, "ep": 0}),
    ("*.experts.down_proj", {"tp": 2, "ep": 0}),
)

# Multi-head latent attention and the prediction layers behind the others.
LATENT = _rules(
    ("*.q_b_proj.weight", {"tp": 0}),
    ("*.kv_b_proj.weight", {"tp": 0}),
    ("*.layers.*.embed_tokens.weight", {"tp": 0, "padded": True}),
    ("*.layers.*.shared_head.head.weight", {"tp": 0, "padded": True}),
)

# Stacked experts with gate and up columns interleaved, so that a plain cut keeps the pairs together.
GPT_OSS = _rules(
    ("*.self_attn.sinks", {"tp": 0}),
    ("*.experts.gate_up_proj_blocks", {"tp": 1, "ep": 0}),
    ("*.experts.gate_up_proj_scales", {"tp": 1, "ep": 0}),
    ("*.experts.gate_up_proj_bias", {"tp": 1, "ep": 0}),
    ("*.experts.gate_up_proj", {"tp": 2, "ep": 0}),
    ("*.experts.down_proj_blocks", {"tp": 2, "ep": 0}),
    ("*.experts.down_proj_scales", {"tp": 2, "ep": 0}),
    ("*.experts.down_proj_bias", {"ep": 0}),
    ("*.experts.down_proj", {"tp": 1, "ep": 0}),
    # the same one by one, where one side keeps them so (Manifest.unstack)
    ("*.experts.*.gate_up_proj", {"tp": 1, "ep": "name"}),
    ("*.experts.*.gate_up_proj_bias", {"tp": 0, "ep": "name"}),
    ("*.experts.*.down_proj", {"tp": 0, "ep": "name"}),
    ("*.experts.*.down_proj_bias", {"ep": "name"}),
)

BERT = _rules(
    ("*.attention.self.*", {"tp": 0}),
    ("*.attention.output.dense.weight", {"tp": 1}),
    ("*.intermediate.dense.*", {"tp": 0}),
    ("*encoder.layer.*.output.dense.weight", {"tp": 1}),
    ("*embeddings.word_embeddings.weight", {"tp": 0, "padded": True, "stage": "first"}),
    ("*embeddings.*", {"stage": "first"}),
    ("*pooler.*", {"stage": "last"}),
    ("cls.*", {"stage": "last"}),
    ("*encoder.layer.*", {}),
)

SHIPPED: dict[str, tuple[Rule, ...]] = {
    "bert": BERT,
    "llama": DENSE,
    "mistral": DENSE,
    "qwen2": DENSE,
    "qwen3": DENSE,
    "qwen3_moe": EXPERTS + DENSE,
    "deepseek_v3": EXPERTS + LATENT + DENSE,
    "kimi_k2": EXPERTS + LATENT + DENSE,
    "gpt_oss": GPT_OSS + DENSE,
}


def rules_for(manifest: Manifest) -> tuple[Rule, ...]:
    """The shipped rules of a model: by its configuration's family, or by its names where there is none.

    Raises:
        CommandError: If neither is known.
    """
    family = (manifest.config or {}).get("model_type")
    if family in SHIPPED:
        return SHIPPED[family]
    if any("encoder.layer." in name for name in manifest):
        return BERT
    if any(name.startswith("model.layers.") for name in manifest):
        return (GPT_OSS if any(name.endswith(".sinks") for name in manifest) else EXPERTS + LATENT) + DENSE
    raise CommandError(
        f"no shipped rules fit {manifest!r} (model_type {family!r}); give rules of your own. "
        f"Shipped are {', '.join(SHIPPED)}"
    )


def load_rules(source: str | Path | Iterable[Rule | Mapping[str, Any]]) -> tuple[Rule, ...]:
    """Rules from a JSON file or from a list of rules or mappings.

    The JSON is a list of objects such as ``{"pattern": "*.q_proj.weight", "tp": 0}``. An entry
    ``{"shipped": "llama"}`` stands for all shipped rules of that family.

    Raises:
        CommandError: For a file that cannot be read, or an entry that is no rule.
    """
    if isinstance(source, str | Path):
        try:
            source = json.loads(Path(source).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CommandError(f"cannot read the rules {source}: {error}") from None
        if not isinstance(source, list):
            raise CommandError("rules are a JSON list of objects, each with a pattern")
    rules: list[Rule] = []
    known = {field.name for field in fields(Rule)}
    for entry in source:
        if isinstance(entry, Rule):
            rules.append(entry)
        elif isinstance(entry, Mapping) and set(entry) == {"shipped"} and entry["shipped"] in SHIPPED:
            rules.extend(SHIPPED[entry["shipped"]])
        elif isinstance(entry, Mapping) and "pattern" in entry and set(entry) <= known:
            rules.append(Rule(**entry))
        else:
            raise CommandError(
                f"{entry!r} is no rule; a rule has a pattern and any of {', '.join(sorted(known))}"
            )
    return tuple(rules)


class Matcher:
    """Finds the rule of a name. Names that differ only in their numbers are matched once."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self.rules = tuple(rules)
        self._compiled = [re.compile(fnmatch.translate(rule.pattern)) for rule in self.rules]
        self._by_name = not all(re.search(r"\d", rule.pattern) is None for rule in self.rules)
        self._found: dict[str, Rule] = {}

    def __call__(self, name: str) -> Rule:
        """The first rule that matches.

        Raises:
            CommandError: If none does.
        """
        key = name if self._by_name else _NUMBER.sub("0", name)
        if key not in self._found:
            for rule, pattern in zip(self.rules, self._compiled, strict=True):
                if pattern.match(name):
                    self._found[key] = rule
                    break
            else:
                raise CommandError(
                    f"no rule matches the parameter {name}; end the rules with "
                    f'{{"pattern": "*"}} to replicate what the others leave'
                )
        return self._found[key]


_NUMBER = re.compile(r"\d+")
