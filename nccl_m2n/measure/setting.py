# SPDX-License-Identifier: Apache-2.0
"""Where methods are measured: the ranks, the problem, its arrays, and the memory they lie in."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeAlias, cast

import numpy as np

from nccl_m2n.execution.given import SIDES
from nccl_m2n.measure.data import TensorStack, by_name, count_wrong, fill, spoil, stacks
from nccl_m2n.planning import Topology, Transfer
from nccl_m2n.transport.base import DeviceBuffer, DeviceTransport, Transport
from nccl_m2n.transport.gpu import import_cupy
from nccl_m2n.typing import Array, Json, JsonObject, Library, Stream

Arrays: TypeAlias = dict[int, dict[str, Array]]  # by rank and name


class Method(Protocol):
    """One way to solve a setting's problem."""

    def start(self, streams: Mapping[int, Stream]) -> None:
        """Start a run, by the stream of each local rank."""

    def facts(self) -> JsonObject:
        """What a report says of the method beside its times."""

    def close(self) -> None:
        """Release what was made."""


class HostMethod(Method, Protocol):
    """One that can be measured in host memory."""

    def wait(self, timeout: float) -> None:
        """End the run."""


class HostMemory:
    """NumPy arrays; a run is over when the method's own `wait` returns."""

    library: Library = np

    def __init__(self) -> None:
        self.streams: dict[int, Stream] = {}

    def on(self, rank: int) -> AbstractContextManager[object]:
        """The context in which a local rank's arrays are made: any."""
        return nullcontext()

    def buffer(self, array: Array, at: int, nbytes: int) -> Array:
        """`nbytes` of an array of bytes, from byte `at` on, as messages take them."""
        return array[at : at + nbytes]

    def settle(self) -> None:
        """Nothing is under way between runs."""

    def finish(self, method: Method, timeout: float) -> None:
        """Wait for a started method, for `timeout` seconds at most."""
        cast(HostMethod, method).wait(timeout)


class DeviceMemory:
    """CuPy arrays, each local rank's on its GPU; a run is over when every rank's stream is."""

    def __init__(self, transport: DeviceTransport) -> None:
        self.library, self._transport = import_cupy(), transport
        self.streams: dict[int, Stream] = {}
        for rank in transport.local_ranks:
            with self.on(rank):
                self.streams[rank] = self.library.cuda.Stream(non_blocking=True)

    def on(self, rank: int) -> AbstractContextManager[object]:
        """The context in which a local rank's arrays are made: its GPU."""
        device: AbstractContextManager[object] = self.library.cuda.Device(self._transport.devices[rank])
        return device

    def buffer(self, array: Array, at: int, nbytes: int) -> DeviceBuffer:
        """`nbytes` of an array of bytes, from byte `at` on, as messages take them."""
        return DeviceBuffer(array.data.ptr + at, nbytes)

    def settle(self) -> None:
        """Wait for all work of this process's GPUs."""
        for device in set(self._transport.devices.values()):
            with self.library.cuda.Device(device):
                self.library.cuda.runtime.deviceSynchronize()

    def finish(self, method: Method, timeout: float) -> None:
        """Wait for a started method, for `timeout` seconds at most."""
        streams = self.streams.values()
        deadline = time.monotonic() + timeout
        self._transport.wait(lambda: all(s.done for s in streams), deadline, "a measured run")


@dataclass(frozen=True, eq=False)
class Setting:
    """One problem on one transport, its source arrays filled; what every method is made for."""

    transport: Transport
    transfers: tuple[Transfer, ...]  # of uint16 elements
    topology: Topology
    memory: HostMemory | DeviceMemory
    stacks: Mapping[
        int, tuple[list[TensorStack], list[TensorStack]]
    ]  # by local rank: source side, destination side

    @classmethod
    def of(cls, transport: Transport, transfers: Sequence[Transfer], topology: Topology) -> Setting:
        """Make and fill the arrays of all local ranks."""
        memory = (
            HostMemory() if transport.memory == "host" else DeviceMemory(cast(DeviceTransport, transport))
        )
        made = {}
        for rank in transport.local_ranks:
            with memory.on(rank):
                source, destination = (stacks(transfers, side, rank, memory.library) for side in SIDES)
                fill(source, rank)
                made[rank] = source, destination
        return cls(transport, tuple(transfers), topology, memory, made)

    @property
    def rank(self) -> int:
        """This process's rank, its first one where it drives several."""
        return self.transport.local_ranks[0]

    @cached_property
    def arrays(self) -> tuple[Arrays, Arrays]:
        """Source and destination arrays, by rank and name."""
        source, destination = ({r: by_name(pair[side]) for r, pair in self.stacks.items()} for side in (0, 1))
        return source, destination

    def spoil(self) -> None:
        """Overwrite all destination arrays, so that what a method leaves out is seen."""
        for rank, (_, destination) in self.stacks.items():
            with self.memory.on(rank):
                spoil(destination)

    def count_wrong(self) -> dict[int, int]:
        """Wrong elements in each local rank's destination arrays."""
        wrong = {}
        for rank, (_, destination) in self.stacks.items():
            with self.memory.on(rank):
                wrong[rank] = count_wrong(destination, rank)
        return wrong

    def share(self, said: Mapping[int, Json]) -> list[Json]:
        """JSON data of every rank, in rank order. Collective; a barrier."""
        payload = {rank: json.dumps(said.get(rank)).encode() for rank in self.transport.local_ranks}
        return [json.loads(text) for text in self.transport.exchange(payload)]
