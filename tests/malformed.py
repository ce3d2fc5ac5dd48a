# SPDX-License-Identifier: Apache-2.0
"""Malformed calls: for each public callable a call in order, and for each of its arguments what must be refused.

What an argument is decides what is wrong for it, so a new callable costs one row. Values that only one argument
must refuse stand beside it.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

import nccl_m2n as m2n
from nccl_m2n import errors, interop, models, sharding, show, storage
from nccl_m2n.dtypes import dtype_name
from nccl_m2n.execution.memory import as_array
from nccl_m2n.execution.views import ArrayView, view_array
from nccl_m2n.refit import Parameter, Refit
from nccl_m2n.transport.rendezvous import Rendezvous

L, P, T, C = errors.LayoutError, errors.PlanError, errors.TransportError, errors.CommandError
NAN, INFINITE = float("nan"), float("inf")


@dataclass(frozen=True)
class Kind:
    """What an argument is, by what it is not."""

    wrong: tuple[Any, ...]

    def __or__(self, other: Kind) -> Kind:
        return Kind(self.wrong + other.wrong)

    def but(self, *fine: Any) -> Kind:
        """The same where some of the values are fine."""
        return Kind(tuple(value for value in self.wrong if not any(value is one for one in fine)))


def also(*wrong: Any) -> Kind:
    """Values that are wrong for one argument."""
    return Kind(wrong)


NO_NUMBER = also(None, "4", [1], NAN, object)
WHOLE = NO_NUMBER | also(1.5, True)
FROM_0 = WHOLE | also(-1)
COUNT = FROM_0 | also(0)
RANK = FROM_0 | also(2**63, 10**10)
RANKS = also(None, 5, "01", [0.5], [-1], [2**63], [0, 10**10], [True, False], ["a"], [None])
BYTES = COUNT | also(2**70)
SPEED = NO_NUMBER | also(-1, 0, INFINITE, True, 10**400)
SECONDS = also("1", [1], NAN, INFINITE, -1, True, 10**400)
LIMIT = SECONDS | also(None)
SHAPE = also(None, 5, "44", (4.7, 4), (4, -1), (True, 4), [None, 4], (2**70, 4), {4, 8})
FLAG = also(None, 1, 0, "yes", [])
TEXT = also(None, 5, b"w", "", ["w"])
DTYPE = also("wide", 5, object, [], "O")
MESH = also(None, [0, 1], 5, "01", object)
PLACEMENTS = also(None, 5, "S", m2n.Shard(0), [0], [None], ["S(0)"], [m2n.Shard], [m2n.Shard(9)], [])
LAYOUT = also(None, (4, 4), "x", m2n.Mesh([0]), m2n.Layout)
TOPOLOGY = also([[0, 1]], 4, "x", [], m2n.Topology)
MAPPING = also(None, 5, "x", [("w", 1)])
THING = also(None, 5, "x", object)  # not an object of the class that is asked for
ARRAYS = MAPPING | also({"v": np.zeros(4)}, {5: np.zeros(4)}, {"w": {99: np.zeros(4)}}, {"w": {0: [1, 2]}})


def layout(start: int = 0, shape: tuple[int, ...] = (4, 4)) -> m2n.Layout:
    """Rows of two ranks."""
    return m2n.Layout(shape, m2n.Mesh([start, start + 1]), [m2n.Shard(0)])


def transfer() -> m2n.Transfer:
    """Ranks 0 and 1 to ranks 2 and 3."""
    return m2n.Transfer(layout(), layout(2), "float32", "w")


def arrays(start: int) -> dict[str, Any]:
    """One side's arrays."""
    return {"w": {rank: np.zeros((2, 4), "float32") for rank in (start, start + 1)}}


def plan() -> m2n.Plan:
    """A plan of one transfer."""
    return m2n.plan(transfer())


def bound() -> Any:
    """That plan, bound."""
    return plan().bind(m2n.LocalTransport(4), sources=arrays(0), destinations=arrays(2))


