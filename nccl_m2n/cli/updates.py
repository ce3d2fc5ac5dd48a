# SPDX-License-Identifier: Apache-2.0
"""What changes a model from step to step: a share of its elements, or Adam on masters in float32.

Nothing is remembered: what an element is after a step follows from its tensor's name, its place and the step, so that
replicas agree and any rank can say what any other should have.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from nccl_m2n.cli.weights import Bytes, Weights
from nccl_m2n.dtypes import item_size
from nccl_m2n.errors import CommandError
from nccl_m2n.measure.values import Run, made_up
from nccl_m2n.models import Manifest

Floats32: TypeAlias = npt.NDArray[np.float32]

RANDOM, ADAM = "random", "adam"
FLOATS = ("float32", "float16", "bfloat16")  # that Adam updates
BETAS, EPSILON = (np.float32(0.9), np.float32(0.999)), np.float32(1e-8)  # Adam's usual ones


@dataclass(frozen=True)
class Update:
    """What happens to the weights between two steps."""

    kind: str
    amount: float  # share of the elements, or learning rate

    @classmethod
    def parse(cls, text: str) -> Update:
        """From ``random:SHARE`` or ``adam:RATE``.

        Raises:
            CommandError: For anything else.
        """
        kind, _, number = text.partition(":")
        try:
            amount = float(number)
        except ValueError:
            amount = -1.0
        if kind in (RANDOM, ADAM) and 0 <= amount <= 1:
            return cls(kind, amount)
        raise CommandError(
            f"expected random:SHARE or adam:RATE, such as random:0.01 or adam:1e-6, up to 1, got {text!r}"
        )


def keep_as(manifest: Manifest, dtype: str) -> Manifest:
    """The model with its floats, those of two bytes and more, in one element type."""
    kept = {n: replace(info, dtype=dtype) if info.dtype in FLOATS else info for n, info in manifest.items()}
    return Manifest(kept, manifest.label, manifest.config)


class UpdatedWeights(Weights):
    """The values of a model after `step` steps.

    Args:
        weights: Those before the first one.
        stored: Their element types.
        kept: The element types that are moved.
        update: What a step does; None for nothing.
    """

    def __init__(self, weights: Weights, stored: Manifest, kept: Manifest, update: Update | None) -> None:
        self._weights, self._stored, self._kept, self._update = weights, stored, kept, update
        self.step = 0
        self.label = weights.label

    def read(self, name: str, index: Sequence[Run]) -> Bytes:
        """See `Weights.read`."""
        given = self._weights.read(name, index)
        stored, kept = self._stored[name].dtype, self._kept[name].dtype
        adam = self._update is not None and self._update.kind == ADAM and self.step > 0 and stored in FLOATS
        if adam or stored != kept:
            masters = as_float32(given, stored)
            given = from_float32(self._trained(masters, name, index) if adam else masters, kept)
        return self._swapped(given, name, index) if self._update and self._update.kind == RANDOM else given

    def _swapped(self, given: Bytes, name: str, index: Sequence[Run]) -> Bytes:
        """Other bits in a share of the elements, chosen anew in every step."""
        assert self._update is not None
        made = given.copy()
        for step in range(1, self.step + 1):
            numbers = _numbers(name, step, index).reshape(given.shape[:-1])
            made[..., 0] ^= np.where(numbers < self._update.amount, np.uint8(1 + step % 7), np.uint8(0))
        return made

    def _trained(self, masters: Floats32, name: str, index: Sequence[Run]) -> Floats32:
        """Masters after Adam's steps, with made-up gradients."""
        assert self._update is not None
        rate, (first, second) = np.float32(self._update.amount), BETAS
        mean, square, one = np.zeros_like(masters), np.zeros_like(masters), np.float32(1)
        for step in range(1, self.step + 1):
            gradient = (_numbers(name, step, index).reshape(masters.shape) - 0.5).astype(np.float32)
            mean = first * mean + (one - first) * gradient
            square = second * square + (one - second) * gradient * gradient
            scaled = (mean / (one - first**step)) / (np.sqrt(square / (one - second**step)) + EPSILON)
            with np.errstate(invalid="ignore"):  # a NaN that signals
                masters = masters - rate * scaled
        return masters


def _numbers(name: str, step: int, index: Sequence[Run]) -> npt.NDArray[np.float64]:
    """A number from 0 to below 1 for each element in each step."""
    seed = np.frombuffer(hashlib.sha256(f"{step} {name}".encode()).digest(), "<u8", 1)
    mixed = made_up(seed, index, 8)[0]
    mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(0x94D049BB133111EB)
    return np.asarray((mixed >> np.uint64(11)) * 2.0**-53)


def as_float32(given: Bytes, dtype: str) -> Floats32:
    """The values of bytes of shape ``(*extents, bytes of an item)``."""
    words = np.ascontiguousarray(given).view(f"u{item_size(dtype)}")[..., 0]
    if dtype == "bfloat16":
        return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(invalid="ignore"):  # a NaN that signals
        return np.asarray(words.view(dtype).astype(np.float32))


def from_float32(values: Floats32, dtype: str) -> Bytes:
    """The bytes of values, rounded to the nearest, to the even one of two."""
    if dtype == "bfloat16":
        words = np.ascontiguousarray(values).view(np.uint32)
        rounded = words + np.uint32(0x7FFF) + ((words >> np.uint32(16)) & np.uint32(1))
        quiet = words | np.uint32(0x400000)  # a NaN would be rounded to something else
        made = (np.where(np.isnan(values), quiet, rounded) >> np.uint32(16)).astype(np.uint16)
    else:
        with np.errstate(over="ignore", invalid="ignore"):
            made = np.ascontiguousarray(values.astype(dtype))
    return np.asarray(made[..., None].view(np.uint8))
