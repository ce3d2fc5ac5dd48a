# SPDX-License-Identifier: Apache-2.0
"""`bench`: tensors of growing size, a reshard beside its peers, in the columns of nccl-tests."""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from nccl_m2n.cli import transports
from nccl_m2n.cli.output import check_writable, plain_errors, publish
from nccl_m2n.cli.side import Side
from nccl_m2n.cli.sides import Sides
from nccl_m2n.errors import CommandError, VerificationError
from nccl_m2n.layout import Replicate, Shard
from nccl_m2n.measure import Volume, available, measure_case
from nccl_m2n.planning import Topology, Transfer, plan
from nccl_m2n.transport import KINDS, Transport
from nccl_m2n.transport.agree import together
from nccl_m2n.transport.meeting import Meeting
from nccl_m2n.typing import JsonObject

ITEM = 2  # bytes of an element
DTYPE = "uint16"
RANKS_ALONE = 8  # in one process without GPUs
COLUMNS = "# {:>12} {:>12} {:>7}  {:<25} {:>12} {:>8} {:>8} {:>7}"
HEAD = [
    COLUMNS.format("size", "count", "type", "method", "time", "algbw", "busbw", "#wrong"),
    COLUMNS.format("(B)", "(elements)", "", "", "(us)", "(GB/s)", "(GB/s)", ""),
]


