# SPDX-License-Identifier: Apache-2.0
"""Programs on GPUs: copies and NCCL groups, interleaved on two streams a rank.

While round x is on the wire, one launch on the side stream unpacks what round x - 1 brought and packs what
round x + 1 sends. All tables, addresses and calls are prepared when bound; a run only enqueues them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from nccl_m2n.errors import TransportError
from nccl_m2n.execution.delta.changes import Changes
from nccl_m2n.execution.kernels import CopyTables
from nccl_m2n.execution.lower import ArrayTable, Task, Wire, arrange, lower
from nccl_m2n.execution.staging import Staging
from nccl_m2n.execution.streams import stream_of
from nccl_m2n.planning.program import Program
from nccl_m2n.transport.base import DeviceBuffer, DeviceTransport, Message
from nccl_m2n.transport.gpu import import_cupy
from nccl_m2n.typing import Library, Stream


class DeviceExecutor:
    """The programs of this process's ranks, bound to device arrays.

    Args:
        transport: One for device memory.
        tasks: For each local rank its program and its source and destination arrays.
        wire: What elements are on the wire.
        staging: Where to take staging from.
    """

    def __init__(
        self,
        transport: DeviceTransport,
        tasks: Mapping[int, Task],
        wire: Wire,
        staging: Staging,
    ) -> None:
        self._transport = transport
        self._staging: Staging | None = staging
        self._ranks = [
            _Rank(transport.devices[rank], self._staging, *task, wire) for rank, task in sorted(tasks.items())
        ]
        rounds = max((one.program.rounds for one in self._ranks), default=0)
        listed = [one.messages_by_round() for one in self._ranks]
        self._groups = [
            transport.prepare([message for by_round in listed for message in by_round[x]])
            for x in range(rounds)
        ]
        self.baseline_bytes = 0
        self.changes: Changes | None = None
        self.staging_bytes = sum(one.staging_bytes for one in self._ranks)
        self._graph: Library = None
        self._ran = False

    @property
    def busy(self) -> bool:
        """Whether the device still works on the last run."""
        return self._ran and not all(one.finished.done for one in self._ranks)

    def forget(self, ranks: Collection[int] | None) -> None:
        """Nothing: every run sends everything."""

    def connect(self) -> None:
        """Make the connections that the program uses. Collective: only after all ranks have agreed."""
        self._transport.connect(
            (one.program.rank, peer, send)
            for one in self._ranks
            for peer, send in zip(
                one.program.messages["peer"].tolist(), one.program.messages["send"].tolist(), strict=True
            )
        )

    @property
    def table_bytes(self) -> int:
        """Device memory held for copy tables by all local ranks."""
        return sum(one.tables.nbytes for one in self._ranks)

    def start(self, stream: Stream = None) -> None:
        """Enqueue one whole reshard and return; nothing is planned, sliced or allocated.

        Args:
            stream: The stream that the arrays are ordered on: a CuPy or PyTorch stream, anything with
                ``__cuda_stream__``, or an integer handle; with ranks on several GPUs a mapping from rank
                to stream. CuPy's current stream by default.
        """
        callers = callers_streams(stream, [(one.program.rank, one.device) for one in self._ranks])
        with device_kept():
            self._run(callers)

    def _run(self, callers: list[Stream]) -> None:
        for one, caller in zip(self._ranks, callers, strict=True):
            if self._ran:  # on another stream, perhaps: staging and tables serve one run at a time
                caller.wait_event(one.finished)
        if self._graph is not None:
            self._launch_graph(callers)
        else:
            self._enqueue(callers)
        for one, caller in zip(self._ranks, callers, strict=True):
            caller.record(one.finished)
        self._ran = True

    def capture(self) -> None:
        """Capture the whole program in one CUDA graph, which later runs replay with a single launch."""
        if self._graph is not None:
            return
        cupy = import_cupy()
        with device_kept(), cupy.cuda.Device(self._ranks[0].device):
            origin = cupy.cuda.Stream(non_blocking=True)
            origin.begin_capture()
            try:
                self._enqueue([origin] * len(self._ranks))
            except BaseException:
                _drop_capture(origin)
                raise
            self._graph = origin.end_capture()
        self._transport.graphs.add(self)

    def finish(self, deadline: float | None) -> None:
        """Wait until the last run is complete.

        Args:
            deadline: On the clock of `time.monotonic`; None waits for ever.

        Raises:
            TransferTimeout: If the deadline passes.
            TransportError: If NCCL failed.
        """
        if self._ran:
            self._transport.wait(
                lambda: all(one.finished.done for one in self._ranks), deadline, "the transfer"
            )

    def release_graph(self) -> None:
        """Let go of the graph: it holds on to the communicators, whose end would wait for it."""
        self._graph = None

    def close(self) -> None:
        """Release the graph, the staging and the tables, once the last run is over. May be called twice."""
        self.release_graph()
        for one in self._ranks:
            if self._ran:
                one.finished.synchronize()
        self._groups, self._ranks, self._staging = [], [], None

    def _launch_graph(self, callers: list[Stream]) -> None:
        first = callers[0]
        for one, caller in zip(self._ranks[1:], callers[1:], strict=True):
            if caller.ptr != first.ptr or one.device != self._ranks[0].device:
                one.forked.record(caller)
                first.wait_event(one.forked)
        self._graph.launch(first)
        if len(self._ranks) > 1:
            joined = self._ranks[0].forked
            joined.record(first)
            for caller in callers[1:]:
                caller.wait_event(joined)

    def _enqueue(self, callers: list[Stream]) -> None:
        """All copies and groups, ordered after the callers' streams and before whatever comes next there."""
        for one, caller in zip(self._ranks, callers, strict=True):
            one.open(caller, alone=len(self._ranks) == 1)
        streams = {one.program.rank: one.main.ptr for one in self._ranks}
        for x, group in enumerate(self._groups):
            for one in self._ranks:
                one.before_group(x)
            group.start(streams)
            for one in self._ranks:
                one.beside_group(x)
        for one, caller in zip(self._ranks, callers, strict=True):
            one.finish(len(self._groups), caller)


