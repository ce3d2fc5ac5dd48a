# SPDX-License-Identifier: Apache-2.0
"""What a model consists of: the name, shape and dtype of every parameter, and nothing of its values."""

from __future__ import annotations

import fnmatch
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nccl_m2n.dtypes import dtype_name, item_size
from nccl_m2n.errors import CommandError


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Shape and dtype of one parameter."""

    shape: tuple[int, ...]
    dtype: str  # canonical name, such as "bfloat16"

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.size * item_size(self.dtype)


class Manifest(Mapping[str, TensorInfo]):
    """An ordered mapping from parameter name to :class:`TensorInfo`.

    Args:
        tensors: Name to ``TensorInfo``, or to a pair ``(shape, dtype)``.
        label: Where it came from, for messages.
        config: The Hugging Face configuration behind it where there is one; rules read head counts from it.

    Example:
        >>> from nccl_m2n.models import Manifest
        >>> manifest = Manifest.named("Llama-3.1-8B")
        >>> manifest["model.layers.0.self_attn.k_proj.weight"].shape
        (1024, 4096)
        >>> len(manifest), manifest.nbytes
        (291, 16060522496)
    """

    def __init__(
        self,
        tensors: Mapping[str, TensorInfo | tuple[tuple[int, ...], Any]],
        label: str = "",
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self._tensors = {
            name: info if isinstance(info, TensorInfo) else TensorInfo(tuple(info[0]), dtype_name(info[1]))
            for name, info in tensors.items()
        }
        self.label = label
        self.config = config

    @classmethod
    def load(cls, source: str | Path, **options: Any) -> Manifest:
        """The manifest of whatever is meant: a shipped model's name or a path.

        A path is a ``.safetensors`` file, an index, a ``config.json``, or a directory that holds one of
        them (its checkpoint, or else its configuration).

        Args:
            source: A name or a path.
            **options: Passed to :meth:`from_config` where a configuration decides (``fp8=``, ``mtp=``, …).

        Raises:
            CommandError: If there is no such model or file, or the file is damaged.
        """
        from nccl_m2n.models import checkpoint

        path = Path(source)
        if not path.exists():
            return cls.named(str(source), **options)
        if path.is_dir():
            path = checkpoint.find_in_directory(path)
        if path.name.endswith(".safetensors") or path.name.endswith(".index.json"):
            return checkpoint.Checkpoint.open(path).manifest
        return cls.from_config(path, **options)

    @classmethod
    def from_file(cls, path: str | Path) -> Manifest:
        """The manifest of a ``.safetensors`` file or of a sharded checkpoint's ``.index.json``."""
        from nccl_m2n.models import checkpoint

        return checkpoint.Checkpoint.open(Path(path)).manifest

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | str | Path, **options: Any) -> Manifest:
        """The manifest that a Hugging Face configuration (a mapping or a ``config.json``) describes.

        Args:
            config: The configuration; its ``model_type`` chooses the family.
            **options: ``dtype="bfloat16"``; ``fp8=True`` for block-scaled weights and ``mtp=False`` to leave
                the multi-token prediction layers out (DeepSeek family); ``mxfp4=True`` (GPT-OSS).

        Raises:
            CommandError: If the family is unknown or the configuration lacks a key.
        """
        from nccl_m2n.models import known

        label = "config"
        if not isinstance(config, Mapping):
            label = str(config)
            try:
                config = json.loads(Path(config).read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise CommandError(f"cannot read the configuration {label}: {error}") from None
            if not isinstance(config, Mapping):
                raise CommandError(f"{label} is not a model's configuration: it is not a JSON object")
        return cls(known.describe(config, label, **options), label, config)

    @classmethod
    def named(cls, name: str, **options: Any) -> Manifest:
        """The manifest of a shipped model, such as ``"Llama-3.1-8B"`` (case and ``-``/``_`` do not matter).

        Raises:
            CommandError: If no such model is shipped; the message lists the ones that are.
        """
        from nccl_m2n.models import known

        label, config = known.shipped(name)
        return cls(known.describe(config, label, **options), label, config)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(info.nbytes for info in self._tensors.values())

    def select(self, keep: str | Callable[[str], bool]) -> Manifest:
        """The part whose names match a shell-style pattern, or for which ``keep(name)`` is true."""
        wanted = (lambda name: fnmatch.fnmatchcase(name, keep)) if isinstance(keep, str) else keep
        kept = {name: info for name, info in self._tensors.items() if wanted(name)}
        return Manifest(kept, self.label, self.config)

    def unstack(self) -> Manifest:
        """The same with stacked experts one by one: ``experts.down_proj`` becomes ``experts.0.down_proj``, ….

        For models whose checkpoints stack them (GPT-OSS), where one side keeps each expert by itself: both
        sides then use these names.
        """
        made: dict[str, TensorInfo] = {}
        for name, info in self._tensors.items():
            at, stacked, part = name.partition(".experts.")
            if not stacked or part[0].isdigit():
                made[name] = info
                continue
            one = TensorInfo(info.shape[1:], info.dtype)
            made.update({f"{at}.experts.{expert}.{part}": one for expert in range(info.shape[0])})
        return Manifest(made, self.label, self.config)

    def __getitem__(self, name: str) -> TensorInfo:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"<Manifest {self.label or 'of'} {len(self):,} tensors, {self.nbytes / 1e9:.2f} GB>"

    def __str__(self) -> str:
        width = max((len(name) for name in self._tensors), default=0)
        lines = [f"{name:<{width}}  {info.dtype:<10} {info.shape}" for name, info in self._tensors.items()]
        return "\n".join([repr(self)[1:-1], *lines])