def parameters(start: int, **changes: Any) -> dict[int, list[Parameter]]:
    """One side of a refit."""
    return {
        r: [Parameter("w", layout(start), np.zeros((2, 4), "float32"))] for r in (start, start + 1)
    } | changes


def refit(**changes: Any) -> Refit:
    """A refit of one parameter."""
    given: dict[str, Any] = {
        "transport": m2n.LocalTransport(4),
        "source": parameters(0),
        "destination": parameters(2),
    }
    return Refit(**(given | changes))


def run(**given: Any) -> None:
    """Run a refit to its end: a version is looked at there."""
    made = refit()
    made.run(**given)
    made.wait()


def manifest() -> models.Manifest:
    """Two tensors."""
    return models.Manifest({"w": ((4, 4), "float32"), "v": ((4,), "float32")}, "two")


RULE = sharding.Rule("*", tp=0)


@dataclass(frozen=True)
class Public:
    """A public callable, a call of it in order, and what each of its arguments must refuse."""

    name: str
    call: Callable[..., Any]
    error: type[errors.M2nError]
    good: Callable[[], dict[str, Any]]
    wrong: dict[str, Kind] = field(default_factory=dict)
    also: dict[str, type[errors.M2nError]] = field(
        default_factory=dict
    )  # errors of what describes an argument


def given(**values: Any) -> Callable[[], dict[str, Any]]:
    """Arguments that need not be made anew."""
    return lambda: dict(values)


def reshard(**changes: Any) -> None:
    """Move rows to rows."""
    values: dict[str, Any] = {
        "src": arrays(0)["w"],
        "dst": arrays(2)["w"],
        "comm": m2n.LocalTransport(4),
        "src_mesh": [0, 1],
        "src_placements": [m2n.Shard(0)],
        "dst_mesh": [2, 3],
        "dst_placements": [m2n.Shard(0)],
    }
    m2n.reshard(**(values | changes))


