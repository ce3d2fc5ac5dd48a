# SPDX-License-Identifier: Apache-2.0
"""One table of scenarios for every transport: who holds what before and after, and how it lies in memory.

No scenario has more than `RANKS` ranks. Values say where they belong: no two elements of a tensor are equal
as far as the element type can tell them apart, so a swapped dimension shows even where the shape is square.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from nccl_m2n import (
    Box,
    Layout,
    Mesh,
    Piece,
    Placement,
    Plan,
    Replicate,
    Segment,
    Shard,
    StridedShard,
    Topology,
    Transfer,
    plan,
)

RANKS = 8
UNTOUCHED = 0xA5  # every byte of memory that nobody wrote

# Storage of a local array: shape of the memory behind it, and the array as a view of that memory.
ORDERS: dict[str, tuple[Callable[[tuple[int, ...]], tuple[int, ...]], Callable[[Any], Any]]] = {
    "rows": (lambda shape: shape, lambda base: base),
    "columns": (lambda shape: shape[::-1], lambda base: base.T),
    "every second": (lambda shape: (*shape[:-1], 2 * shape[-1]), lambda base: base[..., ::2]),
    "permuted": (lambda shape: shape[-1:] + shape[:-1], lambda base: base.transpose(*range(1, base.ndim), 0)),
    "backwards": (lambda shape: shape, lambda base: base[(slice(None, None, -1),) * base.ndim]),
    "inside": (lambda shape: tuple(n + 3 for n in shape), lambda base: base[(slice(1, -2),) * base.ndim]),
}


def numpy_dtype(name: str) -> np.dtype:
    """NumPy's dtype of that name, or that of ml_dtypes."""
    return np.dtype(getattr(ml_dtypes, name, name))


