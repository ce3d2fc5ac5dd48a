# SPDX-License-Identifier: Apache-2.0
"""Where weights come from: a checkpoint's mapped file, or names and positions."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from nccl_m2n.dtypes import item_size
from nccl_m2n.models import Manifest
from nccl_m2n.models.checkpoint import Checkpoint
from nccl_m2n.typing import Ints

Bytes: TypeAlias = npt.NDArray[np.uint8]
Index: TypeAlias = Sequence[
    slice | npt.NDArray[np.int64]
]  # one a dimension: a run, or the indices themselves

_GOLDEN = 0x9E3779B97F4A7C15
_DIMENSION = 0x632BE59BD9B4E019  # tells the numbers of one dimension from those of the next


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
    """Values that tell their tensor and their position in it; the same wherever they are made.

    An element is the sum of one scattered number for each of its indices, in the width of its type: made as
    fast as memory is written, and another one wherever rows, columns, dimensions or tensors were mistaken.
    """

    label = "the weights made up from names and positions"

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest

    def read(self, name: str, index: Index) -> Bytes:
        """See `Weights.read`."""
        item = item_size(self._manifest[name].dtype)
        word = min(item, 8)
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
        made = _scattered(np.arange(item // word), seed, word)
        for dim, wanted in reversed(list(enumerate(index))):
            indices = np.arange(wanted.start, wanted.stop) if isinstance(wanted, slice) else wanted
            made = np.add.outer(_scattered(indices, seed + (dim + 1) * _DIMENSION, word), made)
        return made.view(np.uint8)


def _scattered(indices: Ints, seed: int, word: int) -> npt.NDArray[np.uint64]:
    """A number of `word` bytes for each index that looks like none of its neighbours' (splitmix64)."""
    mixed = (indices.astype(np.uint64) + np.uint64(seed % 2**64)) * np.uint64(_GOLDEN)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return (mixed >> np.uint64(64 - 8 * word)).astype(f"u{word}")
