# SPDX-License-Identifier: Apache-2.0
"""Problems as plain data: what digests are made of, and what JSON holds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, fields

from nccl_m2n.checks import plain_text
from nccl_m2n.errors import LayoutError, PlanError
from nccl_m2n.layout import Layout
from nccl_m2n.planning.options import PlanOptions
from nccl_m2n.planning.topology import Topology
from nccl_m2n.planning.transfer import Transfer
from nccl_m2n.typing import Json, JsonObject

PLAN_VERSION = 1  # part of every digest; raise it when equal problems would be planned otherwise


def _columns(transfers: Sequence[Transfer]) -> tuple[list[Layout], list[list[Json]]]:
    """Distinct layouts; and of all transfers the name, the numbers of their two layouts, the two element types."""
    numbers: dict[Layout, int] = {}
    near: dict[int, int] = {}  # by identity, which is quicker than by value

    def number(layout: Layout) -> int:
        found = near.get(id(layout))
        if found is None:
            found = near[id(layout)] = numbers.setdefault(layout, len(numbers))
        return found

    columns: list[list[Json]] = [
        [t.name for t in transfers],
        [number(t.source) for t in transfers],
        [number(t.destination) for t in transfers],
        [t.dtype for t in transfers],
        [t.destination_dtype for t in transfers],
    ]
    return list(numbers), columns


def problem_digest(transfers: Sequence[Transfer], topology: Topology, options: PlanOptions) -> str:
    """A digest of everything that a plan depends on, and of nothing else: names of mesh axes do not count."""
    layouts, columns = _columns(transfers)
    bare = [{k: v for k, v in a.data().items() if k != "names"} for a in layouts]
    facts = [PLAN_VERSION, topology.domains, asdict(options), bare, columns]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def plan_data(
    transfers: Sequence[Transfer], topology: Topology, options: PlanOptions, digest: str
) -> JsonObject:
    """A plan's problem, options and digest as JSON data."""
    layouts, columns = _columns(transfers)
    return {
        "format": "nccl_m2n plan",
        "digest": digest,
        "domains": topology.domains,
        "options": asdict(options),
        "layouts": [a.data() for a in layouts],
        "transfers": columns,
    }


def read_plan(text: str) -> tuple[list[Transfer], Topology, PlanOptions, str]:
    """What `plan_data` was given: transfers, topology, options, digest.

    Raises:
        PlanError: If the text is no such plan.
    """
    plain_text(text, "a plan's JSON", error=PlanError)
    try:
        data = json.loads(text)
        layouts = [Layout.read(a) for a in data["layouts"]]
        transfers = [
            Transfer(layouts[s], layouts[d], dtype, name, other)
            for name, s, d, dtype, other in zip(*data["transfers"], strict=True)
        ]
        options = PlanOptions(**{f.name: data["options"][f.name] for f in fields(PlanOptions)})
        return transfers, Topology(data["domains"]), options, plain_text(data["digest"], "a digest")
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        if isinstance(error, LayoutError | PlanError):
            raise
        raise PlanError(
            f"expected the JSON text of a plan, got {text[:60]!r}…; Plan.to_json writes it"
        ) from error