LAYOUTS = [
    Public(
        "Box",
        m2n.Box,
        L,
        given(start=(0, 0), stop=(4, 4)),
        {"start": SHAPE.but((4, -1)), "stop": SHAPE.but((4, -1))},
    ),
    Public(
        "Box.intersect",
        m2n.Box((0,), (4,)).intersect,
        L,
        given(other=m2n.Box((1,), (2,))),
        {"other": THING | also(m2n.Box((0, 0), (1, 1)))},
    ),
    Public(
        "Piece",
        m2n.Piece,
        L,
        given(box=m2n.Box((0,), (4,)), offset=(0,)),
        {"box": THING | also(((0,), (4,))), "offset": also(None, 0, "0", (0.5,), (0, 0))},
    ),
    Public("Segment", m2n.Segment, L, given(size=4, parts=2), {"size": FROM_0, "parts": COUNT.but(None)}),
    Public(
        "Shard",
        m2n.Shard,
        L,
        given(dim=0, segments=(4, 4)),
        {"dim": WHOLE, "segments": also(None, 4, "44", (4.5,), (None,), (-1,), (True,))},
    ),
    Public(
        "StridedShard",
        m2n.StridedShard,
        L,
        given(dim=0, split_factor=2),
        {"dim": WHOLE, "split_factor": COUNT},
    ),
    Public(
        "Mesh",
        m2n.Mesh,
        L,
        given(ranks=[0, 1], names=("tp",)),
        {
            "ranks": RANKS.but(5) | also([], [[0, 1], [2]], [0, 0], object, {0, 1}),
            "names": also("ab", 5, (5,), ("a", "b"), ("",), (None,)),
        },
    ),
    Public(
        "Mesh.arange",
        m2n.Mesh.arange,
        L,
        given(shape=(2, 2), start=4, names=("dp", "tp")),
        {"shape": SHAPE | also((0, 2), (10**6, 10**6)), "start": RANK, "names": also("abc", 5, ("a",))},
    ),
    Public("Mesh.coordinate", m2n.Mesh([0, 1]).coordinate, L, given(rank=1), {"rank": RANK | also(2)}),
    Public(
        "Layout",
        m2n.Layout,
        L,
        given(shape=(4, 4), mesh=m2n.Mesh([0, 1]), placements=[m2n.Shard(0)]),
        {"shape": SHAPE, "mesh": MESH, "placements": PLACEMENTS},
    ),
    Public(
        "Layout.from_pieces",
        m2n.Layout.from_pieces,
        L,
        given(shape=(4,), pieces={0: [m2n.Box((0,), (4,))]}, local_shapes={0: (4,)}),
        {
            "shape": SHAPE,
            "pieces": MAPPING | also({}, {"a": []}, {-1: []}, {0: 5}, {0: [5]}, {0: m2n.Box((0,), (4,))}),
            "local_shapes": also(5, "x", [(4,)], {0: 4}, {0: "4"}, {1: (4,)}, {0: (3,)}),
        },
    ),
    Public("Layout.local_shape", layout().local_shape, L, given(rank=0), {"rank": RANK | also(2)}),
    Public("Layout.pieces", layout().pieces, L, given(rank=0), {"rank": RANK}),
    Public(
        "Layout.slice_global",
        layout().slice_global,
        L,
        given(array=np.zeros((4, 4)), rank=0),
        {"array": also(None, 5, "x", [[0] * 4] * 4, np.zeros((2, 4))), "rank": RANK | also(2)},
    ),
    Public("dtype_name", dtype_name, L, given(dtype="bf16"), {"dtype": DTYPE | also(None)}),
    Public("as_mesh", interop.as_mesh, L, given(mesh=[0, 1]), {"mesh": RANKS.but(5) | also(object)}),
    Public(
        "layout_of",
        interop.layout_of,
        L,
        given(tensor=SimpleNamespace(shape=(4,), device_mesh=[0, 1], placements=[m2n.Shard(0)])),
        {"tensor": THING | also(np.zeros(4))},
    ),
    Public("svg_layout", show.svg_layout, L, given(layout=layout()), {"layout": LAYOUT}),
    Public(
        "svg_reshard",
        show.svg_reshard,
        L,
        given(source=layout(), destination=layout(2)),
        {"source": LAYOUT, "destination": LAYOUT},
    ),
    Public("text_layout", show.text_layout, L, given(layout=layout()), {"layout": LAYOUT}),
    Public("html_layout", show.html_layout, L, given(layout=layout()), {"layout": LAYOUT}),
    Public("html_plan", show.html_plan, P, lambda: {"plan": plan()}, {"plan": THING}),
]

