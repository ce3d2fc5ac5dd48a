# SPDX-License-Identifier: Apache-2.0
"""Rounds: in how many chunks each flow moves, and in which round each chunk."""

from __future__ import annotations

import numpy as np

from nccl_m2n.layout.intervals import Ints, expand
from nccl_m2n.planning.routes import Routes
from nccl_m2n.planning.tapes import ALIGN

# Rounds for each network hop of the longest route. A pipeline of R rounds and h network hops takes
# (R + h - 1) / R of the time that the bytes need: 24 a hop leave 4 % at most, and launch little.
ROUNDS_PER_HOP = 24
MIN_ROUND_BYTES = 1 << 20  # for the busiest rank; with less a round's launches would show
# With a single hop nothing waits for the network but the first pack and the last unpack, and these are fast.
ROUNDS_SINGLE_HOP = 8
MIN_ROUND_BYTES_SINGLE_HOP = 128 << 20
# NCCL has hung on tens of thousands of calls in one group.
MAX_MESSAGES = 1024
CHUNKS_AT_ONCE = 1 << 18  # that loads are counted of; more would need much memory


def schedule(routes: Routes, world: int, chunk_bytes: int | None, staging_bytes: int) -> int:
    """Set `chunks` and `phase` of every flow; return the rounds in which first hops start.

    Args:
        routes: Flows and hops; the flows are changed.
        world: One more than the highest rank.
        chunk_bytes: Upper bound of a chunk, or None to choose.
        staging_bytes: What the busiest rank may use for staging, as far as 16-byte chunks allow.
    """
    flows, hops = routes.flows, routes.hops
    if not len(flows):
        return 0
    size = flows["stop"] - flows["start"]
    longest = int(size.max())
    sent, received, staged = _loads(routes, world)
    rounds = _wanted_rounds(hops, int(max(sent.max(), received.max())))
    chunk = -(-longest // (rounds * ALIGN)) * ALIGN if chunk_bytes is None else chunk_bytes
    most = 2 * int(staged.max())
    if most <= staging_bytes // 2:  # even a single round fits
        return _set_chunks(routes, world, size, chunk)
    chunk = min(chunk, longest * staging_bytes // most)
    while True:
        rounds = _set_chunks(routes, world, size, chunk)
        if chunk <= ALIGN or int(staging_by_rank(routes, world, rounds).max()) <= staging_bytes:
            return rounds
        chunk = chunk * 7 // 8


def _wanted_rounds(hops: np.ndarray, busiest: int) -> int:
    depth = int(hops["depth"].max())
    network_hops = 1 + int(hops["depth"][hops["network"]].max(initial=0))
    if not depth:
        return max(1, min(ROUNDS_SINGLE_HOP, busiest // MIN_ROUND_BYTES_SINGLE_HOP))
    return max(1, min(ROUNDS_PER_HOP * network_hops, busiest // MIN_ROUND_BYTES))


def _loads(routes: Routes, world: int) -> tuple[Ints, Ints, Ints]:
    """Bytes that each rank sends, receives, and passes through staging."""
    flows, hops = routes.flows, routes.hops
    size = flows["stop"] - flows["start"]
    sent, received, packed = np.zeros((3, world), np.int64)
    np.add.at(sent, hops["source"], size[hops["flow"]])
    np.add.at(received, hops["destination"], size[hops["flow"]])
    np.add.at(packed, flows["sender"], size)
    return sent, received, packed + received


def _set_chunks(routes: Routes, world: int, size: Ints, chunk: int) -> int:
    flows, hops = routes.flows, routes.hops
    flows["chunks"] = -(-size // max(chunk // ALIGN * ALIGN, ALIGN))  # cuts fall on multiples of ALIGN
    messages = np.zeros(world, np.int64)
    for end in ("source", "destination"):
        np.add.at(messages, hops[end], flows["chunks"][hops["flow"]])
    rounds = max(int(flows["chunks"].max()), -(-int(messages.max()) // MAX_MESSAGES))
    # Flows of few chunks start in different rounds: in each round a sender serves another receiver.
    first = hops["destination"][np.searchsorted(hops["flow"], np.arange(len(flows)))]
    order = np.lexsort((first, flows["sender"]))
    pair = np.stack([flows["sender"], first])[:, order]
    opens = np.flatnonzero(np.append(True, (pair[:, 1:] != pair[:, :-1]).any(axis=0)))
    nth = np.empty(len(flows), np.int64)
    nth[order] = expand(np.diff(np.append(opens, len(flows))))[1]
    flows["phase"] = (flows["sender"] + first + nth) % rounds
    return rounds


def chunk_table(flows: np.ndarray, rounds: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Every chunk of the given flows, flow by flow.

    Returns:
        Row in `flows`, first byte and end in the bundle's stream, and the round of the first hop.
    """
    row, j = expand(flows["chunks"])
    start, stop, n = flows["start"][row], flows["stop"][row], flows["chunks"][row]
    units = -(-(stop - start) // ALIGN)
    lo = start + units * j // n * ALIGN
    hi = np.minimum(start + units * (j + 1) // n * ALIGN, stop)
    return row, lo, hi, (j * rounds + flows["phase"][row]) // n


def chunks_in_round(flows: np.ndarray, rounds: int, number: Ints) -> tuple[Ints, Ints]:
    """The chunks whose first hop is in a given round; `chunk_table` from the other side.

    Args:
        flows: The flows; a flow has at most one chunk in a round.
        rounds: Rounds in which first hops start.
        number: The round asked for, one for each flow.

    Returns:
        Rows in `flows`, and the bytes of the chunk of each.
    """
    chunks, phase = flows["chunks"], flows["phase"]
    j = -(-(number * chunks - phase) // rounds)
    row = np.flatnonzero((j >= 0) & (j < chunks) & ((j * rounds + phase) // chunks == number))
    j, n, length = j[row], chunks[row], (flows["stop"] - flows["start"])[row]
    units = -(-length // ALIGN)
    return row, np.minimum(units * (j + 1) // n * ALIGN, length) - units * j // n * ALIGN


def staging_by_rank(routes: Routes, world: int, rounds: int) -> Ints:
    """Bytes of staging that each rank allocates at most; parts of its arrays may stand in for some."""
    hops = routes.hops
    if not len(hops):
        return np.zeros(world, np.int64)
    packing = hops["flow"][np.append(True, hops["flow"][1:] != hops["flow"][:-1])]  # each flow once
    depth = int(hops["depth"].max())
    packed = _fullest_round(routes.flows[packing], routes.flows["sender"][packing], 0, world, rounds)
    received = _fullest_round(
        routes.flows[hops["flow"]], hops["destination"], hops["depth"], world, rounds + depth
    )
    return 2 * (packed + received)


def _fullest_round(flows: np.ndarray, rank: Ints, late: Ints | int, world: int, rounds: int) -> Ints:
    """Bytes, by rank, of the fullest round when each flow passes its rank `late` rounds after its start."""
    late = np.broadcast_to(late, len(flows))
    steady = flows["chunks"] == rounds - late.max(initial=0)  # a chunk in every round
    units = -(-(flows["stop"] - flows["start"]) // ALIGN)
    base = np.zeros(world, np.int64)
    np.add.at(base, rank[steady], (-(-units // flows["chunks"]) * ALIGN)[steady])
    if steady.all():
        return base
    rest = np.flatnonzero(~steady)
    load = np.zeros(world * rounds)
    total = int(flows["chunks"][rest].sum())
    for part in np.array_split(rest, 1 + total // CHUNKS_AT_ONCE):
        row, lo, hi, at = chunk_table(flows[part], rounds - int(late.max(initial=0)))
        slot = rank[part][row] * rounds + at + late[part][row]
        load += np.bincount(slot, -(-(hi - lo) // ALIGN) * ALIGN, minlength=world * rounds)
    return base + load.reshape(world, rounds).max(axis=1).astype(np.int64)
