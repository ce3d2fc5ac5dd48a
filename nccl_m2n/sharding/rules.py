# SPDX-License-Identifier: Apache-2.0
"""Rules: which dimension of which parameter is divided among which ranks. They are data, open to the user."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from nccl_m2n.checks import shown
from nccl_m2n.errors import CommandError
from nccl_m2n.models.config import Config

STAGES = ("first", "last", "tied", "all")
_TEXT = r"(?:(?:model\.)?language_model\.(?:model\.)?|model\.)?"  # where checkpoints keep a language model
_PLACEHOLDERS = {r"\{layer\}": r"(?P<layer>\d+)", r"\{expert\}": r"(?P<expert>\d+)", r"\{text\}": _TEXT}
# The layer's number where a pattern does not say which number it is.
_LAYER = re.compile(rf"{_TEXT}(?:transformer\.|backbone\.)?(?:layers|h|(?:bert\.)?encoder\.layer)\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_NUMBER = re.compile(r"\d+")
_BETWEEN_DOTS = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)")  # a number that stands by itself in a name
_PLAIN_WORD = re.compile(r"[A-Za-z_][^*?\[]*|[^0-9]*")  # a word of a pattern that such a number never decides

KINDS: dict[str, tuple[type, ...]] = {  # what a rule's fields may be
    "pattern": (str,),
    "tp": (int, type(None)),
    **dict.fromkeys(("ep", "units"), (int, str, type(None))),
    **dict.fromkeys(("padded", "repeat"), (bool,)),
    **dict.fromkeys(("fsdp", "multiple"), (int,)),
    "stage": (str, type(None)),
    "segments": (int, list, tuple),
    "shape": (list, tuple, type(None)),
}


@dataclass(frozen=True, slots=True)
class Rule:
    """What becomes of parameters whose names match a pattern. Of several rules the first that matches counts.

    Args:
        pattern: A shell-style pattern for the whole name (``*`` is any run of characters, dots too). In it,
            ``{layer}`` stands for a layer's number, ``{expert}`` for an expert's, and ``{text}`` for the place
            of the language model: ``model.``, ``model.language_model.``, … or nothing.
        tp: The dimension that the tensor-parallel ranks share out (an expert's own: the ``etp`` ranks); with
            none, each of them holds all of it.
        ep: For experts. ``"name"``: the tensor is one expert's, whose number is in its name, and lives on the
            expert-parallel ranks that own it; ``{expert}`` in the pattern says so too. A number: the tensor
            stacks all experts along that dimension.
        units: How many indivisible units the `tp` dimension has: a number, or the key of the model's
            configuration that says it. Each rank gets as many as any other. Where there are more ranks than
            units, neighbours hold the same unit.
        padded: Dimension 0 counts the vocabulary, which storage may pad.
        stage: The pipeline stages that own it: ``"first"``, ``"last"``, ``"all"``, or ``"tied"``, the first and,
            where the model has no output head of its own, the last as well. Left out, that of its layer, or all
            if it has none.
        fsdp: The dimension that FSDP ranks share out.
        segments: What lies packed along the `tp` dimension, each part shared out by itself: how many equal ones
            (`units` then counts those of each), or their lengths, which are numbers or products of numbers and
            keys such as ``"num_key_value_heads * head_dim"``, whose first factors count the units.
        repeat: Whether neighbours may hold the same unit; else more ranks than units are refused.
        multiple: The `tp` dimension is padded so that each rank's share is a multiple of so many elements.
        shape: The rule is only for tensors of this shape: numbers, or keys or products of keys; None for any.
    """

    pattern: str
    tp: int | None = None
    ep: int | str | None = None
    units: int | str | None = None
    padded: bool = False
    stage: str | None = None
    fsdp: int = 0
    segments: int | tuple[int | str, ...] = ()
    repeat: bool = True
    multiple: int = 1
    shape: tuple[int | str | None, ...] | None = None

    def __post_init__(self) -> None:
        for key, kinds in KINDS.items():
            value = getattr(self, key)
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                self._refuse(key, " or ".join(kind.__name__ for kind in kinds))
            if key in ("units", "multiple") and isinstance(value, int) and value < 1:
                self._refuse(key, "1 or more")
        if "{expert}" in self.pattern and self.ep is None:
            object.__setattr__(self, "ep", "name")
        for key in ("segments", "shape"):
            if isinstance(getattr(self, key), list):
                object.__setattr__(self, key, tuple(getattr(self, key)))
        if self.stage is not None and self.stage not in STAGES:
            self._refuse("stage", f"one of {', '.join(STAGES)}")
        if isinstance(self.ep, str) and self.ep != "name":
            self._refuse("ep", "a dimension or 'name'")
        lengths = not isinstance(self.segments, int)
        if self.segments and (self.tp is None or (lengths and self.units is not None)):
            self._refuse("segments", "a tp dimension, and units only as their first factors")

    def __repr__(self) -> str:  # what is as ever is not said
        said = [
            (f.name, getattr(self, f.name)) for f in fields(self)[1:] if getattr(self, f.name) != f.default
        ]
        return f"Rule({self.pattern!r}{''.join(f', {key}={value!r}' for key, value in said)})"

    def _refuse(self, key: str, expected: str) -> None:
        raise CommandError(
            f"rule {shown(self.pattern)}: expected {expected} as {key}, got {shown(getattr(self, key))}"
        )


class Matched(NamedTuple):
    """A name's rule, and what the numbers in the name mean."""

    rule: Rule
    layer: int | None
    expert: int | None


class Matcher:
    """Finds the rule of a name. Names that differ only in their numbers are matched once.

    Args:
        rules: In order.
        config: Says what keys in shapes stand for.
        instead: What else to do about a name that no rule matches, for messages.
    """

    def __init__(self, rules: Iterable[Rule], config: Config, instead: str = "") -> None:
        self.rules = tuple(rules)
        self._compiled = [_compiled(rule.pattern) for rule in self.rules]
        words = {word for rule in self.rules for word in rule.pattern.split(".")}
        self._by_name = not all(map(_PLAIN_WORD.fullmatch, words))
        self._found: dict[tuple[str, tuple[int, ...]], tuple[Rule, int | None, int | None]] = {}
        self._config = config
        self._instead = instead

    def __call__(self, name: str, shape: Sequence[int]) -> Matched:
        """The first rule that matches.

        Raises:
            CommandError: If none does.
        """
        key = (name if self._by_name else _BETWEEN_DOTS.sub("0", name), tuple(shape))
        if key not in self._found:
            self._found[key] = self._find(name, shape)
        rule, layer, expert = self._found[key]
        if layer is None and expert is None:
            return Matched(rule, None, None)
        numbers = _NUMBER.findall(name)
        return Matched(
            rule,
            None if layer is None else int(numbers[layer]),
            None if expert is None else int(numbers[expert]),
        )

    def _find(self, name: str, shape: Sequence[int]) -> tuple[Rule, int | None, int | None]:
        """The rule, and which of the name's numbers are the layer's and the expert's."""
        for rule, pattern in zip(self.rules, self._compiled, strict=True):
            found = pattern.match(name)
            if found is None or not self._fits(rule, shape):
                continue
            layer = _position(name, found, "layer", _LAYER)
            expert = _position(name, found, "expert", _EXPERT) if rule.ep == "name" else None
            if rule.ep == "name" and expert is None:
                raise CommandError(f"{name} has no expert number, but its rule says ep='name'")
            return rule, layer, expert
        raise CommandError(
            f"no rule matches the parameter {name} of shape {tuple(shape)}; give a rule for it"
            + (self._instead or ', or end the rules with {"pattern": "*"} to replicate what the others leave')
        )

    def _fits(self, rule: Rule, shape: Sequence[int]) -> bool:
        if rule.shape is None:
            return True
        if len(rule.shape) != len(shape):
            return False
        try:
            wanted = [None if n is None else self._config.size(n) for n in rule.shape]
        except CommandError:  # a key that this configuration does not have
            return False
        return all(w in (None, n) for w, n in zip(wanted, shape, strict=True))


def _compiled(pattern: str) -> re.Pattern[str]:
    text = fnmatch.translate(pattern)
    for placeholder, number in _PLACEHOLDERS.items():
        text = text.replace(placeholder, number, 1)
    return re.compile(text)


def _position(name: str, found: re.Match[str], group: str, otherwise: re.Pattern[str]) -> int | None:
    """Which of the numbers in a name a pattern calls so; else the one that is usually meant."""
    if group in found.re.groupindex:
        start = found.start(group)
    else:
        usual = otherwise.search(name) if group == "expert" else otherwise.match(name)
        if usual is None:
            return None
        start = usual.start(1)
    return [number.start() for number in _NUMBER.finditer(name)].index(start)