PLANNING = [
    Public(
        "Transfer",
        m2n.Transfer,
        P,
        lambda: {
            "source": layout(),
            "destination": layout(2),
            "dtype": "float32",
            "name": "w",
            "destination_dtype": "float16",
        },
        {
            "source": LAYOUT,
            "destination": LAYOUT | also(layout(2, (4, 5))),
            "dtype": DTYPE | also(None, "int8"),
            "name": TEXT,
            "destination_dtype": DTYPE | also("int8"),
        },
        {"source": L, "destination": L, "dtype": L, "destination_dtype": L},
    ),
    Public("Transfer.renamed", transfer().renamed, P, given(name="v"), {"name": TEXT}),
    Public(
        "Topology",
        m2n.Topology,
        P,
        given(domains=[[0, 1], [2, 3]]),
        {
            "domains": also(
                None,
                5,
                "01",
                [0, 1],
                [],
                [[]],
                [["a"]],
                [[0.5]],
                [[-1]],
                [[2**63]],
                [[0, 10**10]],
                [[0], [0]],
                [None],
                ["01"],
                [[True]],
                {0: 1},
            )
        },
    ),
    Public(
        "Topology.regular",
        m2n.Topology.regular,
        P,
        given(ranks=8, per_domain=4),
        {"ranks": COUNT | also(10**12), "per_domain": COUNT},
    ),
    Public("Topology.single", m2n.Topology.single, P, given(ranks=[0, 1]), {"ranks": RANKS | also([])}),
    Public(
        "Topology.domain_of", m2n.Topology([[0, 1]]).domain_of, P, given(rank=1), {"rank": RANK | also(2)}
    ),
    Public(
        "Topology.require", m2n.Topology([[0, 1]]).require, P, given(ranks=[1]), {"ranks": RANKS | also([2])}
    ),
    Public(
        "plan",
        m2n.plan,
        P,
        lambda: {
            "transfers": [transfer()],
            "topology": m2n.Topology.regular(4, 2),
            "method": "reshard",
            "chunk_bytes": 64,
            "staging_bytes": 1 << 20,
        },
        {
            "transfers": also(None, 5, "x", [None], [layout()], layout(), [transfer(), transfer()]),
            "topology": TOPOLOGY | also(m2n.Topology([[0]])),
            "method": TEXT | also("fast"),
            "chunk_bytes": BYTES.but(None),
            "staging_bytes": BYTES,
        },
    ),
    Public("Plan.program", lambda **k: plan().program(**k), P, given(rank=0), {"rank": RANK}),
    Public(
        "Plan.from_json",
        m2n.Plan.from_json,
        P,
        lambda: {"text": plan().to_json()},
        {"text": also(None, 5, "", "x", "{}", "[]", "null", b"{}", '{"transfers": 5}')},
    ),
    Public(
        "Links",
        m2n.Links,
        P,
        given(nic_gbytes=50.0, nvlink_gbytes=450, round_seconds=0.0, pack_gbytes=1.0),
        {"nic_gbytes": SPEED, "nvlink_gbytes": SPEED, "round_seconds": SPEED.but(0), "pack_gbytes": SPEED},
    ),
    Public(
        "simulate",
        m2n.simulate,
        P,
        lambda: {"plan": plan(), "links": m2n.Links()},
        {"plan": THING | also(transfer()), "links": also(5, "x", 50.0, m2n.Links)},
    ),
]

VIEW = view_array(np.zeros((2, 4), "float32"))
RUNNING = [
    Public("LocalTransport", m2n.LocalTransport, T, given(ranks=2), {"ranks": COUNT | also(10**12)}),
    Public(
        "MpiTransport",
        m2n.MpiTransport,
        T,
        lambda: {"comm": _world()},
        {"comm": THING | also(SimpleNamespace(rank=0, size=1)), "timeout": LIMIT},
    ),
    Public("NcclTransport", m2n.NcclTransport, T, dict, {"communicator": THING.but(5) | also(0, -1, 1.5)}),
    Public(
        "as_transport",
        interop.as_transport,
        T,
        lambda: {"comm": m2n.LocalTransport(2)},
        {"comm": THING.but(5) | also(0, 1.5, SimpleNamespace(rank=0, size=2))},
    ),
    Public(
        "Rendezvous",
        Rendezvous,
        T,
        given(rank=0, size=1, address="127.0.0.1", port=29500),
        {
            "rank": RANK | also(1),
            "size": COUNT,
            "address": TEXT,
            "port": FROM_0 | also(65536),
            "timeout": LIMIT,
        },
    ),
    Public(
        "view_array",
        view_array,
        L,
        given(array=np.zeros(4)),
        {"array": THING | also([1, 2], np.array(["a"], object))},
    ),
    Public(
        "ArrayView",
        lambda **k: view_array(ArrayView(**k)),
        L,
        given(pointer=4096, shape=(4,), strides=(4,), dtype="float32"),
        {
            "pointer": FROM_0,
            "shape": SHAPE,
            "strides": also(None, 5, "4", (1.5,), (4, 4)),
            "dtype": DTYPE | also(None),
            "device": FLAG,
            "writable": FLAG,
        },
    ),
    Public("as_array", as_array, L, given(view=VIEW), {"view": THING | also(np.zeros(4))}),
    Public(
        "Plan.bind",
        lambda **k: plan().bind(**k),
        L,
        lambda: {"transport": m2n.LocalTransport(4), "sources": arrays(0), "destinations": arrays(2)},
        {"sources": ARRAYS, "destinations": ARRAYS},
    ),
    Public(
        "Plan.bind, transport",
        lambda **k: plan().bind(**k),
        T,
        lambda: {"transport": m2n.LocalTransport(4), "sources": arrays(0), "destinations": arrays(2)},
        {"transport": THING},
    ),
    Public("Bound.wait", lambda **k: bound().wait(**k), T, given(timeout=1.0), {"timeout": SECONDS}),
    Public(
        "reshard",
        reshard,
        L,
        dict,
        {
            "src": also(5, "x", [1], np.zeros((2, 4)), {99: np.zeros(4)}, {"a": np.zeros(4)}, {0: "x"}),
            "dst": also(
                5, "x", [1], np.zeros((2, 4)), {99: np.zeros(4)}, {2: "x"}, {2: np.zeros((3, 4), "float32")}
            ),
            "src_mesh": RANKS.but(5) | also(object),
            "dst_mesh": RANKS.but(5),
            "src_placements": PLACEMENTS,
            "dst_placements": PLACEMENTS,
            "src_local_shape": SHAPE.but(None),
            "dst_local_shape": SHAPE.but(None),
            "src_dtype": DTYPE,
            "dst_dtype": DTYPE,
            "global_shape": SHAPE.but(None),
        },
    ),
    Public("reshard, topology", reshard, P, dict, {"topology": TOPOLOGY}),
    Public("reshard, comm", reshard, T, dict, {"comm": THING.but(5)}),
]

