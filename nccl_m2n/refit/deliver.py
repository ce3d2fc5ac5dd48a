# SPDX-License-Identifier: Apache-2.0
"""Where full tensors go once they have arrived: to the user's loader, or into the arrays that layouts describe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from nccl_m2n.checks import whole_number
from nccl_m2n.errors import LayoutError
from nccl_m2n.execution.memory import as_array
from nccl_m2n.execution.views import ArrayView
from nccl_m2n.layout import Layout
from nccl_m2n.planning import Transfer
from nccl_m2n.transport.base import Transport
from nccl_m2n.typing import Array

Loader: TypeAlias = Callable[[str, Array], None]  # name, the full tensor


def loader_of(load: Loader | Mapping[int, Loader] | None, transport: Transport, rank: int) -> Loader | None:
    """What takes full tensors at a local rank.

    Raises:
        LayoutError: If that is no function, or not told by rank where the process drives several.
    """
    if load is not None and not isinstance(load, Mapping) and len(transport.local_ranks) > 1:
        raise LayoutError(
            "expected load to be a mapping from rank, for this process drives several ranks, got "
            f"{type(load).__name__}"
        )
    if isinstance(load, Mapping):
        for other in load:
            whole_number(other, "a rank with a load", least=0, most=transport.size - 1)
    one = load.get(rank) if isinstance(load, Mapping) else load
    if one is not None and not callable(one):
        raise LayoutError(f"expected load to be a function of a name and a tensor, got {one!r}")
    return one


class Delivery:
    """Takes full tensors on behalf of this process's ranks.

    Args:
        loaders: What takes, at each local rank, that which has no layout.
        laid_out: Transfers to what has a layout.
        arrays: The destination's arrays by rank and name.
    """

    def __init__(
        self,
        loaders: Mapping[int, Loader | None],
        laid_out: Iterable[Transfer],
        arrays: Mapping[int, Mapping[str, ArrayView]],
    ) -> None:
        self._loaders = {rank: one for rank, one in loaders.items() if one is not None}
        self._layouts: dict[str, Layout] = {t.name: t.destination for t in laid_out}
        self._arrays = arrays

    def require(self, transfers: Iterable[Transfer], rank: int) -> None:
        """Refuse, before anything moves, a rank that would get a full tensor and has no loader.

        Raises:
            LayoutError: Naming the parameter and the rank.
        """
        for transfer in transfers if rank not in self._loaders else ():
            if transfer.name not in self._layouts and rank in transfer.destination.mesh.index:
                raise LayoutError(
                    f"parameter {transfer.name!r} has no layout on the destination side: expected load=, which "
                    f"takes the full tensor on rank {rank}, got none"
                )

    def __call__(self, rank: int, name: str, tensor: Array) -> None:
        """Deliver one full tensor to one rank."""
        layout = self._layouts.get(name)
        if layout is None:
            self._loaders[rank](name, tensor)
        elif name in self._arrays[rank]:
            cut_out(tensor, layout, rank, as_array(self._arrays[rank][name]))


def cut_out(tensor: Array, layout: Layout, rank: int, array: Array) -> None:
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
    local = array.copy().reshape((*shape, *tensor.shape[layout.ndim :]))  # elements may be several integers
    for piece in pieces:
        local[piece.local_slices] = tensor[piece.box.slices]
    array[...] = local.reshape(array.shape)
