# SPDX-License-Identifier: Apache-2.0
"""nccl4py's low-level calls, and the errors they end in.

The only module that imports `nccl`. It stays below `nccl.core` on purpose: there a send costs about ten
times as much host time, a strided view is sent as if it were contiguous, and a group whose body raises is
launched half recorded, which hangs the peers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from nccl_m2n.checks import whole_number
from nccl_m2n.errors import TransportError
from nccl_m2n.text import pip_install
from nccl_m2n.transport.base import PreparedRound
from nccl_m2n.transport.ranks import Ranks
from nccl_m2n.typing import Communicator, Library


def nccl_bindings() -> Library:
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


def address_of(communicator: Communicator) -> int:
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


@contextmanager
def one_group(ranks: Ranks) -> Iterator[None]:
    """All calls inside become one group. What NCCL refuses gives the ranks up: half a group may be on its way.

    Raises:
        TransportError: In place of NCCL's own.
    """
    bindings = nccl_bindings()
    bindings.group_start()
    try:
        yield
    except BaseException as error:
        with suppress(bindings.NCCLError):  # it repeats the error that is being raised
            bindings.group_end()
        raise _refused(ranks, error) from error
    try:
        bindings.group_end()
    except BaseException as error:
        raise _refused(ranks, error) from error


def _refused(ranks: Ranks, error: BaseException) -> BaseException:
    said = f"NCCL refused a group of messages: {error or type(error).__name__}"
    ranks.abort(f"broke: {said}")
    return TransportError(said) if isinstance(error, Exception) else error


class PreparedGroup(PreparedRound):
    """One round's messages as one NCCL group, on prepared integers.

    Args:
        ranks: Whose messages they are; given up where NCCL refuses one.
        calls: For each local rank its communicator, and its calls with pointer, bytes and peer.
    """

    def __init__(
        self, ranks: Ranks, calls: Sequence[tuple[int, Communicator, list[tuple[Library, int, int, int]]]]
    ) -> None:
        self._transport, self._calls = ranks, list(calls)
        self._byte = int(nccl_bindings().DataType.Int8)

    def start(self, stream: Mapping[int, int] | None = None) -> None:
        """Enqueue the group.

        Args:
            stream: For each local rank the ``cudaStream_t`` that its messages go on. Several ranks of a
                process must not share one: each one's kernel waits for the others'.

        Raises:
            TransportError: If NCCL refuses; the communicators are aborted, since half a group may be on
                its way.
        """
        if not self._calls:
            return
        self._transport.require_usable()
        streams, byte = stream or {}, self._byte
        by_rank = [(calls, handle, streams[rank]) for rank, handle, calls in self._calls]
        with one_group(self._transport):
            for calls, handle, on in by_rank:
                for call, pointer, count, peer in calls:
                    call(pointer, count, byte, peer, handle, on)

    def finish(self, deadline: float | None = None) -> None:
        """Nothing: the stream waits."""