DECLARATION = also(None, 5, "x", {0: 5}, {0: [5]}, {99: []}, {"a": []}, [Parameter("w", layout())], {0: None})
REFIT = [
    Public(
        "Parameter",
        Parameter,
        L,
        given(name="w", layout=layout(), array=np.zeros((2, 4), "float32"), dtype="float32"),
        {"name": TEXT, "layout": LAYOUT.but(None), "dtype": DTYPE},
    ),
    Public(
        "Parameter.view",
        lambda **k: Parameter("w", layout(), **k).view(),
        L,
        given(array=np.zeros((2, 4), "float32"), dtype="int32"),
        {"array": THING.but(None) | also([1]), "dtype": DTYPE | also("int8")},
    ),
    Public(
        "Refit",
        refit,
        L,
        dict,
        {
            "source": DECLARATION,
            "destination": DECLARATION,
            "cast": also(None, 1, 0, "yes"),
            "missing": TEXT | also("ignore"),
            "load": also(5, "x", {2: 5}, {99: print}, [print]),
            "whole": also(None, 5, "*", [5], [None], [""]),
        },
        {"missing": P},
    ),
    Public(
        "Refit, plan",
        refit,
        P,
        dict,
        {
            "topology": TOPOLOGY,
            "bucket_bytes": BYTES | also(-5),
            "staging_bytes": BYTES,
            "chunk_bytes": BYTES.but(None),
            "method": TEXT | also("x"),
        },
    ),
    Public("Refit, transport", refit, T, dict, {"transport": THING}),
    Public("Refit.capture", lambda **k: refit().capture(**k), L, dict, {"only": also(5, ["x"], [5])}),
    Public(
        "Refit.forget", lambda **k: refit().forget(**k), L, dict, {"ranks": also(5, "0", ["x"], [-1], [1.5])}
    ),
    Public(
        "Refit.rebind",
        lambda **k: refit().rebind(**k),
        L,
        lambda: {"source": parameters(0)},
        {"source": DECLARATION.but(None), "destination": DECLARATION.but(None)},
    ),
    Public(
        "Refit.prepare",
        lambda **k: refit().prepare(**k),
        L,
        given(only=["w"]),
        {"only": also(5, ["x"], [5], [None], "")},
    ),
    Public(
        "Refit.run",
        run,
        L,
        given(only=["w"], version=1),
        {"only": also(5, ["x"], [5]), "version": WHOLE.but(None)},
    ),
    Public("Refit.wait", lambda **k: refit().wait(**k), T, given(timeout=1.0), {"timeout": SECONDS}),
    Public(
        "Refit.verify", lambda **k: refit().verify(**k), L, given(only=["w"]), {"only": also(5, ["x"], [5])}
    ),
]

