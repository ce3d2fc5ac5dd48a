# SPDX-License-Identifier: Apache-2.0
"""Programs lowered to addresses and copy tables, run in host memory as the device would run them."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

import nccl_m2n as m2n
from nccl_m2n.dtypes import cast_number, item_size
from nccl_m2n.execution.lower import ArrayTable, Wire, arrange, lower
from nccl_m2n.execution.views import view_array
from tests.copies import numpy_dtype, run_copies


class Machine:
    """All ranks in this process; 'device' memory is NumPy's."""

    def __init__(self, plan, sources, destinations):
        transfers = plan.transfers
        wire = Wire(
            np.array([item_size(t.wire_dtype) for t in transfers]),
            np.array([cast_number(t.wire_dtype) for t in transfers]),
        )
        self.programs, self.lowered, self.placements, self.kept = {}, {}, {}, []
        for rank in sources.keys() | destinations.keys():
            program = plan.program(rank)
            sides = [
                self.arrays(transfers, held.get(rank, {}), kind)
                for held, kind in ((sources, "dtype"), (destinations, "destination_dtype"))
            ]
            arranged = arrange(program, *sides, wire)
            staging = [
                self.staging(2 * arranged.send_half_bytes),
                self.staging(2 * arranged.receive_half_bytes),
            ]
            self.programs[rank], self.placements[rank] = program, arranged
            self.lowered[rank] = lower(program, arranged, *sides, *staging)

    def arrays(self, transfers, held, kind):
        names = [getattr(t, kind) for t in transfers]
        views = {i: view_array(held[t.name]) for i, t in enumerate(transfers) if t.name in held}
        items, formats = [item_size(n) for n in names], [cast_number(n) for n in names]
        return ArrayTable.of(views, np.array(items), np.array(formats))

    def staging(self, size):
        self.kept.append(np.full(size + 16, 0xEE, np.uint8))
        return self.kept[-1].ctypes.data + -self.kept[-1].ctypes.data % 16

    def copies(self, index):
        for lowered in self.lowered.values():
            table = lowered.launches
            run_copies(table.copies[table.bounds[index] : table.bounds[index + 1]])

    def group(self, x):
        """One round: every send meets its receive, in order within a pair; data are read before any is written."""
        sent, taken = {}, {}
        for rank, program in self.programs.items():
            for message in program.messages[program.messages["round"] == x]:
                size, at = (
                    program.chunks["bytes"][message["chunk"]],
                    self.lowered[rank].address[message["chunk"]],
                )
                pair = (rank, int(message["peer"])) if message["send"] else (int(message["peer"]), rank)
                side = sent if message["send"] else taken
                side.setdefault(pair, []).append((int(at), int(size)))
        assert sent.keys() == taken.keys()
        data = {pair: [ctypes.string_at(*one) for one in blocks] for pair, blocks in sent.items()}
        for pair, blocks in taken.items():
            for bytes_, (at, size) in zip(data[pair], blocks, strict=True):
                assert len(bytes_) == size
                ctypes.memmove(at, bytes_, size)

    def run(self, packing_first):
        """Both orders that the device may take: copies beside a group before it or after it."""
        rounds = next(iter(self.programs.values())).rounds
        self.copies(0)
        for x in range(rounds):
            steps = [lambda x=x: self.group(x), lambda x=x: self.copies(x + 1)]
            for step in reversed(steps) if packing_first else steps:
                step()
        self.copies(rounds + 1)


def reshard(transfers, topology, *, layout=np.ascontiguousarray, **options):
    plan = m2n.plan(transfers, topology, **options)
    rng = np.random.default_rng(0)
    whole = {t.name: rng.normal(size=t.shape).astype(numpy_dtype(t.dtype)) for t in transfers}
    for packing_first in (False, True):
        sources, destinations = {}, {}
        for t in transfers:
            for rank in t.source.ranks:
                sources.setdefault(rank, {})[t.name] = layout(t.source.slice_global(whole[t.name], rank))
            for rank in t.destination.ranks:
                empty = np.zeros(t.destination.local_shape(rank), numpy_dtype(t.destination_dtype))
                destinations.setdefault(rank, {})[t.name] = layout(empty)
        machine = Machine(plan, sources, destinations)
        machine.run(packing_first)
        for t in transfers:
            for rank in t.destination.ranks:
                expected = t.destination.slice_global(whole[t.name], rank).astype(
                    numpy_dtype(t.destination_dtype)
                )
                np.testing.assert_array_equal(
                    destinations[rank][t.name].astype(np.float64), expected.astype(np.float64)
                )
    return machine


