# SPDX-License-Identifier: Apache-2.0
"""Where weights come from: a checkpoint's mapped file, or names and positions."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from nccl_m2n.dtypes import element_unit, item_size
from nccl_m2n.measure.values import Run, made_up
from nccl_m2n.models import Manifest
from nccl_m2n.models.checkpoint import Checkpoint

Bytes: TypeAlias = npt.NDArray[np.uint8]


class Weights(ABC):
    """The values of a model, any part of any tensor at a time."""

    label: str  # where they come from

    @abstractmethod
    def read(self, name: str, index: Sequence[Run]) -> Bytes:
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

    def read(self, name: str, index: Sequence[Run]) -> Bytes:
        """See `Weights.read`."""
        info = self._checkpoint.manifest[name]
        array = self._checkpoint.read_bytes(name).reshape(*info.shape, item_size(info.dtype))
        for dim, wanted in enumerate(index):  # one by one: together, index arrays would mean something else
            array = array[(slice(None),) * dim + (wanted,)]
        return array


class MadeUpWeights(Weights):
    """Values that tell their tensor and their position in it."""

    label = "the weights made up from names and positions"

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest

    def read(self, name: str, index: Sequence[Run]) -> Bytes:
        """See `Weights.read`."""
        item = item_size(self._manifest[name].dtype)
        word = min(element_unit(item), 8)
        seed = np.frombuffer(hashlib.sha256(name.encode()).digest(), "<u8", 1)
        return np.asarray(made_up(seed, [*index, slice(0, item // word)], word)[0].view(np.uint8))
