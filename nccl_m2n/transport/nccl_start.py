# SPDX-License-Identifier: Apache-2.0
"""How ranks that can talk already get an NCCL communicator, within a time limit."""

from __future__ import annotations

import json
import socket
import time

from nccl_m2n.errors import TransferTimeout, TransportError
from nccl_m2n.transport.agree import together
from nccl_m2n.transport.deadline import poll
from nccl_m2n.transport.gpu import device_count, import_cupy
from nccl_m2n.transport.nccl_library import checked, nccl_bindings
from nccl_m2n.transport.ranks import Ranks
from nccl_m2n.typing import Communicator, Library


def communicator_of(
    host: Ranks, device: int | None, local_rank: str | None
) -> tuple[Communicator, Communicator]:
    """A communicator of ranks that exchange host bytes. What fails on one of them ends the wait of all. Collective.

    Args:
        host: The ranks, one a process. Given up if anything fails.
        device: This rank's GPU; None chooses one.
        local_rank: The rank within its host as a launcher told it; None counts.

    Returns:
        As `start_communicator`.

    Raises:
        TransferTimeout: If not all ranks come in time; names those that did not.
        TransportError: If NCCL, CuPy or a GPU is missing on some rank, or NCCL fails.
    """
    (rank,) = host.local_ranks

    def ready(rank: int) -> tuple[int, bytes]:
        bindings = nccl_bindings()
        return device_count(), bytes(checked(bindings.get_unique_id)) if rank == 0 else b""

    try:
        count, identifier = together(host, "start NCCL", ready)[rank]
        mine = json.dumps([socket.gethostname(), identifier.hex()]).encode()
        said = [json.loads(text) for text in host.exchange({rank: mine}, "share NCCL's identifier")]
        if device is None:
            hosts = [name for name, _ in said]
            place = hosts[:rank].count(hosts[rank]) if local_rank is None else int(local_rank)
            device = place % count
        try:
            return start_communicator(rank, host.size, device, bytes.fromhex(said[0][1]), host.timeout)
        except TransferTimeout as error:
            raise TransferTimeout(f"{error}: {host.who_is_missing()}") from None
    except BaseException as error:
        host.abort(f"broke in NCCL's start-up: {error or type(error).__name__}")
        raise


def settle(bindings: Library, handle: Communicator, timeout: float, what: str) -> None:
    """Wait until a non-blocking communicator has done what it was asked; abort it if it does not."""

    def settled() -> bool:
        state = bindings.comm_get_async_error(handle)
        if state == bindings.Result.InProgress:
            return False
        if state != bindings.Result.Success:
            text = f"{bindings.get_error_string(state)}; last error: {bindings.get_last_error(handle)}"
            bindings.comm_abort(handle)
            raise TransportError(f"{what} failed: {text}")
        return True

    if not poll(settled, time.monotonic() + timeout):
        bindings.comm_abort(handle)
        raise TransferTimeout(f"{what} took longer than {timeout:g} s: not all ranks came")


def start_communicator(
    rank: int, size: int, device: int, identifier: bytes, timeout: float
) -> tuple[Communicator, Communicator]:
    """A communicator whose start-up has a time limit. Collective.

    Args:
        rank: This process's rank.
        size: Number of ranks.
        device: This rank's GPU.
        identifier: NCCL's unique id, the same on all ranks.
        timeout: Seconds that each of the two steps may take.

    Returns:
        The non-blocking communicator that was started, and its blocking child, which is the one to use.

    Raises:
        TransferTimeout: If not all ranks come in time.
        TransportError: If NCCL fails.
    """
    bindings = nccl_bindings()
    what = f"NCCL's start-up on rank {rank} of {size}"
    config = bindings.Config()
    config.blocking = 0
    with import_cupy().cuda.Device(device):
        parent = checked(bindings.comm_init_rank_scalable, size, rank, 1, bytearray(identifier), config.ptr)
    settle(bindings, parent, timeout, what)
    # Only start-up is to be non-blocking: there every group costs a thread and a wait for it, some
    # 80 µs more than in a blocking child, which shares the parent's connections.
    config = bindings.Config()
    config.blocking, config.split_share = 1, 1
    child = checked(bindings.comm_split, parent, 0, rank, config.ptr)
    settle(bindings, parent, timeout, what)
    return parent, child