@dataclass(frozen=True)
class Sweep(Sides[Side]):
    """One problem in several sizes; its sides are `Side`."""

    sizes: tuple[int, ...]  # bytes

    @classmethod
    def of(cls, arguments: argparse.Namespace, ranks: int) -> Sweep:
        """What the arguments ask for, where a side that does not say its ranks takes half of all.

        Raises:
            CommandError: If the arguments do not go together.
        """
        if arguments.begin > arguments.end:
            raise CommandError(
                f"expected a --begin of at most --end, got {arguments.begin} and {arguments.end}"
            )
        if arguments.factor < 2 and arguments.begin < arguments.end:
            raise CommandError(f"expected a --factor of 2 or more, got {arguments.factor}")
        source = (arguments.source or Side((), (Shard(0),))).over(ranks if arguments.overlap else ranks // 2)
        rest = ranks if arguments.overlap else ranks - source.size
        destination = (arguments.destination or Side((), (Replicate(),))).over(rest)
        if min(source.size, destination.size) < 1:
            raise CommandError(
                f"expected ranks for both sides, got {ranks} in all: start more processes, say the meshes of "
                "both sides, or let them share ranks with --overlap"
            )
        sizes, size = [], arguments.begin
        while size <= arguments.end:
            sizes.append(size)
            size *= max(2, arguments.factor)
        return cls(source, destination, 0 if arguments.overlap else source.size, tuple(sizes))

    def shape(self, nbytes: int) -> tuple[int, ...]:
        """A shape of about so many bytes, with two dimensions or as many as the placements take.

        All extents but the first are one power of two, the largest for which the first is no smaller.
        """
        ndim = max(2, self.source.ndim, self.destination.ndim)
        elements = max(1, nbytes // ITEM)
        inner = 1 << (elements.bit_length() - 1) // ndim
        return (elements // inner ** (ndim - 1), *[inner] * (ndim - 1))

    def transfers(self, nbytes: int) -> list[Transfer]:
        """The tensor of a size."""
        shape = self.shape(nbytes)
        sides = self.source.layout(shape, 0), self.destination.layout(shape, self.first)
        return [Transfer(*sides, dtype=DTYPE, name="t0")]

    def array_bytes(self, ranks: tuple[int, ...]) -> int:
        """What the arrays of some ranks take at most, in bytes."""
        (largest,) = self.transfers(self.sizes[-1])
        layouts = (largest.source, largest.destination)
        return sum(math.prod(a.local_shape(r)) * ITEM for r in ranks for a in layouts if r in a.ranks)


def bench(arguments: argparse.Namespace, meeting: Meeting) -> None:
    """Carry out the command. Collective.

    Raises:
        VerificationError: If any result was wrong.
    """

    def pose() -> Sweep:
        check_writable(arguments.json)
        alone = meeting.place.launcher == "none"
        found = transports.gpus()[0] if alone and arguments.transport in ("auto", "nccl") else 0
        sweep = Sweep.of(arguments, (found if found > 1 else RANKS_ALONE) if alone else meeting.size)
        for nbytes in sweep.sizes:
            sweep.transfers(nbytes)  # what cannot be divided is refused here
        return sweep

    sweep = together(meeting, "read what is to be measured", plain_errors(lambda _: pose()))[meeting.rank]
    kind = transports.choose(arguments.transport, meeting, sweep, None)
    with transports.make(kind, meeting, sweep, None) as transport:
        found = transports.domains_found(transport) if arguments.domain is None else []
        domain = sweep.domain_for(arguments.domain, transport.memory, found)

        def chosen(_: int) -> tuple[Topology, str, list[str]]:
            return *sweep.topology(domain, found), _methods(arguments.method, sweep, transport)

        topology, domains_from, methods = together(meeting, "choose the methods", chosen)[meeting.rank]
        if transport.memory == "host":
            # Once more for what the methods stage and the bare sends move.
            needed = 2 * sweep.array_bytes(transport.local_ranks)
            transports.require_memory(meeting, needed, "end at a smaller size (--end) or take more hosts")
        shown = meeting.rank == 0 and arguments.json != "-"
        head = _head(sweep, transport, kind, topology, domains_from)
        if shown:
            print("\n".join([*head, *HEAD]), flush=True)
        results = []
        for result in _measured(arguments, sweep, transport, topology, methods):
            results.append(result)
            if shown:
                print("\n".join(_lines(result)), flush=True)
    _finish(arguments, meeting, sweep, {"transport": kind, "memory": transport.memory,
            "domains": [list(ranks) for ranks in topology.domains], "domains_from": domains_from}, results)  # fmt: skip


def _methods(asked: list[str] | None, sweep: Sweep, transport: Transport) -> list[str]:
    possible = available(transport, sweep.transfers(sweep.sizes[0]))
    for method in asked or []:
        if method not in possible:
            raise CommandError(f"--method {method!r} cannot be measured here, only {', '.join(possible)}")
    return asked or possible


def _measured(
    arguments: argparse.Namespace, sweep: Sweep, transport: Transport, topology: Topology, methods: list[str]
) -> Iterator[JsonObject]:
    """The result of each size as JSON data; the same on every rank but for the staging. Collective."""
    for nbytes in sweep.sizes:
        transfers = sweep.transfers(nbytes)
        found = measure_case(
            transport,
            transfers,
            topology,
            methods,
            iterations=arguments.iterations,
            warmup=arguments.warmup,
            timeout=arguments.timeout,
            check=bool(arguments.check),
        )
        volume = Volume.of(plan(transfers, topology))
        for result in found.values():
            result["median_seconds"] = statistics.median(result["seconds"])
            rates = volume.bandwidths(result["median_seconds"])
            result["algbw_gbytes"], result["busbw_gbytes"] = (rate / 1e9 for rate in rates)
        yield {
            "bytes": volume.nbytes,
            "count": volume.nbytes // ITEM,
            "shape": sweep.shape(nbytes),
            "bus_bytes": volume.bus_bytes,
            "bus_tier": volume.tier,
            "methods": found,
        }


def _head(sweep: Sweep, transport: Transport, kind: str, topology: Topology, domains_from: str) -> list[str]:
    volume = Volume.of(plan(sweep.transfers(sweep.sizes[-1]), topology))
    return [
        f"# {sweep.way()}",
        f"# by {KINDS[kind].carrier}, {transport.memory} memory; {topology} ({domains_from})",
        "# time: median over the runs, the slowest rank's; GB = 1e9 bytes",
        "# algbw: bytes of the tensor / time; busbw: bytes that the busiest rank must send or receive / time "
        f"({volume.tier})",
    ]


def _lines(result: JsonObject) -> list[str]:
    """A line for each method."""
    return [
        COLUMNS.format(
            result["bytes"],
            result["count"],
            DTYPE,
            name,
            f"{method['median_seconds'] * 1e6:.1f}",
            f"{method['algbw_gbytes']:.2f}",
            f"{method['busbw_gbytes']:.2f}",
            "N/A" if method["wrong"] is None else method["wrong"],
        ).replace("#", " ", 1)
        for name, method in result["methods"].items()
    ]


def _finish(
    arguments: argparse.Namespace,
    meeting: Meeting,
    sweep: Sweep,
    carrier: JsonObject,
    results: list[JsonObject],
) -> None:
    """Write the JSON, and end with status 1 on every rank if anything was wrong."""
    wrong = sum(m["wrong"] or 0 for result in results for m in result["methods"].values())
    if meeting.rank == 0:
        data = {
            "source": str(sweep.source),
            "destination": str(sweep.destination),
            "overlap": sweep.first == 0,
            "ranks": sweep.ranks,
            "dtype": DTYPE,
            "iterations": arguments.iterations,
            "warmup": arguments.warmup,
            **carrier,
            "results": results,
        }
        publish(
            f"# wrong elements: {wrong if arguments.check else 'not checked'}", "bench", data, arguments.json
        )

    def check(_: int) -> None:
        if wrong:
            raise VerificationError(f"{wrong} elements were wrong")

    together(meeting, "check", check)
