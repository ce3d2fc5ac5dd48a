# SPDX-License-Identifier: Apache-2.0
"""Transports around communicators that a caller already has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

from nccl_m2n.execution.views import view_array
from nccl_m2n.transport import MpiTransport, NcclTransport, Transport
from nccl_m2n.transport.mpi import require_mpi
from nccl_m2n.typing import Array, Communicator


def as_transport(comm: Communicator, arrays: Iterable[Array] = ()) -> Transport:
    """The transport for a communicator, kept with it for the next call. Collective.

    Args:
        comm: A `Transport`, as it is; an mpi4py intracommunicator; an nccl4py ``Communicator`` or its
            pointer. A bare pointer keeps nothing: make an `NcclTransport` of it once, and pass that.
        arrays: This rank's arrays. An MPI communicator is taken for host memory unless a rank has device arrays.
    """
    if isinstance(comm, Transport):
        return comm
    if type(comm).__module__.startswith("mpi4py"):
        return _around_mpi(comm, arrays)
    kept = getattr(comm, "_nccl_m2n_transport", None)
    if kept is None:
        kept = NcclTransport(comm)
        if not isinstance(comm, int):
            comm._nccl_m2n_transport = kept
    return kept


def _around_mpi(comm: Communicator, arrays: Iterable[Array]) -> Transport:
    require_mpi(comm)
    kept = comm.Get_attr(_keyval())
    if kept is None:
        kept = {"host": MpiTransport(comm)}
        comm.Set_attr(_keyval(), kept)
    host: MpiTransport = kept["host"]
    mine = {host.rank: b"device" if _any_device(arrays) else b"host"}
    if b"device" not in host.exchange(mine, "find the arrays' memory"):
        return host
    if "device" not in kept:
        kept["device"] = NcclTransport.from_mpi(comm)
    return kept["device"]  # type: ignore[no-any-return]


def _any_device(arrays: Iterable[Array]) -> bool:
    for given in arrays:
        for array in given.values() if isinstance(given, Mapping) else [given]:
            try:
                if array is not None and view_array(array).device:
                    return True
            except Exception:  # told later, by all ranks together
                continue
    return False


@lru_cache(maxsize=1)
def _keyval() -> int:
    """The MPI attribute under which a communicator keeps its transports; freed along with it."""
    from mpi4py import MPI

    return MPI.Comm.Create_keyval()
