# SPDX-License-Identifier: Apache-2.0
"""What a model consists of: the name, shape and dtype of every parameter, and nothing of its values."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from nccl_m2n.checks import made_by, plain_text, several, shown, table_of, whole_numbers
from nccl_m2n.dtypes import dtype_name, item_size
from nccl_m2n.errors import CommandError, LayoutError


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Shape and dtype of one parameter."""

    shape: tuple[int, ...]
    dtype: str  # canonical name, such as "bfloat16"

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", whole_numbers(self.shape, "the shape of a tensor", least=0))
        object.__setattr__(self, "dtype", dtype_name(self.dtype))

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.size * item_size(self.dtype)


def _info(pair: object) -> TensorInfo:
    parts = several(pair, "shape and dtype")
    if len(parts) != 2:
        raise LayoutError(f"expected a shape and a dtype of each tensor, got {shown(pair)}")
    return TensorInfo(*parts)


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
        tensors: Mapping[str, TensorInfo | tuple[tuple[int, ...], object]],
        label: str = "",
        config: Mapping[str, object] | None = None,
    ) -> None:
        self._tensors = {
            plain_text(name, "the name of a tensor"): info if isinstance(info, TensorInfo) else _info(info)
            for name, info in table_of(tensors, "from name to shape and dtype").items()
        }
        self.label = plain_text(label, "label") if label != "" else ""
        self.config = config if config is None else table_of(config, "as a configuration")

    @classmethod
    def load(cls, source: str | Path, **options: object) -> Manifest:
        """The manifest of a name or a path; see :func:`nccl_m2n.models.find.load`."""
        from nccl_m2n.models import find

        return find.load(source, **options)

    @classmethod
    def from_file(cls, path: str | Path) -> Manifest:
        """The manifest of a ``.safetensors`` file or of a sharded checkpoint's ``.index.json``."""
        from nccl_m2n.models import find

        return find.from_file(path)

    @classmethod
    def from_config(cls, config: Mapping[str, object] | str | Path, **options: object) -> Manifest:
        """The manifest that a configuration describes; see :func:`nccl_m2n.models.find.from_config`."""
        from nccl_m2n.models import find

        return find.from_config(config, **options)

    @classmethod
    def named(cls, name: str, **options: object) -> Manifest:
        """The manifest of a model of the catalogue; see :func:`nccl_m2n.models.find.named`."""
        from nccl_m2n.models import find

        return find.named(name, **options)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(info.nbytes for info in self._tensors.values())

    def select(self, keep: str | Callable[[str], bool]) -> Manifest:
        """The part whose names match a shell-style pattern, or for which ``keep(name)`` is true."""
        if not isinstance(keep, str) and (not callable(keep) or isinstance(keep, type)):
            raise LayoutError(f"expected a pattern or a function of a name, got {shown(keep)}")
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


def as_manifest(value: object) -> Manifest:
    """A manifest as it is, or an error."""
    return made_by(
        value, Manifest, "the model", error=CommandError, hint="Manifest.load(name or path) makes one"
    )