class _Rank:
    """One local rank: its staging, its tables, its two streams."""

    def __init__(
        self,
        device: int,
        staging: Staging,
        program: Program,
        sources: ArrayTable,
        destinations: ArrayTable,
        wire: Wire,
    ) -> None:
        cupy = import_cupy()
        self.device, self.program = device, program
        arranged = arrange(program, sources, destinations, wire)
        with cupy.cuda.Device(device):
            self._own_main = cupy.cuda.Stream(non_blocking=True)
            self._side = cupy.cuda.Stream(non_blocking=True)
            self.forked, self._group_done, self._copies_done, self.finished = (
                cupy.cuda.Event(disable_timing=True) for _ in range(4)
            )
        self.main = self._own_main
        self.staging_bytes = arranged.staging_bytes
        send = staging.take(program.rank, self.staging_bytes)
        receive = send + 2 * arranged.send_half_bytes
        lowered = lower(program, arranged, sources, destinations, send, receive)
        self._address = lowered.address
        self.tables = CopyTables(lowered.launches, device)
        self._launches = self.tables.launches

    def messages_by_round(self) -> list[list[Message]]:
        """The rank's messages, with their addresses, for each round."""
        table = self.program.messages
        chunk = table["chunk"]
        by_round: list[list[Message]] = [[] for _ in range(self.program.rounds)]
        columns = (table["round"], table["peer"], table["send"], self._address[chunk])
        size = self.program.chunks["bytes"][chunk]
        for x, peer, send, pointer, nbytes in zip(
            *(column.tolist() for column in columns), size.tolist(), strict=True
        ):
            by_round[x].append(Message(self.program.rank, peer, bool(send), DeviceBuffer(pointer, nbytes)))
        return by_round

    def open(self, caller: Stream, *, alone: bool) -> None:
        """Start after the caller's work, on the caller's stream unless ranks would meet there."""
        if alone:
            self.main = caller
        else:
            self.main = self._own_main
            caller.record(self.forked)
            self.main.wait_event(self.forked)
        self.main.record(self._group_done)  # stands for the group before the first
        self._start(0, self.main)

    def before_group(self, x: int) -> None:
        """Have the group of round x wait for the copies that it needs."""
        if x > 0 and self._launches[x] is not None:
            self.main.wait_event(self._copies_done)

    def beside_group(self, x: int) -> None:
        """Start the copies that run while round x is on the wire: they need round x - 1, not x."""
        if self._launches[x + 1] is not None:
            self._side.wait_event(self._group_done)
            self._start(x + 1, self._side)
            self._side.record(self._copies_done)
        self.main.record(self._group_done)

    def finish(self, rounds: int, caller: Stream) -> None:
        """Unpack the last round, and let the caller's stream go on after it."""
        if rounds > 0:
            self.before_group(rounds)
        self._start(rounds + 1, self.main)
        if self.main is not caller:
            self.main.record(self.forked)
            caller.wait_event(self.forked)

    def _start(self, index: int, stream: Stream) -> None:
        launch = self._launches[index]
        if launch is not None:
            launch.start(stream)


@contextmanager
def device_kept() -> Iterator[None]:
    """Leave the thread's current device as it was; launches for several GPUs change it."""
    runtime = import_cupy().cuda.runtime
    before = runtime.getDevice()
    try:
        yield
    finally:
        runtime.setDevice(before)


def callers_streams(stream: Stream, ranks: Sequence[tuple[int, int]]) -> list[Stream]:
    """The stream of each rank, of which rank and GPU are given, out of what a caller said.

    Raises:
        TransportError: For one stream where ranks are on several GPUs, or none for one of them.
    """
    if isinstance(stream, Mapping):
        missing = [rank for rank, _ in ranks if rank not in stream]
        if missing:
            raise TransportError(f"expected a stream for each rank of this process, got none for {missing}")
        return [stream_of(stream[rank], device) for rank, device in ranks]
    if stream is not None and len({device for _, device in ranks}) > 1:
        raise TransportError(
            "ranks on several GPUs need a stream each: pass a mapping from rank to stream, or none"
        )
    return [stream_of(stream, device) for _, device in ranks]


def _drop_capture(stream: Stream) -> None:
    """End a capture that failed, so that the stream can be released; its own error adds nothing."""
    try:
        stream.end_capture()
    except Exception:
        pass