PARALLEL = sharding.Parallelism(tp=2)
SIZE = COUNT | also(2**40)
STORED = given(manifest=manifest(), parallelism=PARALLEL, rank=0, rules=[RULE],
               arrays={"w": np.zeros((2, 4), "float32"), "v": np.zeros(2, "float32")})  # fmt: skip
MEGATRON = given(
    manifest=models.Manifest({"model.layers.0.self_attn.o_proj.weight": ((4, 4), "float32")}),
    parallelism=PARALLEL,
    rank=0,
    rules=[sharding.Rule("*", tp=1)],
    arrays={"decoder.layers.0.self_attention.linear_proj.weight": np.zeros((4, 2), "float32")},
)
STORAGE = {
    "manifest": THING, "parallelism": THING, "rank": RANK | also(2), "start_rank": RANK, "arrays": MAPPING,
    "rules": also(5, "*", [5], [None], RULE), "skip": also(None, 5, "*", [5]), "whole_side": FLAG,
}  # fmt: skip
PATH = also(None, 5, b"x", "", ["x"], "/no/such/file")
CONFIG = also(None, 5, [], "/no/config.json")
MODELS = [
    Public("Manifest.load", models.Manifest.load, C, given(source="Llama-3.1-8B"), {"source": PATH}),
    Public("Manifest.from_file", models.Manifest.from_file, C, dict, {"path": PATH}),
    Public("Manifest.from_config", models.Manifest.from_config, C, dict, {"config": CONFIG}),
    Public(
        "Parallelism.experts", PARALLEL.experts, C, given(stage=0), {"stage": RANK | also(1), "start": RANK}
    ),
    Public(
        "Parallelism.require", PARALLEL.require, C, given(ranks=2, side="source"), {"ranks": COUNT | also(1)}
    ),
    Public(
        "TensorInfo",
        models.TensorInfo,
        L,
        given(shape=(4,), dtype="float32"),
        {"shape": SHAPE, "dtype": DTYPE | also(None)},
    ),
    Public(
        "Manifest",
        models.Manifest,
        L,
        given(tensors={"w": ((4,), "float32")}, label="m", config={}),
        {
            "tensors": also(
                None,
                5,
                "x",
                {5: ((4,), "float32")},
                {"w": 5},
                {"w": ((4,),)},
                {"w": ((4.5,), "float32")},
                {"w": ((4,), "wide")},
            ),
            "label": TEXT.but(""),
            "config": also(5, "x", []),
        },
    ),
    Public(
        "Manifest.select",
        lambda **k: manifest().select(**k),
        L,
        given(keep="w*"),
        {"keep": also(None, 5, ["w"])},
    ),
    Public(
        "Manifest.named",
        models.Manifest.named,
        C,
        given(name="Llama-3.1-8B"),
        {"name": TEXT | also("Llama-9")},
    ),
    Public(
        "Parallelism",
        sharding.Parallelism,
        C,
        given(tp=2, pp=1, ep=1, cp=1, fsdp=1, dp=1, order="megatron"),
        {
            "tp": SIZE,
            "pp": SIZE,
            "ep": SIZE,
            "cp": SIZE,
            "fsdp": SIZE,
            "dp": SIZE.but(None),
            "etp": SIZE.but(None),
            "order": TEXT | also("x"),
            "layers": also(5, "x", (4, -1), (1.5,), ("a",), ((1, "a"),)),
        },
    ),
    Public(
        "Parallelism.parse",
        sharding.Parallelism.parse,
        C,
        given(text="tp=2"),
        {"text": also(None, 5, "tp", "tp=x", "q=1", "tp=0", "tp=-1")},
    ),
    Public(
        "Parallelism.dense",
        PARALLEL.dense,
        C,
        given(stage=0, start=0),
        {"stage": RANK | also(1), "start": RANK},
    ),
    Public("Parallelism.stages", PARALLEL.stages, C, given(layers=2), {"layers": FROM_0 | also(10**10)}),
    Public(
        "Rule",
        sharding.Rule,
        C,
        given(pattern="*", tp=0, units=2, stage="all", fsdp=0),
        {
            "pattern": TEXT.but(""),
            "tp": WHOLE.but(None),
            "ep": also(1.5, True, [1]),
            "units": also(1.5, True, [1], 0, -1),
            "padded": FLAG,
            "stage": TEXT.but(None) | also("x"),
            "fsdp": WHOLE,
        },
    ),
    Public(
        "layouts",
        sharding.layouts,
        C,
        lambda: {"manifest": manifest(), "parallelism": PARALLEL, "rules": [RULE]},
        {
            "manifest": THING,
            "parallelism": THING,
            "rules": also(5, "*", [5], [None], RULE),
            "start_rank": RANK,
            "padded_vocab": COUNT.but(None),
            "expert_slots": also(5, "x", [-1], [1.5]),
        },
    ),
    Public(
        "load_rules",
        sharding.load_rules,
        C,
        given(source=[{"pattern": "*"}]),
        {"source": also(None, 5, [5], [{}], [{"pattern": 5}], [{"pattern": "*", "x": 1}], "/no/rules.json")},
    ),
    Public(
        "rules_for",
        sharding.rules_for,
        C,
        lambda: {"manifest": models.Manifest.named("Llama-3.1-8B")},
        {"manifest": THING},
    ),
    Public("fsdp", storage.fsdp, C, STORED, STORAGE),
    Public(
        "megatron",
        storage.megatron,
        C,
        MEGATRON,
        STORAGE | {"padded_vocab": COUNT.but(None), "layers": also(5, "x", [1.5]), "zero_padding": FLAG},
    ),
    Public(
        "vllm", storage.vllm, C, STORED, STORAGE | {"padded_vocab": COUNT.but(None), "zero_padding": FLAG}
    ),
    Public(
        "padded_rows",
        storage.padded_rows,
        C,
        given(vocab=100, multiple=64, ranks=2),
        {"vocab": COUNT, "multiple": COUNT, "ranks": COUNT},
    ),
    Public(
        "split_qkv",
        storage.split_qkv,
        C,
        given(array=np.zeros((8, 4)), groups=2, queries=2, head_dim=1),
        {"array": THING | also(np.zeros((7, 4)), [1]), "groups": COUNT, "queries": COUNT, "head_dim": COUNT},
    ),
]


