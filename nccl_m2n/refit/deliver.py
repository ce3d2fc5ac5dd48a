# SPDX-License-Identifier: Apache-2.0
"""Where full tensors go once they have arrived: to the user's loader, or into the arrays that layouts describe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from nccl_m2n.errors import LayoutError
from nccl_m2n.execution.memory import as_array
from nccl_m2n.execution.views import ArrayView
from nccl_m2n.layout import Layout
from nccl_m2n.planning import Transfer
from nccl_m2n.transport.base import Transport

Load = Callable[[str, Any], None]  # name, the full tensor


class Delivery:
    """Takes full tensors on behalf of this process's ranks.

    Args:
        transport: Says which these are.
        load: Takes what has no layout; a mapping from rank where the process drives several.
        laid_out: Transfers to what has a layout.
        arrays: The destination's arrays by rank and name.
    """

    def __init__(
        self,
        transport: Transport,
        load: Load | Mapping[int, Load] | None,
        laid_out: Iterable[Transfer],
        arrays: Mapping[int, Mapping[str, ArrayView]],
    ) -> None:
        several = len(transport.local_ranks) > 1
        if several and load is not None and not isinstance(load, Mapping):
            raise LayoutError(
                "expected load to be a mapping from rank, for this process drives several ranks"
            )
        by_rank = load if isinstance(load, Mapping) else dict.fromkeys(transport.local_ranks, load)
        self._load: dict[int, Load] = {rank: one for rank, one in by_rank.items() if one is not None}
        self._layouts: dict[str, Layout] = {t.name: t.destination for t in laid_out}
        self._arrays = arrays

    def require(self, transfers: Iterable[Transfer], ranks: Iterable[int]) -> None:
        """Refuse, before anything moves, a rank that would get a full tensor and has no loader.

        Raises:
            LayoutError: Naming the parameter and the rank.
        """
        idle = [rank for rank in ranks if rank not in self._load]
        for transfer in transfers if idle else ():
            for rank in idle:
                if transfer.name not in self._layouts and rank in transfer.destination.mesh.index:
                    raise LayoutError(
                        f"parameter {transfer.name!r} has no layout on the destination side: expected load=, which "
                        f"takes the full tensor on rank {rank}, got none"
                    )

    def __call__(self, rank: int, name: str, tensor: Any) -> None:
        """Deliver one full tensor to one rank."""
        layout = self._layouts.get(name)
        if layout is None:
            self._load[rank](name, tensor)
        elif name in self._arrays[rank]:
            cut_out(tensor, layout, rank, as_array(self._arrays[rank][name]))


def cut_out(tensor: Any, layout: Layout, rank: int, array: Any) -> None:
    """Copy what a rank holds of a full tensor into its array, which may split dimensions further.

    Args:
        tensor: The full tensor.
        layout: Who holds what.
        rank: The rank.
        array: Its array, written where the layout's pieces lie and nowhere else.
    """
    shape, pieces = layout.local_shape(rank), layout.pieces(rank)
    if len(pieces) == 1 and pieces[0].box.shape == shape:
        array[...] = tensor[pieces[0].box.slices].reshape(array.shape)
        return
    local = array.copy().reshape(shape)
    for piece in pieces:
        local[piece.local_slices] = tensor[piece.box.slices]
    array[...] = local.reshape(array.shape)
