# SPDX-License-Identifier: Apache-2.0
"""A plan over MPI against MPI's own way: Alltoallw with subarray types, for the same redistribution.

A (4096, 4096) float32 array goes from Shard(0) on ranks 0-3 to Shard(1) on ranks 4-7. Runs are interleaved
in one group of processes, so that all see the same machine, and every result is compared with the right
values.

    mpiexec -n 8 python bench/mpi_alltoallw.py [--repeats 40] [--extent 4096] [--json FILE]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from nccl_m2n import Layout, Mesh, Shard, Transfer, plan
from nccl_m2n.measure import write_results
from nccl_m2n.text import align_table
from nccl_m2n.transport.mpi import MpiTransport

SIDE = 4  # ranks of each side


class Redistribution:
    """The same move in three ways, each with buffers that are made beforehand."""

    def __init__(self, extent: int) -> None:
        self.comm = MPI.COMM_WORLD
        self.rank = self.comm.Get_rank()
        self.part = extent // SIDE
        shape = (extent, extent)
        source = Layout(shape, Mesh.arange((SIDE,)), [Shard(0)])
        destination = Layout(shape, Mesh.arange((SIDE,), SIDE), [Shard(1)])
        whole = np.arange(extent * extent, dtype=np.float32).reshape(shape)
        self.sends = self.rank < SIDE
        self.right = whole[:0] if self.sends else destination.slice_global(whole, self.rank)
        self.held = source.slice_global(whole, self.rank) if self.sends else np.zeros(1, np.float32)
        self.wanted = np.zeros(1 if self.sends else self.right.shape, np.float32)
        self.tiles = [np.zeros((self.part, self.part), np.float32) for _ in range(SIDE if self.sends else 0)]
        self.types = self._types(extent)
        self.transport = MpiTransport(self.comm)
        self.bound = plan(Transfer(source, destination, "float32", "w")).bind(
            self.transport, *([{"w": self.held}, {}] if self.sends else [{}, {"w": self.wanted}])
        )

    def _types(self, extent: int) -> list[MPI.Datatype]:
        """Where the tile of each peer lies in this rank's array."""
        made = []
        for peer in range(SIDE):
            across = (0, peer * self.part) if self.sends else (peer * self.part, 0)
            local = [self.part, extent] if self.sends else [extent, self.part]
            tile = MPI.FLOAT.Create_subarray(local, [self.part, self.part], across)
            made.append(tile.Commit())
        return made

    def alltoallw(self) -> None:
        here, nothing = list(self.types), [MPI.FLOAT] * SIDE
        ones, zeros = [1] * SIDE, [0] * SIDE
        send = [
            self.held,
            zeros + (ones if self.sends else zeros),
            [0] * 8,
            nothing + (here if self.sends else nothing),
        ]
        receive = [
            self.wanted,
            (zeros if self.sends else ones) + zeros,
            [0] * 8,
            (nothing if self.sends else here) + nothing,
        ]
        self.comm.Alltoallw(send, receive)

    def ours(self) -> None:
        self.bound.run()
        self.bound.wait()

    def bare(self) -> None:
        """What one would write by hand for just this case."""
        part = self.part
        if self.sends:
            requests = []
            for peer, tile in enumerate(self.tiles):
                np.copyto(tile, self.held[:, part * peer : part * (peer + 1)])
                requests.append(self.comm.Isend(tile, dest=SIDE + peer))
        else:
            rows = [self.wanted[part * peer : part * (peer + 1)] for peer in range(SIDE)]
            requests = [self.comm.Irecv(row, source=peer) for peer, row in enumerate(rows)]
        MPI.Request.Waitall(requests)

    def check(self) -> None:
        """Compare what has arrived, and clear it for the next way."""
        wrong = 0 if self.sends else int((self.wanted != self.right).sum())
        wrong = self.comm.allreduce(wrong)
        if wrong:
            raise SystemExit(f"{wrong} elements are wrong")
        self.wanted[...] = 0

    def close(self) -> None:
        self.bound.close()
        self.transport.close()
        for tile in self.types:
            tile.Free()


def measure(
    ways: dict[str, Callable[[], None]], repeats: int, check: Callable[[], None]
) -> dict[str, list[float]]:
    """Milliseconds of each way from one barrier to the next, interleaved."""
    samples: dict[str, list[float]] = {name: [] for name in ways}
    barrier = MPI.COMM_WORLD.Barrier
    for repeat in range(repeats + 3):
        for name, way in ways.items():
            barrier()
            start = time.perf_counter()
            way()
            barrier()
            took = 1e3 * (time.perf_counter() - start)
            check()
            if repeat >= 3:  # the first ones warm up
                samples[name].append(took)
    return samples


def table(samples: dict[str, list[float]], nbytes: int) -> str:
    lines = [["way", "median ms", "min ms", "GB/s", "median ratio to Alltoallw", "ratio of minima"]]
    base = samples["Alltoallw"]
    for name, times in samples.items():
        median = statistics.median(times)
        ratio = statistics.median([a / b for a, b in zip(times, base, strict=True)])
        numbers = [median, min(times), nbytes / median / 1e6]
        ratios = [ratio, min(times) / min(base)]
        lines.append([name, *(f"{x:.2f}" for x in numbers), *(f"{x:.3f}" for x in ratios)])
    return align_table(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=40, help="runs of each way, after three to warm up")
    parser.add_argument("--extent", type=int, default=4096, help="rows and columns, a multiple of 4")
    parser.add_argument("--json", metavar="FILE", help="write all samples, in milliseconds")
    arguments = parser.parse_args()
    if MPI.COMM_WORLD.Get_size() != 2 * SIDE:
        raise SystemExit(
            f"expected {2 * SIDE} processes: mpiexec -n {2 * SIDE} python bench/mpi_alltoallw.py"
        )
    job = Redistribution(arguments.extent)
    ways = {"Alltoallw": job.alltoallw, "nccl_m2n": job.ours, "pack, Isend, Irecv": job.bare}
    samples = measure(ways, arguments.repeats, job.check)
    if MPI.COMM_WORLD.Get_rank() == 0:
        print(table(samples, 4 * arguments.extent**2))
        write_results(arguments.json, "mpi_alltoallw", milliseconds=samples)
    job.close()


if __name__ == "__main__":
    main()
