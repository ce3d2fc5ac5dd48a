# SPDX-License-Identifier: Apache-2.0
"""Rounds: in how many chunks each flow moves, and in which round each chunk."""

from __future__ import annotations

import math

import numpy as np

from nccl_m2n.errors import PlanError
from nccl_m2n.layout.intervals import expand, lengths, opens
from nccl_m2n.planning.routes import Routes
from nccl_m2n.planning.tapes import ALIGN
from nccl_m2n.typing import Ints, Table

# Chains of h crossings in R rounds take (R + h - 1) / R of the time that the bytes need: 24 each leave 4 % at most.
ROUNDS_PER_CROSSING = 24
# Where the network is crossed once, what the last round hands on within a domain is all that does not overlap.
# So many rounds keep it below this part of the whole, taking NVLink to be so much faster than a NIC. More would
# cost launches, and end as often with NICs idle until the slowest of a round's messages has come.
HANDED_ON_LATE = 0.025
NVLINK_PER_NIC = 9
MIN_ROUNDS = 12
MIN_ROUND_BYTES = 1 << 20  # for the busiest rank; with less a round's launches would show
# With a single hop nothing waits for the network but the first pack and the last unpack, and these are fast.
ROUNDS_SINGLE_HOP = 8
MIN_ROUND_BYTES_SINGLE_HOP = 128 << 20
# NCCL has hung on tens of thousands of calls in one group.
MAX_MESSAGES = 1024
MAX_ROUNDS = 1 << 22  # tables are kept by round
GOLDEN = 2654435769  # 2**32 times the golden ratio's fraction
CHUNKS_AT_ONCE = 1 << 18  # that loads are counted of; more would need much memory
MIN_CHUNK = 64 << 10  # bytes; flows are not spread thinner than this for the sake of balance
# Flows of at least this part of the busiest NIC's bytes take turns on it, if the fullest NICs of all rounds together
# then have no more than UNEVEN times what the busiest NIC has anyway.
BIG_FLOW = 1 / 8
UNEVEN = 1.08
# Where senders meet at a receiver all the same, rounds bring it no more than a switch's port may have to hold back.
PORT_BYTES = 4 << 20
MAX_GENTLE_ROUNDS = 64


