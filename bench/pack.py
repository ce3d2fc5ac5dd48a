# SPDX-License-Identifier: Apache-2.0
"""Packing and unpacking alone, against a device-to-device copy of the same bytes in the same run.

usage: python bench/pack.py [--json FILE] [--samples 20]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from nccl_m2n.execution.descriptors import DIMENSIONS, Boxes, join, packed_boxes
from nccl_m2n.execution.kernels import CopyTables
from nccl_m2n.execution.lower import launches
from nccl_m2n.measure import write_results

ITEM = 2  # bytes of a bfloat16
BFLOAT16 = 4  # its number in formats.py


@dataclass(frozen=True)
class Case:
    """A matrix of bfloat16 whose boxes are packed one after the other."""

    name: str
    rows: int
    columns: int
    pitch: int  # elements from row to row
    first: int  # elements before the first
    box_rows: int
    box_columns: int


CASES = [
    Case("[16384, 8192] Shard(0) to Shard(1)", 16384, 8192, 8192, 0, 16384, 1024),
    Case("4,096 strided pieces of 64 KiB", 16384, 8192, 8192, 0, 32, 1024),
    Case("runs of 256 bytes", 16384, 8192, 8192, 0, 16384, 128),
    Case("runs aligned to 2 bytes only", 16384, 8190, 8193, 1, 16384, 1365),
    Case("one contiguous piece", 16384, 8192, 8192, 0, 16384, 8192),
]


def boxes(case: Case, address: int) -> Boxes:
    grid = np.mgrid[0 : case.rows : case.box_rows, 0 : case.columns : case.box_columns].reshape(2, -1)
    count = grid.shape[1]
    extent = np.ones((count, DIMENSIONS), np.int64)
    stride = np.zeros((count, DIMENSIONS), np.int64)
    extent[:, -2:] = case.box_rows, case.box_columns
    stride[:, -2:] = case.pitch * ITEM, ITEM
    start = address + (case.first + grid[0] * case.pitch + grid[1]) * ITEM
    return Boxes(start, extent, stride, np.full(count, ITEM), np.full(count, BFLOAT16))


def tables(
    case: Case, array: int, staging: int, *, unpack: bool, defines: tuple[str, ...] = ()
) -> CopyTables:
    """The launch that packs the boxes end to end into staging, or unpacks them from there."""
    there = boxes(case, array)
    wire = packed_boxes(there.extent, there.item, there.format)
    size = there.extent.prod(axis=1) * ITEM
    wire = Boxes(staging + np.cumsum(size) - size, wire.extent, wire.stride, wire.item, wire.format)
    copies = join(wire, there) if unpack else join(there, wire)
    return CopyTables(launches(copies, np.zeros(len(copies), np.int64), 1), 0, defines)


def seconds(work: Callable[[Any], None], samples: int, ahead: Callable[[Any], None]) -> list[float]:
    """Times of some device work. What goes ahead keeps the device busy until all of it is enqueued."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    taken = []
    for sample in range(samples + 3):
        ahead(stream)
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record(stream)
        work(stream)
        end.record(stream)
        end.synchronize()
        if sample >= 3:
            taken.append(cupy.cuda.get_elapsed_time(begin, end) / 1e3)
    return taken


def measure(case: Case, samples: int, defines: tuple[str, ...] = ()) -> dict[str, Any]:
    """Times of a case, and how many elements came out wrong."""
    import cupy

    total = case.rows * case.columns
    array = cupy.random.randint(0, 1 << 16, case.first + case.rows * case.pitch, dtype=np.uint16)
    staging, copy, other = (cupy.zeros(total, np.uint16) for _ in range(3))
    other[:] = array[:total]
    runtime = cupy.cuda.runtime

    def copy_all(stream: Any) -> None:
        runtime.memcpyAsync(
            copy.data.ptr, other.data.ptr, total * ITEM, runtime.memcpyDeviceToDevice, stream.ptr
        )

    copy_s = seconds(copy_all, samples, copy_all)
    pack = tables(case, array.data.ptr, staging.data.ptr, unpack=False, defines=defines).launches[0]
    pack_s = seconds(pack.start, samples, copy_all)
    matrix = array[case.first :].reshape(case.rows, case.pitch)[:, : case.columns].copy()
    parts = matrix.reshape(
        case.rows // case.box_rows, case.box_rows, case.columns // case.box_columns, case.box_columns
    )
    wrong = int((parts.transpose(0, 2, 1, 3).ravel() != staging).sum())
    expected, array[:] = matrix, 0
    unpack = tables(case, array.data.ptr, staging.data.ptr, unpack=True, defines=defines).launches[0]
    unpack_s = seconds(unpack.start, samples, copy_all)
    got = array[case.first :].reshape(case.rows, case.pitch)
    wrong += int((got[:, : case.columns] != expected).sum()) + int(got[:, case.columns :].any())
    return {
        "case": case.name, "bytes": total * ITEM, "wrong": wrong,
        "pack_seconds": pack_s, "unpack_seconds": unpack_s, "copy_seconds": copy_s,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json")
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--define", action="append", default=[], help="for trying the kernel's settings")
    args = parser.parse_args()
    results = [measure(case, args.samples, tuple(f"-D{one}" for one in args.define)) for case in CASES]
    print(f"{'case':40} {'MiB':>6} {'copy GB/s':>10} {'pack':>6} {'unpack':>6}  #wrong")
    for result in results:
        copy, pack, unpack = (
            statistics.median(result[f"{what}_seconds"]) for what in ("copy", "pack", "unpack")
        )
        rate = result["bytes"] / copy / 1e9
        print(
            f"{result['case']:40} {result['bytes'] >> 20:6} {rate:10.0f} {copy / pack:6.1%} {copy / unpack:6.1%}"
            f"  {result['wrong']}"
        )
    write_results(args.json, "pack", results=results)
    return 1 if any(result["wrong"] for result in results) else 0


if __name__ == "__main__":
    raise SystemExit(main())
