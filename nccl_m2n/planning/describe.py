# SPDX-License-Identifier: Apache-2.0
"""Layouts and plans as plain data: what digests are made of, and what JSON holds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from nccl_m2n.checks import plain_text
from nccl_m2n.errors import LayoutError, PlanError
from nccl_m2n.layout import Box, Layout, Mesh, Piece, Placement, Replicate, Segment, Shard, StridedShard
from nccl_m2n.layout.pieces import PieceLayout
from nccl_m2n.planning.options import PlanOptions
from nccl_m2n.planning.topology import Topology
from nccl_m2n.planning.transfer import Transfer
from nccl_m2n.typing import Json, JsonObject

PLAN_VERSION = 1  # part of every digest; raise it when equal problems would be planned otherwise


def layout_data(layout: Layout) -> dict[str, Any]:
    """A layout as JSON data; axis names are left out where there are none."""
    if isinstance(layout, PieceLayout):
        pieces = {r: [[p.box.start, p.box.stop, p.offset] for p in layout.pieces(r)] for r in layout.ranks}
        return {
            "shape": layout.shape,
            "pieces": pieces,
            "local": {r: layout.local_shape(r) for r in layout.ranks},
        }
    data = {
        "shape": layout.shape,
        "mesh": [layout.mesh.shape, layout.mesh.ranks],
        "placements": [_placement_data(p) for p in layout.placements],
    }
    return data | ({"names": layout.mesh.names} if layout.mesh.names else {})


def read_layout(data: Mapping[str, Any]) -> Layout:
    """The layout that `layout_data` described."""
    if "pieces" in data:
        pieces = {int(r): [Piece(Box(a, b), at) for a, b, at in held] for r, held in data["pieces"].items()}
        return Layout.from_pieces(data["shape"], pieces, {int(r): tuple(s) for r, s in data["local"].items()})
    shape, ranks = data["mesh"]
    mesh = Mesh(_nested(list(ranks), list(shape)), data.get("names"))
    return Layout(data["shape"], mesh, [_read_placement(p) for p in data["placements"]])


def _nested(flat: list[int], shape: list[int]) -> Any:
    if not shape:
        return flat[0]
    step = len(flat) // shape[0]
    return [_nested(flat[i * step : (i + 1) * step], shape[1:]) for i in range(shape[0])]


def _placement_data(placement: Placement) -> list[Any]:
    if isinstance(placement, Shard):
        return ["shard", placement.dim, [[s.size, s.parts] for s in placement.segments]]
    if isinstance(placement, StridedShard):
        return ["strided", placement.dim, placement.split_factor]
    return ["replicate"]


def _read_placement(data: list[Any]) -> Placement:
    if data[0] == "shard":
        return Shard(data[1], [Segment(*s) for s in data[2]])
    return StridedShard(*data[1:]) if data[0] == "strided" else Replicate()


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
    bare = [{k: v for k, v in layout_data(a).items() if k != "names"} for a in layouts]
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
        "layouts": [layout_data(a) for a in layouts],
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
        layouts = [read_layout(a) for a in data["layouts"]]
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