def schedule(routes: Routes, world: int, chunk_bytes: int | None, staging_bytes: int) -> int:
    """Set `chunks` and `phase` of every flow; return the rounds in which first hops start.

    Args:
        routes: Flows and hops; the flows are changed.
        world: One more than the highest rank.
        chunk_bytes: Upper bound of a chunk, or None to choose.
        staging_bytes: What the busiest rank may use for staging, as far as 16-byte chunks allow.
    """
    if not len(routes.flows):
        return 0
    inside, crossing, staged = _loads(routes, world)
    longest = int((routes.flows["stop"] - routes.flows["start"]).max())
    rounds = (
        _wanted_rounds(routes.hops, inside, crossing) if chunk_bytes is None else -(-longest // chunk_bytes)
    )
    rounds = max(rounds, -(-2 * staged // staging_bytes))
    while True:
        chunk = -(-longest // (rounds * ALIGN)) * ALIGN
        made = _set_chunks(routes, chunk if chunk_bytes is None else min(chunk, chunk_bytes))
        if made > MAX_ROUNDS:
            raise PlanError(
                f"expected a plan of at most {MAX_ROUNDS} rounds, got {made} for {longest} bytes of one flow; give "
                "more staging_bytes, or larger chunks"
            )
        if chunk_bytes is None and made > 1 and not _take_turns(routes, world, crossing, made):
            gentle = min(crossing // PORT_BYTES, MAX_GENTLE_ROUNDS)
            if rounds < gentle and _senders_meet(routes, crossing):
                rounds = gentle
                continue
        made = _cap_groups(routes, world, made)
        # Where even a single round fits there is nothing to count.
        if 4 * staged <= staging_bytes or longest <= rounds * ALIGN:
            return made
        if int(staging_by_rank(routes, world, made).max()) <= staging_bytes:
            return made
        rounds = rounds * 8 // 7 + 1


def _wanted_rounds(hops: Table, inside: int, crossing: int) -> int:
    """Rounds that keep all links busy; `inside` and `crossing`: most bytes of a rank within domains and between."""
    busiest = max(inside, crossing)
    if not int(hops["depth"].max()):
        return max(1, min(ROUNDS_SINGLE_HOP, busiest // MIN_ROUND_BYTES_SINGLE_HOP))
    crossings = 1 + int(hops["depth"][hops["network"]].max(initial=0))
    if crossings > 1 or not crossing:
        wanted = ROUNDS_PER_CROSSING * crossings
    else:
        late = inside / NVLINK_PER_NIC / crossing
        wanted = min(ROUNDS_PER_CROSSING, max(MIN_ROUNDS, math.ceil(late / HANDED_ON_LATE)))
    return max(1, min(wanted, busiest // MIN_ROUND_BYTES))


def _loads(routes: Routes, world: int) -> tuple[int, int, int]:
    """Most bytes that a rank sends or receives within its domain, over the network, and passes through staging."""
    flows, hops = routes.flows, routes.hops
    size = (flows["stop"] - flows["start"])[hops["flow"]]
    loads = np.zeros((4, world), np.int64)
    for number, chosen in enumerate((~hops["network"], hops["network"])):
        amount = np.where(chosen, size, 0)
        np.add.at(loads[2 * number], hops["source"], amount)
        np.add.at(loads[2 * number + 1], hops["destination"], amount)
    staged = loads[1] + loads[3]
    np.add.at(staged, flows["sender"], flows["stop"] - flows["start"])
    return int(loads[:2].max()), int(loads[2:].max()), int(staged.max())


def _set_chunks(routes: Routes, chunk: int) -> int:
    """Cut flows in chunks of about `chunk` bytes; return the rounds that it takes."""
    flows = routes.flows
    size = flows["stop"] - flows["start"]
    largest = max(chunk // ALIGN * ALIGN, ALIGN)  # cuts fall on multiples of ALIGN
    most = -(-int(size.max()) // largest)
    # As many chunks as rounds, so that each round loads each NIC in proportion to its total; smaller flows less.
    flows["chunks"] = np.minimum(np.maximum(-(-size // largest), size // MIN_CHUNK), most)
    rounds = int(flows["chunks"].max())
    turns = _turns(flows["sender"], _first_hops(routes)["destination"])
    flows["phase"] = turns * flows["chunks"] % rounds
    return rounds


def _cap_groups(routes: Routes, world: int, rounds: int) -> int:
    """Spread chunks over more rounds until no rank has more messages in one than a group may hold; return the rounds.

    A flow has at most one chunk in a round, so a rank with few hops needs no counting.
    """
    hops, flows = routes.hops, routes.flows
    rank = np.concatenate([hops["source"], hops["destination"]])
    if int(np.bincount(rank).max()) <= MAX_MESSAGES:
        return rounds
    flow, depth = np.tile(hops["flow"], 2), np.tile(hops["depth"], 2)
    deepest, most = int(depth.max()), rounds + int(flows["chunks"].sum())
    one = np.ones(len(flow), np.int64)
    while rounds < most:  # by then no two chunks leave in one round
        largest = int(_fullest_round(flows[flow], one, rank, depth, world, rounds + deepest).max())
        if largest <= MAX_MESSAGES:
            break
        rounds = -(-rounds * largest // MAX_MESSAGES)
        # Turns may repeat among flows that share only a rank that they are handed on to. Multiples of the golden ratio
        # lie evenly for any flows that follow each other, few or many.
        flows["phase"] = (np.arange(len(flows)) * GOLDEN % 2**32) * rounds >> 32
    return rounds


def _first_hops(routes: Routes) -> Table:
    """One hop of each flow, with which it starts."""
    return routes.hops[np.searchsorted(routes.hops["flow"], np.arange(len(routes.flows)))]


def _turns(sender: Ints, receiver: Ints) -> Ints:
    """Numbers that tell flows of one sender apart, and flows of one receiver.

    Phases made of them let a sender serve one receiver after another, and a receiver hear one sender after another.
    """
    return _ordinal(sender, receiver) + _ordinal(receiver, sender)


def _senders_meet(routes: Routes, crossing: int) -> bool:
    """Whether a rank receives big flows of several senders over the network in one round."""
    big = routes.flows["stop"] - routes.flows["start"] > BIG_FLOW * crossing
    first = routes.hops[routes.hops["network"] & (routes.hops["depth"] == 0) & big[routes.hops["flow"]]]
    ends = np.unique(first["destination"] * (int(first["source"].max(initial=0)) + 1) + first["source"])
    return len(np.unique(first["destination"])) < len(ends)


def _take_turns(routes: Routes, world: int, crossing: int, rounds: int) -> bool:
    """Let the big flows of each NIC cross the network one after another, each filling the NIC for a round.

    Where several senders meet at one receiver in every round, queues overflow on lossy networks, and the messages are
    smaller and more. The turns are perfect where every sender of a set serves every receiver of another, as from
    one parallelism to another; where they leave NICs idle, nothing is changed and the answer is False.
    """
    flows, hops = routes.flows, routes.hops
    first = _first_hops(routes)
    size = flows["stop"] - flows["start"]
    # Flows that fill about a third of the busiest NIC get every third round, whatever their exact size.
    chunks = -(-rounds // np.maximum(crossing // size, 1))
    big = first["network"] & (size > BIG_FLOW * crossing) & (chunks < flows["chunks"])
    if not big.any():
        return False
    before = flows["chunks"].copy(), flows["phase"].copy()
    flows["chunks"][big] = chunks[big]
    turns = _turns(flows["sender"][big], first["destination"][big])
    flows["phase"][big] = turns * chunks[big] % rounds
    fill = 1 + int(hops["depth"][hops["network"]].max()) / rounds  # the rounds in which chains fill and drain
    if _fullest_rounds(routes, world, rounds) <= UNEVEN * fill * crossing:
        return True
    flows["chunks"], flows["phase"] = before
    return False


def _fullest_rounds(routes: Routes, world: int, rounds: int) -> int:
    """Bytes on the fullest NIC of each round, all rounds together."""
    hops = routes.hops[routes.hops["network"]]
    row, lo, hi, at = chunk_table(routes.flows[hops["flow"]], rounds)
    span = rounds + int(hops["depth"].max(initial=0))
    loads = [
        np.bincount(hops[end][row] * span + at + hops["depth"][row], hi - lo, minlength=world * span)
        for end in ("source", "destination")
    ]
    return int(np.maximum(*[load.reshape(world, span).max(axis=0) for load in loads]).sum())


def _ordinal(group: Ints, order: Ints) -> Ints:
    """The number of each row among those of its group, counted in `order`."""
    sort = np.lexsort((order, group))
    first = np.flatnonzero(opens(group[sort]))
    number = np.empty(len(group), np.int64)
    number[sort] = expand(lengths(first, len(group)))[1]
    return number


def chunk_table(flows: Table, rounds: int) -> tuple[Ints, Ints, Ints, Ints]:
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


def chunks_in_round(flows: Table, rounds: int, number: Ints) -> tuple[Ints, Ints]:
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
    packing = hops["flow"][opens(hops["flow"])]  # each flow once
    depth = int(hops["depth"].max())
    packed = _fullest_round(
        routes.flows[packing],
        _chunk_sizes(routes.flows[packing]),
        routes.flows["sender"][packing],
        0,
        world,
        rounds,
    )
    received = _fullest_round(
        routes.flows[hops["flow"]],
        _chunk_sizes(routes.flows)[hops["flow"]],
        hops["destination"],
        hops["depth"],
        world,
        rounds + depth,
    )
    return 2 * (packed + received)


def _chunk_sizes(flows: Table) -> Ints:
    """Bytes of the chunks of each flow, at most."""
    units = -(-(flows["stop"] - flows["start"]) // ALIGN)
    return np.asarray(-(-units // flows["chunks"]) * ALIGN)


def _fullest_round(flows: Table, weight: Ints, rank: Ints, late: Ints | int, world: int, rounds: int) -> Ints:
    """What chunks weigh, by rank, in the fullest round when each flow passes its rank `late` rounds after its start.

    Args:
        flows: The flows, one row each time that one passes a rank.
        weight: Of one chunk of each row.
        rank: The rank of each row.
        late: Rounds after the flow's start.
        world: One more than the highest rank.
        rounds: All rounds.
    """
    late = np.broadcast_to(late, len(flows))
    first_hops = rounds - int(late.max(initial=0))
    chunks = flows["chunks"]
    steady = chunks == first_hops  # a chunk in every round
    base = np.zeros(world, np.int64)
    np.add.at(base, rank[steady], weight[steady])
    if steady.all():
        return base
    rest = np.flatnonzero(~steady)
    load = np.zeros(world * rounds)
    for some in np.array_split(rest, 1 + int(chunks[rest].sum()) // CHUNKS_AT_ONCE):
        n = chunks[some]
        j, first = expand(n)[1], rank[some] * rounds + late[some]
        columns = (flows["phase"][some], n, first, weight[some])
        phase, divisor, first, size = (np.repeat(column, n) for column in columns)
        load += np.bincount(first + (j * first_hops + phase) // divisor, size, minlength=world * rounds)
    return np.asarray(base + load.reshape(world, rounds).max(axis=1).astype(np.int64))