def _world() -> Any:
    from mpi4py import MPI

    if not MPI.Is_initialized():  # another test looked at the library only
        MPI.Init()
        atexit.register(MPI.Finalize)
    return MPI.COMM_WORLD


TABLE = [*LAYOUTS, *PLANNING, *RUNNING, *REFIT, *MODELS]
NO_CALL_IN_ORDER = {"NcclTransport", "Manifest.from_file", "Manifest.from_config"}  # here

# Not tried here: what only planning itself makes or calls, what needs GPUs or several processes, and what
# `Transport` asks of transports.
_METHODS = ("join", "prepare", "exchange", "abort", "wait", "gather", "communicator", "connect", "from_mpi", "init_all",
            "from_environment")  # fmt: skip
_TRANSPORTS = ("LocalTransport", "MpiTransport", "NcclTransport", "SocketTransport")
_PLACEMENTS = ("Placement", "Replicate", "Shard", "StridedShard")
ELSEWHERE = {
    *(f"{transport}.{method}" for transport in _TRANSPORTS for method in _METHODS),
    *(
        f"{placement}.{method}"
        for placement in _PLACEMENTS
        for method in ("check", "ranges", "read", "from_dtensor")
    ),
    *(
        "Placement",
        "SocketTransport",
        "Layout.read",
        "Layout.locate",
        "Plan",
        "Plan.of",
        "Timeline",
        "Report",
        "Report.with_changes",
    ),
}
