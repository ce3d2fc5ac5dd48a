# SPDX-License-Identifier: Apache-2.0
"""Programs: what one rank does, round by round. Plain tables, no arrays and no addresses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nccl_m2n.layout.intervals import Ints, expand, overlaps
from nccl_m2n.planning.bundles import Bundles, stream_cells
from nccl_m2n.planning.places import places_of
from nccl_m2n.planning.rounds import chunk_table
from nccl_m2n.planning.routes import Routes
from nccl_m2n.planning.tapes import ALIGN

# One chunk of one flow as the rank sees it, by round.
BLOCK = np.dtype(
    [
        ("round", "i8"),  # in which it leaves (packed) or arrives (received)
        ("received", "?"),  # else packed out of this rank's source arrays
        ("bytes", "i8"),
        ("offset", "i8"),  # bytes, in the side's staging slot of parity round % 2
        ("first_part", "i8"),
        ("parts", "i8"),  # none: only passed on
    ],
    align=True,
)

# One point-to-point call, by round and then in the order that both ends agree on.
MESSAGE = np.dtype(
    [
        ("round", "i8"),
        ("peer", "i8"),
        ("send", "?"),
        ("block", "i8"),  # a send of a received block forwards what arrived the round before
    ],
    align=True,
)

# Some bytes of one cell in one block.
PART = np.dtype(
    [
        ("block", "i8"),
        ("cell", "i8"),  # in `source_cells` if the block is packed, else in `destination_cells`
        ("start", "i8"),  # bytes in the cell's own row-major stream, as on the wire
        ("stop", "i8"),
        ("offset", "i8"),  # bytes in the block
    ]
)

# A cell that the rank has and needs itself.
LOCAL = np.dtype([("source", "i8"), ("destination", "i8")])


@dataclass(frozen=True)
class Program:
    """What one rank does.

    In round x it sends and receives the messages of round x as one group. Before, the packed blocks
    of round x are filled; after, the received ones are emptied. Two staging slots of each kind suffice,
    used by the parity of the round: a received block is passed on in the very next round.
    """

    rank: int
    rounds: int  # all rounds of the plan, those in which this rank does nothing included
    blocks: np.ndarray  # BLOCK
    messages: np.ndarray  # MESSAGE
    parts: np.ndarray  # PART
    source_cells: np.ndarray  # CELL
    destination_cells: np.ndarray  # CELL
    local: np.ndarray  # LOCAL
    send_slot_bytes: int  # bytes of one slot for packed blocks
    receive_slot_bytes: int  # bytes of one slot for received blocks

    @property
    def staging_bytes(self) -> int:
        """Bytes of staging, if no block can do without."""
        return 2 * (self.send_slot_bytes + self.receive_slot_bytes)


def make_program(bundles: Bundles, routes: Routes, rounds: int, depth: int, rank: int) -> Program:
    """Take one rank's part out of the routes; costs what the rank moves.

    Args:
        bundles: The plan's bundles.
        routes: The plan's flows and hops.
        rounds: Rounds in which first hops start.
        depth: Rounds after these until the last hop.
        rank: The rank.
    """
    blocks, messages, reach = _blocks_and_messages(routes, rounds, rank)
    packed, received = ~blocks["received"], blocks["received"]
    mine = bundles.sets.table().containing(rank)
    wanted = mine[bundles.table["remote"][reach.bundle]]
    sides = [
        _side(bundles, reach, np.flatnonzero(packed), rank, "source"),
        _side(bundles, reach, np.flatnonzero(received & wanted[reach.index]), rank, "destination"),
    ]
    parts = np.concatenate([p for p, _ in sides])
    parts = parts[np.argsort(parts["block"], kind="stable")]
    blocks["parts"] = np.bincount(parts["block"], minlength=len(blocks))
    blocks["first_part"] = np.cumsum(blocks["parts"]) - blocks["parts"]
    (source_cells, destination_cells), local = _local(bundles, mine, [c for _, c in sides], rank)
    send_slot, receive_slot = (_stack(blocks, np.flatnonzero(which)) for which in (packed, received))
    return Program(
        rank,
        rounds + depth if rounds else 0,
        blocks,
        messages,
        parts,
        source_cells,
        destination_cells,
        local,
        send_slot,
        receive_slot,
    )


@dataclass(frozen=True)
class _Reach:
    """Which bytes of which bundle each block holds."""

    bundle: Ints  # distinct bundles
    index: Ints  # (blocks,) in `bundle`
    start: Ints  # (blocks,) bytes in the bundle's stream
    stop: Ints


def _blocks_and_messages(routes: Routes, rounds: int, rank: int) -> tuple[np.ndarray, np.ndarray, _Reach]:
    hops = routes.hops[(routes.hops["source"] == rank) | (routes.hops["destination"] == rank)]
    sends = hops["source"] == rank
    # A block is born where a flow starts here or arrives here; all other hops pass such a block on.
    arrivals = hops[~sends]
    starts = np.unique(hops["flow"][sends & (hops["depth"] == 0)])
    flow = np.concatenate([starts, arrivals["flow"]])
    late = np.concatenate([np.zeros(len(starts), np.int64), arrivals["depth"]])
    row, lo, hi, at = chunk_table(routes.flows[flow], rounds)
    made = np.zeros(len(row), BLOCK)
    made["round"], made["received"], made["bytes"] = at + late[row], row >= len(starts), hi - lo
    order = np.lexsort((flow[row], made["received"], made["round"]))
    number = np.empty(len(order), np.int64)
    number[order] = np.arange(len(order))
    bundle, index = np.unique(routes.flows["bundle"][flow][row[order]], return_inverse=True)
    reach = _Reach(bundle, index, lo[order], hi[order])

    first = np.cumsum(routes.flows["chunks"][flow]) - routes.flows["chunks"][flow]
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
    messages["block"] = number[np.array(origin, np.int64)[hop] + nth]
    both_ends = np.lexsort((hops["destination"][hop], hops["flow"][hop], messages["round"]))
    return made[order], messages[both_ends], reach


def _stack(blocks: np.ndarray, which: Ints) -> int:
    """Set offsets so that the blocks of a round lie end to end; return the bytes of the fullest round."""
    size = -(-blocks["bytes"][which] // ALIGN) * ALIGN
    if not len(which):
        return 0
    rounds = blocks["round"][which]
    opens = np.flatnonzero(np.append(True, rounds[1:] != rounds[:-1]))
    before = np.cumsum(size) - size
    blocks["offset"][which] = before - np.repeat(before[opens], np.diff(np.append(opens, len(which))))
    return int(np.add.reduceat(size, opens).max())


def _side(
    bundles: Bundles, reach: _Reach, which: Ints, rank: int, side: str
) -> tuple[np.ndarray, np.ndarray]:
    """Parts of the blocks in `which`, and the cells that they are parts of."""
    used = np.unique(reach.index[which])
    stream = stream_cells(bundles, reach.bundle[used])
    length = bundles.table["bytes"][reach.bundle[used]]
    base = np.zeros(len(reach.bundle), np.int64)  # the used bundles laid end to end
    base[used] = np.cumsum(length) - length
    at = base[np.searchsorted(reach.bundle, stream.bundle)] + stream.start
    shift = base[reach.index[which]]
    block, cell, lo, hi = overlaps(
        at, at + stream.size, reach.start[which] + shift, reach.stop[which] + shift
    )
    cells, places = places_of(bundles, stream, rank, side)
    row, k = expand(places[cell])
    first = np.cumsum(places) - places
    parts = np.zeros(len(row), PART)
    parts["block"], parts["cell"] = which[block[row]], first[cell[row]] + k
    parts["start"], parts["stop"] = (lo - at[cell])[row], (hi - at[cell])[row]
    parts["offset"] = (lo - (reach.start[which] + shift)[block])[row]
    return parts, cells


def _local(
    bundles: Bundles, mine: np.ndarray, cells: list[np.ndarray], rank: int
) -> tuple[list[np.ndarray], np.ndarray]:
    """Add the cells that the rank copies to itself."""
    both = np.flatnonzero(mine[bundles.table["holders"]] & mine[bundles.table["needers"]])
    if not len(both):
        return cells, np.zeros(0, LOCAL)
    stream = stream_cells(bundles, both)
    source, sources = places_of(bundles, stream, rank, "source")
    destination, places = places_of(bundles, stream, rank, "destination")
    row, k = expand(places)
    local = np.zeros(len(row), LOCAL)
    local["source"] = len(cells[0]) + (np.cumsum(sources) - sources)[row]
    local["destination"] = len(cells[1]) + (np.cumsum(places) - places)[row] + k
    return [np.concatenate([cells[0], source]), np.concatenate([cells[1], destination])], local
