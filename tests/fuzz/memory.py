# SPDX-License-Identifier: Apache-2.0
"""Memory that arrays lie in, in any order and with room between: every byte of it is compared afterwards.

All arrays of one rank and side lie in one `Arena`, beside a twin that says what it should hold.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from nccl_m2n.execution.views import ArrayView

Array = npt.NDArray[Any]
Shape = tuple[int, ...]

UNTOUCHED = 0xA5
MAX_DIMS = 8
MAX_ROOM = 6  # times the bytes of the elements
ROOM = ((0, 0), (0, 0), (0, 0), (1, 0), (0, 1), (2, 1))  # elements before and after, in a dimension


@lru_cache(maxsize=64)
def numpy_dtype(name: str) -> np.dtype[Any]:
    """NumPy's dtype of that name, or that of ml_dtypes."""
    return np.dtype(getattr(ml_dtypes, name, name))


@dataclass(frozen=True)
class Lie:
    """How an array lies in its arena: `shape` may split dimensions of the local shape further."""

    shape: Shape
    strides: Shape  # bytes
    first: int  # where element (0, …, 0) is
    nbytes: int  # of all that the array takes, room included


def draw_lie(rng: Random, local: Shape, item: int, *, split: bool = True, misaligned: bool = True) -> Lie:
    """Half of all arrays are plain; the others are permuted, run backwards, skip elements or have room."""
    shape = _draw_split(rng, local) if split and rng.random() < 0.15 else local
    plain = rng.random() < 0.5
    order = list(range(len(shape)))
    if not plain:
        rng.shuffle(order)
    strides, step, first, room = [0] * len(shape), item, 0, MAX_ROOM
    if not plain and misaligned and rng.random() < 0.1:
        first = rng.randint(1, 15)
    for d in reversed(order):
        skip, before, after = (1, 0, 0) if plain else (rng.choice((1, 1, -1, -1, 2, -3)), *rng.choice(ROOM))
        reach = max(0, shape[d] - 1) * abs(skip)
        wide = before + reach + 1 + after
        if wide > room * shape[d]:
            skip, before, reach, wide = 1, 0, max(0, shape[d] - 1), max(1, shape[d])
        room = room * max(1, shape[d]) // wide
        strides[d] = skip * step
        first += step * (before + (reach if skip < 0 else 0))
        step *= wide
    return Lie(shape, tuple(strides), first, step + 16)


def _draw_split(rng: Random, local: Shape) -> Shape:
    """The same array with dimensions seen as several, in row-major order, or with other dimensions of extent 1."""
    if not local or not all(local):
        return local
    shape: list[int] = []
    room = MAX_DIMS - len(local)
    for n in local:
        factors = [f for f in range(2, n) if n % f == 0] if room else []
        if factors and rng.random() < 0.7:
            factor = rng.choice(factors)
            shape += [factor, n // factor]
            room -= 1
        elif n != 1 or rng.random() < 0.6:
            shape.append(n)
    while len(shape) < MAX_DIMS and rng.random() < 0.3:
        shape.insert(rng.randint(0, len(shape)), 1)
    return tuple(shape)


class Arena:
    """The arrays of one rank on one side, and what they should hold.

    Args:
        device: The GPU that the arrays are on; None for host memory.
    """

    def __init__(self, device: int | None = None) -> None:
        self.device = device
        self._places: dict[str, tuple[Lie, str, int]] = {}
        self._size = 0
        self._memory: Any = None  # on the GPU

    def place(self, name: str, lie: Lie, dtype: str) -> None:
        """Make room for an array."""
        self._places[name] = (lie, dtype, self._size)
        self._size += -(-(lie.nbytes + lie.first % 16) // 16) * 16 + 16

    def allocate(self) -> None:
        """Once every array has its place."""
        self.bytes = np.full(self._size, UNTOUCHED, np.uint8)
        self.twin = self.bytes.copy()
        self.views = {name: self._view(self.bytes, name) for name in self._places}
        self.expected = {name: self._view(self.twin, name) for name in self._places}
        if self.device is not None:
            import cupy

            with cupy.cuda.Device(self.device):
                self._memory = cupy.empty(max(1, self._size), cupy.uint8)

    def _view(self, memory: Array, name: str) -> Array:
        lie, dtype, at = self._places[name]
        return np.ndarray(lie.shape, numpy_dtype(dtype), memory, at + lie.first, lie.strides)

    def array(self, name: str) -> Any:
        """What is given to the package: the array in host memory, or a view of its twin on the GPU."""
        if self.device is None:
            return self.views[name]
        lie, dtype, at = self._places[name]
        pointer = self._memory.data.ptr + at + lie.first
        return ArrayView(pointer, lie.shape, lie.strides, dtype, True, True, self._memory)

    def arrays(self) -> dict[str, Any]:
        """All of them by name."""
        return {name: self.array(name) for name in self._places}

    def clear(self) -> None:
        """Nothing is written and nothing is expected."""
        self.bytes.fill(UNTOUCHED)
        self.twin.fill(UNTOUCHED)

    def upload(self) -> None:
        """Hand what was written on the host to the GPU, where there is one."""
        if self._memory is not None and self._size:
            import cupy

            with cupy.cuda.Device(self.device):
                self._memory.set(self.bytes)

    def download(self) -> None:
        """Read back what the GPU holds."""
        if self._memory is not None and self._size:
            import cupy

            with cupy.cuda.Device(self.device):
                self.bytes[...] = self._memory.get()

    def wrong(self) -> list[str]:
        """Names of the arrays in or around which a byte differs from what it should be."""
        self.download()
        if np.array_equal(self.bytes, self.twin):
            return []
        differs = np.flatnonzero(self.bytes != self.twin)
        starts = np.array([at for _, _, at in self._places.values()], np.int64)
        names = list(self._places)
        hit = sorted(set((np.searchsorted(starts, differs, side="right") - 1).tolist()))
        return [names[i] for i in hit]


def write(view: Array, whole: Array, flat: Any) -> None:
    """Put a rank's elements of the flattened whole tensor into its array."""
    for taken, places in flat:
        values = whole[taken]
        if places is None:
            view[...] = values.reshape(view.shape)
        elif len(values):
            view[np.unravel_index(places, view.shape)] = values


def random_values(rng: np.random.Generator, count: int, dtype: str, cast: str | None) -> Array:
    """A flattened whole tensor: any bits; where it is cast, numbers that both types can hold."""
    kind = numpy_dtype(dtype)
    if cast is not None:
        return (rng.integers(-8, 9, count) if rng.random() < 0.7 else rng.normal(0, 30, count)).astype(kind)
    if kind == np.bool_:
        return rng.integers(0, 2, count).astype(bool)
    return np.frombuffer(rng.bytes(count * kind.itemsize), kind)


def elements(shape: Shape) -> int:
    """How many a shape has."""
    return math.prod(shape)
