# SPDX-License-Identifier: Apache-2.0
"""Where weights come from: a checkpoint's mapped file, or names and positions."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from nccl_m2n.dtypes import item_size
from nccl_m2n.refit import Manifest
from nccl_m2n.refit.checkpoint import Checkpoint

Bytes: TypeAlias = npt.NDArray[np.uint8]
Index: TypeAlias = Sequence[
    slice | npt.NDArray[np.int64]
]  # one a dimension: a run, or the indices themselves

_GOLDEN = 0x9E3779B97F4A7C15  # multiplied by it, neighbouring positions differ in their high bits


class Weights(ABC):
    """The values of a model, any part of any tensor at a time."""

    label: str  # where they come from

    @abstractmethod
    def read(self, name: str, index: Index) -> Bytes:
        """A part of a tensor, as bytes of shape ``(*extents, bytes of an item)``.

        Args:
            name: The tensor.
            index: What is wanted of each dimension; slices have a step of 1.
        """


class StoredWeights(Weights):
    """Those of a checkpoint. Only what is read is touched; runs are views of the mapped file."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.label = str(checkpoint.path)

    def read(self, name: str, index: Index) -> Bytes:
        """See `Weights.read`."""
        info = self._checkpoint.manifest[name]
        array = self._checkpoint.read_bytes(name).reshape(*info.shape, item_size(info.dtype))
        for dim, wanted in enumerate(index):  # one by one: together, index arrays would mean something else
            array = array[(slice(None),) * dim + (wanted,)]
        return array


class MadeUpWeights(Weights):
    """Values that tell their tensor and their position in it; the same wherever they are made."""

    label = "made up from names and positions"

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest

    def read(self, name: str, index: Index) -> Bytes:
        """See `Weights.read`."""
        info = self._manifest[name]
        item = item_size(info.dtype)
        position = np.zeros((), np.uint64)
        for dim, wanted in enumerate(index):
            stride = math.prod(info.shape[dim + 1 :])
            run = np.arange(wanted.start, wanted.stop) if isinstance(wanted, slice) else wanted
            position = position[..., None] + (run * stride).astype(np.uint64)
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
        words = [_mixed(position, seed + part) for part in range(-(-item // 8))]
        made = np.stack(words, axis=-1).view(np.uint8)
        return made if item > 8 else made[..., 8 - item :]  # the high bytes of little-endian words


def _mixed(position: Any, seed: int) -> Any:
    return position * np.uint64(_GOLDEN) + np.uint64(seed * _GOLDEN % 2**64)