@dataclass(frozen=True)
class Tensor:
    """One tensor of a scenario."""

    source: Layout
    destination: Layout
    dtype: str = "float32"
    destination_dtype: str | None = None
    source_order: str = "rows"
    destination_order: str = "rows"

    @lru_cache(maxsize=2)  # noqa: B019 - tensors are values, and the table keeps them anyway
    def values(self, turn: int) -> np.ndarray:
        """The global array, other values every turn."""
        array = self._values(turn)
        array.flags.writeable = False
        return array

    def _values(self, turn: int) -> np.ndarray:
        dtype, count = numpy_dtype(self.dtype), math.prod(self.source.shape)
        index = np.arange(turn + 1, turn + 1 + count, dtype=np.uint64)
        if self.destination_dtype is not None:  # small integers, which every float type has
            return (index % 15 - 7.0).astype(dtype).reshape(self.source.shape)
        if dtype.kind == "V" and self.dtype.startswith("V"):
            return np.frombuffer(np.random.default_rng(turn).bytes(count * dtype.itemsize), dtype).reshape(
                self.source.shape
            )
        if dtype == np.bool_:
            return ((index * 2654435761 >> 7) % 2 == 1).reshape(self.source.shape)
        unit = np.dtype(f"u{min(dtype.itemsize & -dtype.itemsize, 8)}")
        numbers = np.zeros((count, dtype.itemsize // unit.itemsize), unit)
        numbers[:, 0] = index.astype(unit)
        numbers[:, 1:] = ~numbers[:, :1]
        return numbers.view(dtype).reshape(self.source.shape)


@dataclass(frozen=True)
class Scenario:
    """Some tensors that move at once."""

    name: str
    tensors: tuple[Tensor, ...]
    per_domain: int = 4

    def plan(self, **options: Any) -> Plan:
        """The plan of all tensors."""
        return plan(self.transfers(), Topology.regular(RANKS, self.per_domain), **options)

    def transfers(self) -> list[Transfer]:
        """The tensors as transfers, called ``t0``, ``t1``, …"""
        return [
            Transfer(t.source, t.destination, t.dtype, f"t{i}", t.destination_dtype)
            for i, t in enumerate(self.tensors)
        ]

    def __str__(self) -> str:
        return self.name


class Storage:
    """One local array and the memory behind it."""

    def __init__(
        self, shape: tuple[int, ...], dtype: str, order: str, empty: Callable[..., Any] = np.empty
    ) -> None:
        base_shape, self.view = ORDERS[order if shape else "rows"]
        self.base = empty(base_shape(shape), numpy_dtype(dtype))
        self.array = self.view(self.base)
        assert self.array.shape == shape

    def clear(self) -> None:
        """Forget everything."""
        self.base.reshape(-1).view(np.uint8)[...] = UNTOUCHED


class SideOfRank:
    """The local arrays of one rank on one side of a scenario, by name."""

    def __init__(
        self, scenario: Scenario, rank: int, side: str, empty: Callable[..., Any] = np.empty
    ) -> None:
        self.rank, self.side = rank, side
        self.tensors: dict[str, Tensor] = {}
        self.storage: dict[str, Storage] = {}
        for i, tensor in enumerate(scenario.tensors):
            layout = tensor.source if side == "source" else tensor.destination
            if rank in layout.ranks:
                given = side == "destination" and tensor.destination_dtype is not None
                dtype = tensor.destination_dtype if given else tensor.dtype
                order = tensor.source_order if side == "source" else tensor.destination_order
                self.tensors[f"t{i}"] = tensor
                self.storage[f"t{i}"] = Storage(layout.local_shape(rank), dtype, order, empty)

    @property
    def arrays(self) -> dict[str, Any]:
        """What is bound."""
        return {name: storage.array for name, storage in self.storage.items()}

    def upload(self) -> None:
        """Bring what was written here to where it is moved from: nothing, on a host."""

    def download(self) -> None:
        """Bring what was moved here: nothing, on a host."""

    def fill(self, turn: int) -> None:
        """Source: the values of that turn. Destination: nothing yet."""
        for name, storage in self.storage.items():
            storage.clear()
            if self.side == "source":
                tensor = self.tensors[name]
                values = tensor.values(turn)
                for piece in tensor.source.pieces(self.rank):
                    storage.array[piece.local_slices] = values[piece.box.slices]

    def wrong(self, turn: int) -> list[str]:
        """Names of the destination arrays that are not what they should be, to the last byte around them."""
        found = []
        for name, storage in self.storage.items():
            tensor = self.tensors[name]
            dtype = storage.base.dtype
            values = tensor.values(turn).astype(dtype)
            memory = np.empty_like(storage.base)
            memory.reshape(-1).view(np.uint8)[...] = UNTOUCHED
            expected = storage.view(memory)
            for piece in tensor.destination.pieces(self.rank):
                expected[piece.local_slices] = values[piece.box.slices]
            if storage.base.tobytes() != memory.tobytes():
                found.append(f"{name} on rank {self.rank}")
        return found


def run(
    scenario: Scenario,
    transport: Any,
    turns: int = 2,
    side_of_rank: Callable[..., SideOfRank] = SideOfRank,
    captured_from: int | None = None,
    **options: Any,
) -> list[str]:
    """Carry a scenario out `turns` times; names of the arrays that went wrong on this process's ranks.

    Memory is what `side_of_rank` makes; from turn `captured_from` on, a captured graph is replayed.
    """
    ranks = transport.local_ranks
    sides = {side: {r: side_of_rank(scenario, r, side) for r in ranks} for side in ("source", "destination")}

    def given(side: str) -> dict[str, Any]:
        if len(ranks) == 1:
            return sides[side][ranks[0]].arrays
        names = [f"t{i}" for i in range(len(scenario.tensors))]
        return {n: {r: sides[side][r].arrays[n] for r in ranks if n in sides[side][r].arrays} for n in names}

    wrong = []
    with scenario.plan(**options).bind(transport, given("source"), given("destination")) as bound:
        for turn in range(turns):
            for side in ("source", "destination"):
                for rank in ranks:
                    sides[side][rank].fill(turn)
            if turn == captured_from:
                bound.capture()
            bound.run()
            bound.wait(timeout=60)
            wrong += [f"{what} in turn {turn}" for r in ranks for what in sides["destination"][r].wrong(turn)]
    return wrong


# The table.

R, S0, S1 = Replicate(), Shard(0), Shard(1)


def layout(shape: tuple[int, ...], start: int, *axes: tuple[int, Placement]) -> Layout:
    """A layout on neighbouring ranks, with each mesh axis given as (size, placement)."""
    sizes, placements = zip(*axes, strict=True)
    return Layout(shape, Mesh.arange(sizes, start), placements)


def _one(name: str, source: Layout, destination: Layout, dtype: str = "float32", **more: Any) -> Scenario:
    per_domain = more.pop("per_domain", 4)
    return Scenario(name, (Tensor(source, destination, dtype, **more),), per_domain)


def _functional_matrix() -> Iterator[Scenario]:
    """The functional tests of NVIDIA's library, from their description."""
    for n, dtype in ((1, "uint8"), (2, "float16"), (4, "float32")):
        for shape in ((576, 576), (8192,)):
            last = len(shape) - 1
            yield _one(
                f"replicated {shape}, {n} B", layout(shape, 0, (4, R)), layout(shape, 4, (4, R)), dtype
            )
            yield _one(
                f"sharded {shape}, {n} B",
                layout(shape, 0, (4, S0)),
                layout(shape, 4, (4, Shard(last))),
                dtype,
            )
    for a, b in itertools.product((0, 1), repeat=2):
        for shape in ((576, 576), (64, 128, 128), (128, 64, 64)):
            one, two = (4, Shard(a)), (4, Shard(b))
            yield _one(f"({a}, {b}) {shape}", layout(shape, 0, one), layout(shape, 4, two))
    kinds = {"sr": lambda n, d: [(n, Shard(d)), (4 // n, R)], "rs": lambda n, d: [(4 // n, R), (n, Shard(d))]}
    for (p, one), (q, two) in itertools.product(kinds.items(), repeat=2):
        for n, m in itertools.product((2, 4), repeat=2):
            shape = (576, 576)
            yield _one(
                f"{p}{n} to {q}{m}", layout(shape, 0, *one(n, 0)), layout(shape, 4, *two(m, 1)), "float16"
            )
    for p, q in itertools.product(kinds, repeat=2):
        wide = [(2, Shard(0)), (4, R)] if p == "sr" else [(2, R), (4, Shard(0))]
        tall = [(4, Shard(1)), (2, R)] if q == "sr" else [(4, R), (2, Shard(1))]
        yield _one(f"{p} to {q} on the same 8", layout((576, 576), 0, *wide), layout((576, 576), 0, *tall))
    for a, b in ((6, 2), (3, 1), (2, 6), (1, 3)):
        for c, d in ((S0, S0), (S0, S1), (S0, R), (R, S1)):
            one, two = layout((576, 576), 0, (a, c)), layout((576, 576), a, (b, d))
            yield _one(f"{a}:{b} {c} to {d}", one, two, "uint8")
    large = (3072, 6144)
    yield _one("large (0, 1)", layout(large, 0, (4, S0)), layout(large, 4, (4, S1)), "uint8")
    yield _one("large (0, 0), 2 B", layout(large, 0, (4, S0)), layout(large, 4, (2, S0)), "float16")
    yield _one("large (1, 0), 4 B", layout(large, 0, (4, S1)), layout(large, 4, (4, S0)))
    yield _one("4,194,304 in a row", layout((4194304,), 0, (4, S0)), layout((4194304,), 4, (3, S0)), "uint8")
    yield _one("destination first", layout((576, 576), 4, (4, S0)), layout((576, 576), 0, (4, S1)))
    yield _one(
        "4 bytes over 8 ranks", layout((4,), 0, (8, S0)), layout((4,), 0, (8, R)), "uint8", per_domain=1
    )
    yield _one("one element to 7 ranks", layout((1,), 7, (1, S0)), layout((1,), 0, (7, R)), per_domain=2)


def _field_cases() -> Iterator[Scenario]:
    """Shardings that went wrong in the field."""
    rows = (
        ("10 over 4 to 3", 10, 4, 3),
        ("5 over 4 to 4", 5, 4, 4),
        ("7 over 3 to 5", 7, 3, 5),
        ("10 over 3 to 4", 10, 3, 4),
        ("2 over 5 to 3", 2, 5, 3),
        ("1 over 4 to 4", 1, 4, 4),
        ("0 over 2 to 3", 0, 2, 3),
    )
    for name, n, a, b in rows:
        yield _one(name, layout((n, 3), 0, (a, S0)), layout((n, 3), a, (b, S0)), per_domain=3)
    nested = [(2, S0), (2, S0)]
    strided = [(2, StridedShard(0, split_factor=2)), (2, S0)]
    for n in (5, 8):
        yield _one(
            f"FSDP over TP, {n} rows, to nested", layout((n, 3), 0, *strided), layout((n, 3), 4, *nested)
        )
        yield _one(
            f"nested to strided in place, {n} rows", layout((n,), 2, *nested), layout((n,), 2, *strided)
        )
    yield _one("4096 over 7", layout((4096, 2), 0, (7, S0)), layout((4096, 2), 0, (8, S0)), "int16")
    gate = 2 * 11008
    for a, b in ((4, 2), (4, 1), (2, 4), (8, 1)):
        one, two = (Shard(0, segments=(gate // 2, gate // 2)),) * 2
        start = 4 if a < 8 else 3
        yield _one(
            f"gate and up over {a} to {b}",
            layout((gate, 3), 0, (a, one)),
            layout((gate, 3), start, (b, two)),
            "int16",
        )
    packed = Shard(0, segments=(2048, 2048, 512, 512, 32))
    yield _one(
        "unequal segments", layout((5152, 5), 0, (2, packed)), layout((5152, 5), 2, (2, S0)), "bfloat16"
    )
    yield _one(
        "unequal segments back", layout((5152, 5), 6, (2, S0)), layout((5152, 5), 1, (4, packed)), "uint8"
    )
    kv = Segment(8, parts=2)
    heads = Shard(0, segments=(64 * 4, kv, kv))
    yield _one("2 KV heads at TP8", layout((272, 6), 1, (2, S0)), layout((272, 6), 0, (8, heads)), "bfloat16")
    yield _one(
        "2 KV heads from TP8", layout((272, 6), 0, (8, heads)), layout((272, 6), 2, (3, S1)), "bfloat16"
    )
    experts = (8, 16, 6)
    yield _one(
        "experts and FSDP", layout(experts, 0, (2, S0), (4, S1)), layout(experts, 0, (4, S0), (2, Shard(2)))
    )
    yield _one("fewer experts than ranks", layout((12, 5), 0, (2, S0), (4, S0)), layout((12, 5), 3, (5, S0)))
    many = (2, 3, 2, 3, 2, 1, 2, 3)
    yield _one(
        "rank 8", layout(many, 0, (2, Shard(7)), (2, S1)), layout(many, 3, (3, Shard(3)), (1, R)), "uint8"
    )
    yield _one(
        "mesh of 4 axes", layout((6, 7), 0, (1, R), (2, S1), (2, S0), (2, R)), layout((6, 7), 1, (3, S1))
    )
    yield _one("scalar", layout((), 1, (2, R)), layout((), 0, (7, R)), per_domain=2)
    yield _one("extent 0", layout((3, 0, 2), 0, (2, S0)), layout((3, 0, 2), 1, (3, S1)))
    any_order = Layout((9, 4), Mesh([[6, 0], [3, 1]]), [S0, S1])
    yield _one(
        "ranks in any order", any_order, Layout((9, 4), Mesh([7, 3, 2, 6]), [S1]), "int16", per_domain=2
    )
    square = layout((6, 6), 0, (2, S0), (2, S1))
    yield _one("equal layouts", square, square)
    yield _one("equal meshes", square, layout((6, 6), 0, (2, S1), (2, S0)))
    yield _one("overlapping meshes", layout((8, 8), 0, (4, S0)), layout((8, 8), 2, (4, S1)))
    yield _one("replicas to shards in place", layout((8, 9), 0, (8, R)), layout((8, 9), 0, (2, S1), (4, S0)))
    yield _one("chain of hosts", layout((999,), 0, (1, R)), layout((999,), 0, (8, R)), "int16", per_domain=1)
    yield _one("chain of pairs", layout((4096, 64), 0, (2, S0)), layout((4096, 64), 2, (6, R)), per_domain=2)


def _user_made() -> Iterator[Scenario]:
    """Pieces of the user's own."""
    halves = {0: [Box((0, 0), (3, 8))], 1: [Box((3, 0), (8, 8))]}
    yield _one("two boxes", Layout.from_pieces((8, 8), halves), layout((8, 8), 2, (4, S1)))
    several = {r: [Box((r, 0), (r + 1, 8)), Box((7 - r, 0), (8 - r, 8))] for r in range(4)}
    yield _one(
        "rows from both ends", Layout.from_pieces((8, 8), several), layout((8, 8), 3, (2, S0)), "int16"
    )
    yield _one("rows to both ends", layout((8, 8), 3, (2, S0)), Layout.from_pieces((8, 8), several), "int16")
    owners = {r: [Box((0, 0), (8, 8))] for r in (5, 1, 2)}
    yield _one(
        "several declared owners", Layout.from_pieces((8, 8), owners), layout((8, 8), 4, (4, S1)), "uint8"
    )
    overlapping = {0: [Box((0, 0), (5, 8))], 1: [Box((3, 0), (8, 8))]}
    yield _one("owners that overlap", Layout.from_pieces((8, 8), overlapping), layout((8, 8), 1, (3, S0)))
    twice = {4: [Box((0, 2), (8, 3)), Box((0, 2), (8, 3))], 0: [Box((2, 0), (4, 8))], 7: []}
    yield _one("a box twice on one rank", layout((8, 8), 0, (3, S0)), Layout.from_pieces((8, 8), twice))
    apart = {r: [Piece(Box((4 * r, 0), (4 * r + 4, 8)), (2, 1))] for r in (0, 1)}
    shapes = dict.fromkeys((0, 1), (7, 10))
    yield _one("room around pieces", layout((8, 8), 1, (4, S1)), Layout.from_pieces((8, 8), apart, shapes))
    yield _one("room around sources", Layout.from_pieces((8, 8), apart, shapes), layout((8, 8), 1, (4, S1)))


def _element_types() -> Iterator[Scenario]:
    for dtype in (
        "bool",
        "int16",
        "uint16",
        "complex64",
        "complex128",
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
    ):
        yield _one(dtype, layout((13, 7), 0, (3, S0)), layout((13, 7), 3, (2, R), (2, S1)), dtype)
    for dtype, rows in (("V3", 200_003), ("V12", 50_021)):  # long enough for flows that end within an element
        one, two = layout((rows, 3), 0, (3, S0)), layout((rows, 3), 3, (5, R))
        yield _one(dtype, one, two, dtype, per_domain=8)
    one, two = layout((9, 15), 0, (3, S0)), layout((9, 15), 2, (2, R), (3, S1))
    for a, b in (("float32", "bfloat16"), ("bfloat16", "float32"), ("float64", "float16"), ("bfloat16", "float16"),
                 ("float32", "float8_e4m3fn"), ("float8_e5m2", "bfloat16")):  # fmt: skip
        yield _one(f"{a} to {b}", one, two, a, destination_dtype=b)


def _storage_orders() -> Iterator[Scenario]:
    """Square, so that a swapped dimension shows in the values only."""
    for a, b in itertools.product(ORDERS, repeat=2):
        if (a, b) != ("rows", "rows"):
            one, two = layout((12, 12), 0, (4, S0)), layout((12, 12), 3, (2, S1), (2, S0))
            yield _one(f"{a} to {b}", one, two, "int16", source_order=a, destination_order=b)
    for order in ORDERS:
        three = layout((6, 5, 4), 0, (3, Shard(2))), layout((6, 5, 4), 2, (3, S0), (2, Shard(2)))
        yield _one(
            f"three dimensions, {order}", *three, "bfloat16", source_order=order, destination_order=order
        )
        cast = {"destination_dtype": "bfloat16", "source_order": order, "destination_order": "columns"}
        yield _one(f"cast, {order}", layout((6, 6), 0, (2, S0)), layout((6, 6), 1, (3, S1)), **cast)


def _batches() -> Iterator[Scenario]:
    """Several tensors at once."""
    odd = layout((13,), 0, (2, S0)), layout((13,), 2, (3, R))
    yield Scenario(
        "odd bytes before bfloat16",
        tuple(
            Tensor(*odd, dtype) for dtype in ("uint8", "bfloat16", "uint8", "complex64", "bool", "float32")
        ),
        per_domain=2,
    )
    rng = np.random.default_rng(3)
    kinds = (R, S0, S1)
    tensors = []
    for i in range(40):
        shape = tuple(rng.integers(1, 40, 2).tolist())
        one = layout(shape, int(rng.integers(0, 4)), (2, kinds[i % 3]), (2, kinds[i // 3 % 3]))
        two = layout(shape, int(rng.integers(0, 3)), (5, kinds[i // 9 % 3]))
        tensors.append(Tensor(one, two, ("uint8", "bfloat16", "float32", "complex64")[i % 4]))
    yield Scenario("40 tensors of all kinds", tuple(tensors), per_domain=3)
    layer = layout((64, 48), 0, (2, S0), (2, R)), layout((64, 48), 4, (2, R), (2, S1))
    yield Scenario("100 equal layers", tuple(Tensor(*layer, "bfloat16") for _ in range(100)))
    yield Scenario("nothing at all", ())


SCENARIOS = [
    *_functional_matrix(),
    *_field_cases(),
    *_user_made(),
    *_element_types(),
    *_storage_orders(),
    *_batches(),
]
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
assert len(BY_NAME) == len(SCENARIOS), "two scenarios of one name"