def meshes(sources, destinations, start=None):
    start = sources if start is None else start
    return m2n.Mesh.arange((sources,)), m2n.Mesh.arange((destinations,), start=start)


R, S = m2n.Replicate(), m2n.Shard
SCENARIOS = [
    ((64, 48), [S(0)], [R], 4, 4, 4, None),
    ((64, 48), [S(0)], [S(1)], 4, 4, 4, None),
    ((67, 51), [S(0)], [S(1)], 3, 5, 8, None),
    ((64, 48), [R], [S(0)], 4, 4, 2, None),
    ((64, 48), [S(1)], [R], 2, 6, 2, None),
    ((37, 29), [S(0)], [S(1)], 4, 4, 4, 2),
    ((12, 7, 5), [S(1)], [S(2)], 2, 3, 3, 0),
]


@pytest.mark.parametrize("dtype", ["float32", "int16", "uint8"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_lowered_programs_move_every_byte(scenario, dtype):
    shape, source, destination, m, n, per_domain, start = scenario
    a, b = meshes(m, n, start)
    transfer = m2n.Transfer(m2n.Layout(shape, a, source), m2n.Layout(shape, b, destination), dtype, "w")
    ranks = max(*a.ranks, *b.ranks) + 1
    topology = m2n.Topology.regular(ranks=ranks, per_domain=per_domain)
    reshard([transfer], topology)
    reshard([transfer], topology, chunk_bytes=256)


def test_strided_arrays_on_both_sides():
    a, b = meshes(3, 2)
    transfer = m2n.Transfer(m2n.Layout((33, 20), a, [S(0)]), m2n.Layout((33, 20), b, [S(1)]), "int32", "w")
    reshard([transfer], m2n.Topology.regular(5, 3), layout=np.asfortranarray)
    reshard(
        [transfer], m2n.Topology.regular(5, 3), chunk_bytes=128, layout=lambda x: np.repeat(x, 2, -1)[:, ::2]
    )


@pytest.mark.parametrize(
    ("first", "second"),
    [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "bfloat16"), ("float32", "float8_e4m3fn")],
)
def test_casts_on_the_way(first, second):
    a, b = meshes(2, 4, 1)
    transfer = m2n.Transfer(
        m2n.Layout((24, 16), a, [S(0)]), m2n.Layout((24, 16), b, [S(1)]), first, "w", destination_dtype=second
    )
    reshard([transfer], m2n.Topology.regular(5, 2), chunk_bytes=64)


def test_many_tensors_of_several_types():
    a, b = meshes(4, 4)
    transfers = [
        m2n.Transfer(
            m2n.Layout((n, 6), a, [S(0)]),
            m2n.Layout((n, 6), b, [R if n % 2 else S(1)]),
            dtype,
            f"w{n}{dtype}",
        )
        for n in range(3, 9)
        for dtype in ("int16", "float64", "uint8")
    ]
    reshard(transfers, m2n.Topology.regular(8, 4))


def test_contiguous_blocks_are_not_staged():
    """Rows of a row-major matrix go from array to array: nothing is packed, unpacked or staged."""
    a, b = meshes(4, 4)
    transfer = m2n.Transfer(m2n.Layout((64, 64), a, [S(0)]), m2n.Layout((64, 64), b, [R]), "float32", "w")
    machine = reshard([transfer], m2n.Topology.regular(8, 4))
    for rank, arranged in machine.placements.items():
        assert arranged.direct.all()
        assert arranged.send_half_bytes == arranged.receive_half_bytes == 0
        assert len(machine.lowered[rank].launches.copies) == 0
