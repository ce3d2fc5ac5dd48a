# SPDX-License-Identifier: Apache-2.0
"""GPU memory over NCCL: communicators, however they come about, and groups prepared on them."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence

from nccl_m2n.checks import limit_seconds
from nccl_m2n.errors import TransferTimeout, TransportError
from nccl_m2n.text import short_ranks
from nccl_m2n.transport.base import DeviceBuffer, DeviceTransport, HoldsGraph, Message
from nccl_m2n.transport.deadline import poll, run_within
from nccl_m2n.transport.gpu import device_count, import_cupy
from nccl_m2n.transport.mpi import MpiTransport
from nccl_m2n.transport.nccl_domains import domain_label
from nccl_m2n.transport.nccl_exchange import DeviceExchange, GivenExchange
from nccl_m2n.transport.nccl_library import (
    PreparedGroup,
    address_of,
    checked,
    nccl_bindings,
    one_group,
)
from nccl_m2n.transport.nccl_start import communicator_of
from nccl_m2n.transport.ranks import DEFAULT_TIMEOUT, Ranks
from nccl_m2n.transport.rendezvous import Rendezvous
from nccl_m2n.typing import Communicator, Library

CONNECT_BYTES = 16


class NcclTransport(DeviceTransport):
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

    kind, carrier, launchers = "nccl", "NCCL", ("mpi", "torchrun", "none")
    _owned = True  # the communicators; False where they are the caller's
    _owner: Communicator = None  # keeps them alive
    _parent: Communicator = None  # what they were split from
    _host: Ranks | None = None  # how host bytes get around; None where all ranks are in this process

    def __init__(
        self,
        communicator: Communicator,
        *,
        exchange: Callable[[bytes], list[bytes]] | None = None,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        address, limit = address_of(communicator), limit_seconds(timeout, endless=False)
        bindings = nccl_bindings()
        handle = bindings.Comm(address)
        rank = checked(bindings.comm_user_rank, handle)
        self._owner, self._owned = communicator, False
        self._set_up({rank: handle}, limit)
        if exchange is not None:
            self._host = GivenExchange(exchange, self)

    @classmethod
    def join(cls, launcher: str, world: Communicator, ranks: int | None) -> NcclTransport:
        """One rank a process, or alone a GPU for each rank; all GPUs where the number is left out."""
        if launcher == "mpi":
            return cls.from_mpi(world)
        return cls.from_environment() if launcher == "torchrun" else cls.init_all(ranks)

    @classmethod
    def from_mpi(
        cls, comm: Communicator, *, device: int | None = None, timeout: float = DEFAULT_TIMEOUT
    ) -> NcclTransport:
        """One GPU a rank of an MPI communicator. Collective.

        Args:
            comm: An mpi4py intracommunicator.
            device: This rank's GPU; by default its rank within the host, modulo the number of GPUs.
            timeout: Seconds that start-up, and each exchange, may take.
        """
        return cls._start(MpiTransport(comm, timeout), device, None)

    @classmethod
    def from_environment(
        cls, *, device: int | None = None, timeout: float = DEFAULT_TIMEOUT
    ) -> NcclTransport:
        """One GPU a rank, found through torchrun's variables, without MPI or PyTorch. Collective.

        Args:
            device: This rank's GPU; by default LOCAL_RANK modulo the number of visible GPUs.
            timeout: Seconds that start-up, and each exchange, may take.
        """
        return cls._start(Rendezvous.from_environment(timeout=timeout), device, os.environ.get("LOCAL_RANK"))

    @classmethod
    def init_all(
        cls, devices: int | Sequence[int] | None = None, *, timeout: float = DEFAULT_TIMEOUT
    ) -> NcclTransport:
        """All ranks in this process, rank i on ``devices[i]``: no launcher needed.

        Args:
            devices: GPUs, or how many; all that are visible by default.
            timeout: Seconds that start-up may take.
        """
        bindings, limit = nccl_bindings(), limit_seconds(timeout, endless=False)
        if devices is None:
            devices = device_count()
        chosen = list(range(devices)) if isinstance(devices, int) else [int(d) for d in devices]
        if not chosen:
            raise TransportError("expected at least one GPU, got none")
        made = run_within(
            limit, "NCCL's start-up", lambda: checked(bindings.comm_init_all, len(chosen), chosen)
        )
        transport = cls.__new__(cls)
        transport._set_up(dict(enumerate(made)), limit)
        return transport

    @classmethod
    def _start(cls, host: Ranks, device: int | None, local_rank: str | None) -> NcclTransport:
        parent, child = communicator_of(host, device, local_rank)
        transport = cls.__new__(cls)
        transport._parent, transport._host = parent, host
        transport._set_up({host.local_ranks[0]: child}, host.timeout)
        return transport

    def _set_up(self, communicators: dict[int, Communicator], timeout: float) -> None:
        self._bindings, self._communicators, self.timeout = nccl_bindings(), communicators, timeout
        self.local_ranks = tuple(sorted(communicators))
        self.size = checked(self._bindings.comm_count, communicators[self.local_ranks[0]])
        self.devices = {
            rank: checked(self._bindings.comm_cu_device, handle) for rank, handle in communicators.items()
        }
        if len(self.local_ranks) not in (1, self.size):
            raise TransportError(
                f"expected one rank or all {self.size} in this process, got ranks {self.local_ranks}"
            )
        self.graphs: weakref.WeakSet[HoldsGraph] = weakref.WeakSet()
        if self._host is None and len(self.local_ranks) < self.size:
            self._host = DeviceExchange(self)

    # What every transport does

    def _gather(self, messages: Mapping[int, bytes], deadline: float) -> list[bytes]:
        if self._host is None:
            return [messages[rank] for rank in range(self.size)]
        return self._host._gather(messages, deadline)

    def prepare(self, messages: Sequence[Message]) -> PreparedGroup:
        """One NCCL group of the messages of all local ranks, each buffer a `DeviceBuffer`.

        A communicator has one order of messages: all ranks start the rounds of their bindings in the same order.
        """
        self.require_usable()
        bindings = self._bindings
        calls: dict[int, list[tuple[Library, int, int, int]]] = {}
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

    def communicator(self, rank: int) -> Communicator:
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

        deadline, what = time.monotonic() + self.timeout, "connecting to the peers"
        try:
            run_within(self.timeout, what, start)
            self.wait(lambda: all(s.done for s in streams.values()), deadline, what)
        except BaseException as error:
            self.keep((streams, scratch))
            self.abort(f"broke in {what}: {error or type(error).__name__}")
            raise

    def wait(self, done: Callable[[], bool], deadline: float | None, what: str) -> None:
        """Wait for work on the device, watching the communicators meanwhile. Sleeps, never spins.

        Args:
            done: Whether the work is done; asked again and again.
            deadline: On the clock of `time.monotonic`; None waits for ever.
            what: The work, for the error.

        Raises:
            TransferTimeout: If the work is not done in time. It names who is missing: those who do not wait for
                anything either, for which half a second more is taken.
            TransportError: If NCCL failed.
        """

        def done_or_failed() -> bool:
            if done():
                return True
            self.check()
            return False

        began = time.monotonic()
        if not poll(done_or_failed, deadline):
            took = time.monotonic() - began
            who = "a peer is gone or late" if self._host is None else self._host.who_is_missing()
            raise TransferTimeout(
                f"{what} did not complete on rank {short_ranks(self.local_ranks)} within {took:.3g} s: {who}"
            )

    def gather(self, buffers: Mapping[int, tuple[int, int]], nbytes: int, streams: Mapping[int, int]) -> None:
        """Enqueue an all-gather of device memory. Collective.

        Args:
            buffers: For each local rank the address of its share, and of room for those of all ranks.
            nbytes: Bytes of one rank's share.
            streams: For each local rank the ``cudaStream_t`` that it goes on.
        """
        self.require_usable()
        all_gather, byte = self._bindings.all_gather, int(self._bindings.DataType.Int8)
        with one_group(self):
            for rank, (sent, received) in buffers.items():
                all_gather(sent, received, nbytes, byte, self._communicators[rank], streams[rank])

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
        if self._host is not None:  # peers that wait in an exchange over TCP hear of it at once
            self._host.abort(self.broken or "was aborted")

    def _part(self) -> None:
        if self._owned:
            self._end(self._bindings.comm_destroy)
        else:
            self._release_graphs()
        if self._host is not None:
            self._host.close()

    def _release_graphs(self) -> None:
        """Have all captured graphs let go of the communicators, whose end would wait for them."""
        for holder in list(self.graphs):
            holder.release_graph()

    def _end(self, how: Callable[[Communicator], None]) -> None:
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
