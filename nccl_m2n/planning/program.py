# SPDX-License-Identifier: Apache-2.0
"""Programs: what one rank does, round by round. Plain tables, no arrays and no addresses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nccl_m2n.layout.intervals import expand, lengths, offsets, opens, overlaps
from nccl_m2n.planning.bundles import Bundles, stream_cells
from nccl_m2n.planning.rank_cells import locate_cells
from nccl_m2n.planning.rounds import chunk_table
from nccl_m2n.planning.routes import Routes
from nccl_m2n.planning.tapes import ALIGN
from nccl_m2n.typing import Bools, Ints, Table

# One chunk of one flow as the rank sees it, by round.
CHUNK = np.dtype(
    [
        ("round", "i8"),  # in which it leaves (packed) or arrives (received)
        ("received", "?"),  # else packed out of this rank's source arrays
        ("flow", "i8"),
        ("chunk", "i8"),  # of the flow
        ("bytes", "i8"),
        ("offset", "i8"),  # bytes, in the side's staging half of parity round % 2
        ("first_span", "i8"),
        ("spans", "i8"),  # none: only passed on
    ],
    align=True,
)

# One point-to-point call, by round and then in the order that both ends agree on.
MESSAGE = np.dtype(
    [
        ("round", "i8"),
        ("peer", "i8"),
        ("send", "?"),
        ("chunk", "i8"),  # a send of a received chunk forwards what arrived the round before
    ],
    align=True,
)

# Some bytes of one cell in one chunk.
SPAN = np.dtype(
    [
        ("chunk", "i8"),
        ("cell", "i8"),  # in `source_cells` if the chunk is packed, else in `destination_cells`
        ("start", "i8"),  # bytes in the cell's own row-major stream, as on the wire
        ("stop", "i8"),
        ("offset", "i8"),  # bytes in the chunk
    ]
)

# A cell that the rank has and needs itself.
LOCAL = np.dtype([("source", "i8"), ("destination", "i8")])


@dataclass(frozen=True)
class Program:
    """What one rank does.

    In round x it sends and receives the messages of round x as one group. Before, the packed chunks
    of round x are filled; after, the received ones are emptied. Two halves of staging of each kind suffice,
    used by the parity of the round: a received chunk is passed on in the very next round.
    """

    rank: int
    rounds: int  # all rounds of the plan, those in which this rank does nothing included
    chunks: Table  # CHUNK
    messages: Table  # MESSAGE
    spans: Table  # SPAN
    source_cells: Table  # CELL
    destination_cells: Table  # CELL
    local: Table  # LOCAL
    send_half_bytes: int  # bytes of one half for packed chunks
    receive_half_bytes: int  # bytes of one half for received chunks

    @property
    def staging_bytes(self) -> int:
        """Bytes of staging, if no chunk can do without."""
        return 2 * (self.send_half_bytes + self.receive_half_bytes)


def make_program(bundles: Bundles, routes: Routes, rounds: int, depth: int, rank: int) -> Program:
    """Take what one rank does out of the routes; costs what the rank moves.

    Args:
        bundles: The plan's bundles.
        routes: The plan's flows and hops.
        rounds: Rounds in which first hops start.
        depth: Rounds after these until the last hop.
        rank: The rank.
    """
    chunks, messages, ranges = _chunks_and_messages(routes, rounds, rank)
    packed, received = ~chunks["received"], chunks["received"]
    mine = bundles.sets.table().containing(rank)
    wanted = mine[bundles.table["remote"][ranges.bundle]]
    sides = [
        _side(bundles, ranges, np.flatnonzero(packed), rank, "source"),
        _side(bundles, ranges, np.flatnonzero(received & wanted[ranges.index]), rank, "destination"),
    ]
    spans = np.concatenate([p for p, _ in sides])
    spans = spans[np.argsort(spans["chunk"], kind="stable")]
    chunks["spans"] = np.bincount(spans["chunk"], minlength=len(chunks))
    chunks["first_span"] = offsets(chunks["spans"])
    (source_cells, destination_cells), local = _local(bundles, mine, [c for _, c in sides], rank)
    send_half, receive_half = (_lay_out(chunks, np.flatnonzero(which)) for which in (packed, received))
    return Program(
        rank,
        rounds + depth if rounds else 0,
        chunks,
        messages,
        spans,
        source_cells,
        destination_cells,
        local,
        send_half,
        receive_half,
    )


@dataclass(frozen=True)
class _Ranges:
    """Which bytes of which bundle each chunk holds."""

    bundle: Ints  # distinct bundles
    index: Ints  # (chunks,) in `bundle`
    start: Ints  # (chunks,) bytes in the bundle's stream
    stop: Ints


def _chunks_and_messages(routes: Routes, rounds: int, rank: int) -> tuple[Table, Table, _Ranges]:
    hops = routes.hops[(routes.hops["source"] == rank) | (routes.hops["destination"] == rank)]
    sends = hops["source"] == rank
    # A chunk is born where a flow starts here or arrives here; all other hops pass such a chunk on.
    arrivals = hops[~sends]
    starts = np.unique(hops["flow"][sends & (hops["depth"] == 0)])
    flow = np.concatenate([starts, arrivals["flow"]])
    late = np.concatenate([np.zeros(len(starts), np.int64), arrivals["depth"]])
    row, lo, hi, at = chunk_table(routes.flows[flow], rounds)
    made = np.zeros(len(row), CHUNK)
    made["round"], made["received"], made["bytes"] = at + late[row], row >= len(starts), hi - lo
    made["flow"], made["chunk"] = flow[row], expand(routes.flows["chunks"][flow])[1]
    order = np.lexsort((flow[row], made["received"], made["round"]))
    number = np.empty(len(order), np.int64)
    number[order] = np.arange(len(order))
    bundle, index = np.unique(routes.flows["bundle"][flow][row[order]], return_inverse=True)
    ranges = _Ranges(bundle, index, lo[order], hi[order])

    first = offsets(routes.flows["chunks"][flow])
    started = dict(zip(starts.tolist(), first[: len(starts)].tolist(), strict=True))
    arrived = dict(zip(arrivals["flow"].tolist(), first[len(starts) :].tolist(), strict=True))
    origin = [
        (started if send and depth == 0 else arrived)[f]
        for f, send, depth in zip(hops["flow"].tolist(), sends.tolist(), hops["depth"].tolist(), strict=True)
    ]
    hop, _, _, at = chunk_table(routes.flows[hops["flow"]], rounds)
    nth = expand(routes.flows["chunks"][hops["flow"]])[1]
    messages = np.zeros(len(hop), MESSAGE)
    messages["round"], messages["send"] = at + hops["depth"][hop], sends[hop]
    messages["peer"] = np.where(sends, hops["destination"], hops["source"])[hop]
    messages["chunk"] = number[np.array(origin, np.int64)[hop] + nth]
    both_ends = np.lexsort((hops["destination"][hop], hops["flow"][hop], messages["round"]))
    return made[order], messages[both_ends], ranges


def _lay_out(chunks: Table, which: Ints) -> int:
    """Set offsets so that the chunks of a round lie end to end; return the bytes of the fullest round."""
    size = -(-chunks["bytes"][which] // ALIGN) * ALIGN
    if not len(which):
        return 0
    rounds = chunks["round"][which]
    first = np.flatnonzero(opens(rounds))
    before = offsets(size)
    chunks["offset"][which] = before - np.repeat(before[first], lengths(first, len(which)))
    return int(np.add.reduceat(size, first).max())


def _side(bundles: Bundles, ranges: _Ranges, which: Ints, rank: int, side: str) -> tuple[Table, Table]:
    """The spans of the chunks in `which`, and the cells that they are of."""
    used = np.unique(ranges.index[which])
    stream = stream_cells(bundles, ranges.bundle[used])
    length = bundles.table["bytes"][ranges.bundle[used]]
    base = np.zeros(len(ranges.bundle), np.int64)  # the used bundles laid end to end
    base[used] = offsets(length)
    at = base[np.searchsorted(ranges.bundle, stream.bundle)] + stream.start
    shift = base[ranges.index[which]]
    chunk, cell, lo, hi = overlaps(
        at, at + stream.size, ranges.start[which] + shift, ranges.stop[which] + shift
    )
    cells, times = locate_cells(bundles, stream, rank, side)
    row, k = expand(times[cell])
    first = offsets(times)
    spans = np.zeros(len(row), SPAN)
    spans["chunk"], spans["cell"] = which[chunk[row]], first[cell[row]] + k
    spans["start"], spans["stop"] = (lo - at[cell])[row], (hi - at[cell])[row]
    spans["offset"] = (lo - (ranges.start[which] + shift)[chunk])[row]
    return spans, cells


def _local(bundles: Bundles, mine: Bools, cells: list[Table], rank: int) -> tuple[list[Table], Table]:
    """Add the cells that the rank copies to itself."""
    both = np.flatnonzero(mine[bundles.table["holders"]] & mine[bundles.table["needers"]])
    if not len(both):
        return cells, np.zeros(0, LOCAL)
    stream = stream_cells(bundles, both)
    source, sources = locate_cells(bundles, stream, rank, "source")
    destination, times = locate_cells(bundles, stream, rank, "destination")
    row, k = expand(times)
    local = np.zeros(len(row), LOCAL)
    local["source"] = len(cells[0]) + offsets(sources)[row]
    local["destination"] = len(cells[1]) + offsets(times)[row] + k
    return [np.concatenate([cells[0], source]), np.concatenate([cells[1], destination])], local
