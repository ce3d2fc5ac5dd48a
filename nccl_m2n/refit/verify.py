# SPDX-License-Identifier: Apache-2.0
"""Verification: do the destination's bytes equal the source's? Told by checksums, without moving tensors again."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from nccl_m2n.execution.bits import bits, checksum
from nccl_m2n.execution.given import SIDES
from nccl_m2n.execution.views import ArrayView
from nccl_m2n.layout.shape import MAX_NDIM
from nccl_m2n.planning import Plan
from nccl_m2n.planning.rank_cells import CellsOfRank, cells_of_rank
from nccl_m2n.refit.broadcast import Views
from nccl_m2n.transport.agree import together
from nccl_m2n.transport.base import Transport
from nccl_m2n.typing import Ints, Table

SUM = np.dtype([("transfer", "i8"), ("cell", "i8"), ("sum", "u8")])


def differing(
    transport: Transport, plan: Plan, arrays: tuple[Views, Views], names: Collection[str]
) -> list[str]:
    """Names of the tensors whose destination differs from the source at any rank. Collective.

    Args:
        transport: Joins the ranks.
        plan: What was moved.
        arrays: Source and destination arrays.
        names: The tensors to look at.

    Returns:
        The same list on every rank, in the plan's order.
    """

    def sums_of(rank: int) -> tuple[Table, Table]:
        held, needed = (
            _sums(plan, rank, side, own[rank], names) for side, own in zip(SIDES, arrays, strict=True)
        )
        return held, needed

    sums = together(transport, "refit: verify", sums_of)
    said = transport.exchange(
        {rank: own.tobytes() for rank, (own, _) in sums.items()}, "refit: the checksums"
    )
    held = np.concatenate([np.frombuffer(text, SUM) for text in said])
    held = held[np.lexsort((held["cell"], held["transfer"]))]
    wrong = {rank: _wrong(held, own).astype(np.int64).tobytes() for rank, (_, own) in sums.items()}
    said = transport.exchange(wrong, "refit: what differs")
    numbers = np.unique(np.concatenate([np.frombuffer(text, np.int64) for text in said]))
    return [plan.transfers[i].name for i in numbers.tolist()]


def _wrong(held: Table, needed: Table) -> Ints:
    """Numbers of the transfers whose needed cells do not have the holders' sums."""
    keys = [table["transfer"] * (1 << 32) + table["cell"] for table in (held, needed)]
    if not len(held):
        return np.unique(needed["transfer"])
    at = np.minimum(np.searchsorted(keys[0], keys[1]), len(held) - 1)
    differs = (keys[0][at] != keys[1]) | (held["sum"][at] != needed["sum"])
    return np.unique(needed["transfer"][differs])


def _sums(plan: Plan, rank: int, side: str, arrays: Mapping[str, ArrayView], names: Collection[str]) -> Table:
    cells = cells_of_rank(plan.bundles, rank, side, first_holder_only=side == "source")
    sums = np.zeros(len(cells.transfer), SUM)
    sums["transfer"], sums["cell"] = cells.transfer, cells.cell
    order = np.argsort(cells.transfer, kind="stable")
    numbers, first = np.unique(cells.transfer[order], return_index=True)
    wanted = np.zeros(len(plan.transfers), bool)
    for number, rows in zip(numbers.tolist(), np.split(order, first)[1:], strict=True):
        name = plan.transfers[number].name
        wanted[number] = name in names
        if wanted[number]:
            _sum_tensor(plan, number, side, rank, arrays[name], cells, rows, sums)
    return np.asarray(sums[wanted[sums["transfer"]]])


def _sum_tensor(
    plan: Plan,
    number: int,
    side: str,
    rank: int,
    view: ArrayView,
    cells: CellsOfRank,
    rows: Ints,
    sums: Table,
) -> None:
    transfer = plan.transfers[number]
    layout = transfer.source if side == "source" else transfer.destination
    # As the destination has them: what was cast on the way is cast here as well.
    types = (transfer.wire_dtype, transfer.destination_dtype)
    whole = bits(view, layout.local_shape(rank), types if side == "source" else types[1:])
    own = slice(MAX_NDIM - layout.ndim, None)  # the dimensions that the tensor has
    for row in rows.tolist():
        at, extent = cells.local["offset"][row][own], cells.local["extent"][row][own]
        box = tuple(slice(a, a + n) for a, n in zip(at.tolist(), extent.tolist(), strict=True))
        sums["sum"][row] = checksum(whole[box], cells.start[row][own].tolist(), layout.shape)
