# SPDX-License-Identifier: Apache-2.0
"""Rules out of files and lists."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from nccl_m2n.checks import several, shown
from nccl_m2n.errors import CommandError
from nccl_m2n.models.reading import read_json
from nccl_m2n.sharding.families import RULES
from nccl_m2n.sharding.rules import KINDS, Rule


def load_rules(source: str | Path | Iterable[Rule | Mapping[str, object]]) -> tuple[Rule, ...]:
    """Rules from a JSON file or from a list of rules or mappings.

    The JSON is a list of objects such as ``{"pattern": "*.q_proj.weight", "tp": 0}``. An entry
    ``{"shipped": "llama"}`` stands for all shipped rules of that family.

    Raises:
        CommandError: For a file that cannot be read, or an entry that is no rule.
    """
    if isinstance(source, str | Path):
        read = read_json(Path(source), "the rules")
        if not isinstance(read, list):
            raise CommandError("rules are a JSON list of objects, each with a pattern")
        source = read
    rules: list[Rule] = []
    for entry in several(source, "rules", error=CommandError):
        if isinstance(entry, Rule):
            rules.append(entry)
        elif isinstance(entry, Mapping) and set(entry) == {"shipped"} and str(entry["shipped"]) in RULES:
            rules.extend(RULES[str(entry["shipped"])])
        else:
            rules.append(_rule(entry))
    return tuple(rules)


def _rule(entry: object) -> Rule:
    if not isinstance(entry, Mapping) or "pattern" not in entry or not entry.keys() <= KINDS.keys():
        raise CommandError(
            f"expected a rule, with a pattern and any of {', '.join(sorted(KINDS))}, got {shown(entry)}"
        )
    return Rule(**entry)
