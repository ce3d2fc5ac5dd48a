# SPDX-License-Identifier: Apache-2.0
"""nccl4py's low-level calls, and the errors they end in.

The only module that imports `nccl`. It stays below `nccl.core` on purpose: there a send costs about ten
times as much host time, a strided view is sent as if it were contiguous, and a group whose body raises is
launched half recorded, which hangs the peers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from nccl_m2n.checks import whole_number
from nccl_m2n.errors import TransferTimeout, TransportError
from nccl_m2n.text import pip_install
from nccl_m2n.transport.deadline import poll
from nccl_m2n.transport.gpu import import_cupy


def nccl_bindings() -> Any:
    """nccl4py's low-level module.

    Raises:
        TransportError: If it, or NCCL itself, cannot be loaded.
    """
    try:
        from nccl.bindings import nccl

        nccl.get_version()  # loads the library, which the import alone does not
    except (ImportError, RuntimeError) as error:
        raise TransportError(
            f"NCCL is not available ({error}): {pip_install('cuda12')} (or cuda13), "
            "which brings nccl4py and CuPy"
        ) from None
    return nccl


def address_of(communicator: Any) -> int:
    """The address of an ``ncclComm_t``, from nccl4py's object or from a number, before NCCL is looked for.

    Raises:
        TransportError: If it is neither.
    """
    given = getattr(communicator, "ptr", communicator)
    hint = (
        "pass a transport, an mpi4py communicator such as MPI.COMM_WORLD, or an nccl4py one or its pointer"
        "; PyTorch's process groups are none of these: NcclTransport.from_environment() joins torchrun's ranks"
    )
    address = whole_number(given, "the address of a communicator", error=TransportError, hint=hint)
    if address <= 0:
        raise TransportError("expected a communicator, got one that is null or already destroyed")
    return address


def checked(call: Callable[..., Any], *arguments: Any) -> Any:
    """Call a binding; its errors become `TransportError` with a hint."""
    try:
        return call(*arguments)
    except nccl_bindings().NCCLError as error:
        raise TransportError(f"{call.__name__} failed: {error}. NCCL_DEBUG=WARN tells more") from None


def settle(bindings: Any, handle: Any, timeout: float, what: str) -> None:
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
) -> tuple[Any, Any]:
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
