# SPDX-License-Identifier: Apache-2.0
"""GPU memory over NCCL: communicators, however they come about, and groups prepared on them."""

from __future__ import annotations

import os
import socket
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from nccl_m2n.checks import limit_seconds
from nccl_m2n.errors import TransferTimeout, TransportError
from nccl_m2n.transport.base import DeviceBuffer, Message, Transport
from nccl_m2n.transport.deadline import poll, run_within
from nccl_m2n.transport.gpu import device_count, import_cupy
from nccl_m2n.transport.nccl_domains import domain_label
from nccl_m2n.transport.nccl_exchange import DeviceExchange
from nccl_m2n.transport.nccl_group import PreparedGroup
from nccl_m2n.transport.nccl_library import address_of, checked, nccl_bindings, start_communicator
from nccl_m2n.transport.rendezvous import Rendezvous

Exchange = Callable[[bytes], list[bytes]]

CONNECT_BYTES = 16


class NcclTransport(Transport):
    """Ranks joined by NCCL communicators, one a rank, all of them in one process or each in its own.

    Args:
        communicator: An `nccl.core.Communicator` or the address of an ``ncclComm_t``. It stays the
            caller's: `close` leaves it alone.
        exchange: How the ranks exchange host bytes: collective, all ranks' bytes in rank order. Without
            it they go over the communicator itself, by way of the device.
        timeout: Seconds that collective host work (exchanges, connecting) may take.

    Raises:
        TransportError: If nccl4py, NCCL or CuPy is missing, or the communicator is not usable.
    """

    memory: Literal["host", "device"] = "device"

    def __init__(
        self, communicator: Any, *, exchange: Exchange | None = None, timeout: float = 120.0
    ) -> None:
        address, timeout = address_of(communicator), limit_seconds(timeout, endless=False)
        bindings = nccl_bindings()
        handle = bindings.Comm(address)
        rank = checked(bindings.comm_user_rank, handle)
        self._set_up({rank: handle}, exchange, timeout, owned=False, keep=communicator)

    @classmethod
    def from_mpi(cls, comm: Any, *, device: int | None = None, timeout: float = 120.0) -> NcclTransport:
        """One GPU a rank of an MPI communicator. Collective.

        Args:
            comm: An mpi4py intracommunicator.
            device: This rank's GPU; by default its rank within the host, modulo the number of GPUs.
            timeout: Seconds that start-up, and each exchange, may take.
        """
        from nccl_m2n.transport.mpi import MpiTransport  # mpi4py is needed only here

        host = MpiTransport(comm)

        def exchange(payload: bytes) -> list[bytes]:
            return host.exchange({comm.rank: payload})

        if device is None:
            names = exchange(socket.gethostname().encode())
            device = names[: comm.rank].count(names[comm.rank]) % device_count()
        return cls._start(comm.rank, comm.size, device, exchange, timeout, keep=host)

    @classmethod
    def from_environment(cls, *, device: int | None = None, timeout: float = 120.0) -> NcclTransport:
        """One GPU a rank, found through torchrun's variables, without MPI or PyTorch. Collective.

        Args:
            device: This rank's GPU; by default LOCAL_RANK modulo the number of visible GPUs.
            timeout: Seconds that start-up, and each exchange, may take.
        """
        nccl_bindings()  # says what is missing before anyone waits for anyone
        meeting = Rendezvous.from_environment(timeout=timeout)
        if device is None:
            device = int(os.environ.get("LOCAL_RANK", meeting.rank)) % device_count()

        def exchange(payload: bytes) -> list[bytes]:
            return meeting.exchange({meeting.rank: payload})

        return cls._start(meeting.rank, meeting.size, device, exchange, timeout, keep=meeting)

    @classmethod
    def init_all(cls, devices: int | Sequence[int] | None = None, *, timeout: float = 120.0) -> NcclTransport:
        """All ranks in this process, rank i on ``devices[i]``: no launcher needed.

        Args:
            devices: GPUs, or how many; all that are visible by default.
            timeout: Seconds that start-up may take.
        """
        bindings = nccl_bindings()
        if devices is None:
            devices = device_count()
        chosen = list(range(devices)) if isinstance(devices, int) else [int(d) for d in devices]
        if not chosen:
            raise TransportError("expected at least one GPU, got none")
        made = run_within(
            timeout, "NCCL's start-up", lambda: checked(bindings.comm_init_all, len(chosen), chosen)
        )
        transport = cls.__new__(cls)
        transport._set_up(dict(enumerate(made)), None, timeout, owned=True)
        return transport

    @classmethod
    def _start(
        cls, rank: int, size: int, device: int, exchange: Exchange, timeout: float, *, keep: Any
    ) -> NcclTransport:
        bindings = nccl_bindings()
        identifier = exchange(bytes(checked(bindings.get_unique_id)) if rank == 0 else b"")[0]
        parent, child = start_communicator(rank, size, device, identifier, timeout)
        transport = cls.__new__(cls)
        transport._set_up({rank: child}, exchange, timeout, owned=True, keep=keep, parent=parent)
        return transport

    def _set_up(
        self,
        communicators: dict[int, Any],
        exchange: Exchange | None,
        timeout: float,
        *,
        owned: bool,
        keep: Any = None,
        parent: Any = None,
    ) -> None:
        self._bindings, self._communicators, self._parent = nccl_bindings(), communicators, parent
        self._owned, self._keep, self.timeout = owned, keep, timeout
        self.local_ranks = tuple(sorted(communicators))
        self.size = checked(self._bindings.comm_count, communicators[self.local_ranks[0]])
        self.devices = {
            rank: checked(self._bindings.comm_cu_device, handle) for rank, handle in communicators.items()
        }
        if len(self.local_ranks) not in (1, self.size):
            raise TransportError(
                f"expected one rank or all {self.size} in this process, got ranks {self.local_ranks}"
            )
        self.graphs: weakref.WeakSet[Any] = weakref.WeakSet()  # what holds captured graphs: `release_graph()`
        self._exchange = exchange
        if exchange is None and len(self.local_ranks) < self.size:
            device = self.devices[self.local_ranks[0]]
            self._exchange = DeviceExchange(self._gather_on_device, self.wait, self.size, device, timeout)

    # What every transport does

    def _gather(self, messages: Mapping[int, bytes], deadline: float) -> list[bytes]:
        if self._exchange is None:
            return [messages[rank] for rank in range(self.size)]
        return self._exchange(messages[self.local_ranks[0]])

    def prepare(self, messages: Sequence[Message]) -> PreparedGroup:
        """One NCCL group of the messages of all local ranks, each buffer a `DeviceBuffer`."""
        self.require_usable()
        bindings = self._bindings
        calls: dict[int, list[tuple[Any, ...]]] = {}
        for message in messages:
            call = bindings.send if message.send else bindings.recv
            arguments = (call, message.buffer.pointer, message.buffer.nbytes, message.peer)
            calls.setdefault(message.rank, []).append(arguments)
        return PreparedGroup(self, [(rank, self._communicators[rank], c) for rank, c in calls.items()])

    def domain_labels(self) -> dict[int, str]:
        """A text for each local rank, equal on the ranks that NVLink joins."""
        self.require_usable()
        return {
            rank: domain_label(self._bindings, handle, self.devices[rank])
            for rank, handle in self._communicators.items()
        }

    def communicator(self, rank: int) -> Any:
        """The low-level handle of a local rank's communicator."""
        self.require_usable()
        return self._communicators[rank]

    def connect(self, pairs: Iterable[tuple[int, int, bool]]) -> None:
        """Set up NCCL's connections to peers now, within the time limit, rather than in the first round.

        Collective: both ends of a pair name it. Afterwards no group blocks in connection set-up, which has
        no time limit of its own, and groups may be captured in a graph.

        Args:
            pairs: For each connection the local rank, the peer, and whether the local rank sends.
        """
        cupy, chosen = import_cupy(), sorted(set(pairs))
        streams, scratch = {}, {}
        for rank, device in self.devices.items():
            with cupy.cuda.Device(device):
                streams[rank] = cupy.cuda.Stream(non_blocking=True)
                scratch[rank] = cupy.cuda.alloc(CONNECT_BYTES * max(1, len(chosen)))
        group = self.prepare(
            [
                Message(rank, peer, send, DeviceBuffer(scratch[rank].ptr + CONNECT_BYTES * i, CONNECT_BYTES))
                for i, (rank, peer, send) in enumerate(chosen)
            ]
        )

        def start() -> None:
            cupy.cuda.runtime.setDevice(self.devices[self.local_ranks[0]])
            group.start({rank: stream.ptr for rank, stream in streams.items()})

        run_within(self.timeout, "connecting to the peers", start)
        deadline = time.monotonic() + self.timeout
        self.wait(lambda: all(s.done for s in streams.values()), deadline, "connecting to the peers")

    def wait(self, done: Callable[[], bool], deadline: float | None, what: str) -> None:
        """Wait for work on the device, watching the communicators meanwhile. Sleeps, never spins.

        Args:
            done: Whether the work is done; asked again and again.
            deadline: On the clock of `time.monotonic`; None waits for ever.
            what: The work, for the error.

        Raises:
            TransferTimeout: If the work is not done in time; it may still be waited for, or aborted.
            TransportError: If NCCL failed.
        """

        def done_or_failed() -> bool:
            if done():
                return True
            self.check()
            return False

        began = time.monotonic()
        if not poll(done_or_failed, deadline):
            raise TransferTimeout(
                f"{what} did not complete on rank {_text(self.local_ranks)} within {time.monotonic() - began:.3g} s: "
                f"a peer is gone or late"
            )

    def _gather_on_device(self, sent: int, received: int, nbytes: int, stream: int) -> None:
        byte, handle = self._bindings.DataType.Int8, self._communicators[self.local_ranks[0]]
        checked(self._bindings.all_gather, sent, received, nbytes, int(byte), handle, stream)

    def gather(self, buffers: Mapping[int, tuple[int, int]], nbytes: int, streams: Mapping[int, int]) -> None:
        """Enqueue an all-gather of device memory. Collective.

        Args:
            buffers: For each local rank the address of its share, and of room for those of all ranks.
            nbytes: Bytes of one rank's share.
            streams: For each local rank the ``cudaStream_t`` that it goes on.
        """
        self.require_usable()
        bindings = self._bindings
        byte = int(bindings.DataType.Int8)
        bindings.group_start()
        try:
            for rank, (sent, received) in buffers.items():
                bindings.all_gather(sent, received, nbytes, byte, self._communicators[rank], streams[rank])
        finally:
            bindings.group_end()

    def check(self) -> None:
        """Raise if a communicator has failed since the last look.

        Raises:
            TransportError: With NCCL's own words; the transport is aborted.
        """
        self.require_usable()
        bindings = self._bindings
        for rank, handle in self._communicators.items():
            state = bindings.comm_get_async_error(handle)
            if state not in (bindings.Result.Success, bindings.Result.InProgress):
                text = f"{bindings.get_error_string(state)}; last error: {bindings.get_last_error(handle)}"
                self.abort(f"broke: NCCL failed on rank {rank}: {text}")
                raise TransportError(f"NCCL failed on rank {rank}: {text}")

    def _give_up(self) -> None:
        """Kernels that wait for a peer end, also those on a communicator that the caller handed in."""
        self._end(self._bindings.comm_abort)
        if isinstance(self._keep, Rendezvous):
            self._keep.abort(self.broken or "")  # peers that wait in an exchange hear of it at once

    def _part(self) -> None:
        if self._owned:
            self._end(self._bindings.comm_destroy)
            if hasattr(self._keep, "close"):
                self._keep.close()
        else:
            self._release_graphs()

    def _release_graphs(self) -> None:
        """Have all captured graphs let go of the communicators, whose end would wait for them."""
        for holder in list(self.graphs):
            holder.release_graph()

    def _end(self, how: Callable[[Any], None]) -> None:
        bindings = self._bindings
        self._release_graphs()
        # One thread ends several ranks inside one group, or the first would wait for the others for ever.
        several = len(self._communicators) > 1
        if several:
            bindings.group_start()
        try:
            for handle in self._communicators.values():
                how(handle)
            if self._parent is not None:
                how(self._parent)
        except bindings.NCCLError:  # already failing; there is nothing left to undo
            pass
        finally:
            if several:
                bindings.group_end()


def _text(ranks: Sequence[int]) -> str:
    return f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
