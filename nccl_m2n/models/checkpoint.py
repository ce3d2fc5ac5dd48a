# SPDX-License-Identifier: Apache-2.0
"""Reading safetensors checkpoints: one file, or several with an index.

The format is small: eight bytes with the header's length, a JSON header, then the tensors' bytes. It is read
here so that a manifest needs no further package, and so that a damaged file is told from a sound one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nccl_m2n.errors import CommandError
from nccl_m2n.models.manifest import Manifest, TensorInfo

_DTYPES = {  # the format's name -> ours, bytes of an item
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "I16": ("int16", 2),
    "U16": ("uint16", 2),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I32": ("int32", 4),
    "U32": ("uint32", 4),
    "F32": ("float32", 4),
    "I64": ("int64", 8),
    "U64": ("uint64", 8),
    "F64": ("float64", 8),
    "C64": ("complex64", 8),
}
_LARGEST_HEADER = 100_000_000  # the format's own limit


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor's place in a checkpoint."""

    info: TensorInfo
    path: Path  # the file that holds it
    start: int  # first byte in that file
    stop: int  # one past the last


class Checkpoint:
    """A safetensors checkpoint on disk.

    Attributes:
        manifest: Names, shapes and dtypes; its ``config`` is the ``config.json`` that lies beside, if any.
    """

    def __init__(self, tensors: dict[str, StoredTensor], path: Path) -> None:
        self._tensors = tensors
        self.path = path
        self.manifest = Manifest({n: t.info for n, t in tensors.items()}, path.name, _config_beside(path))

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Open a ``.safetensors`` file, an ``.index.json`` or a directory that holds either.

        Raises:
            CommandError: If a file is missing, is no safetensors file, or is truncated.
        """
        path = Path(path)
        if path.is_dir():
            path = find_in_directory(path)
        tensors = read_index(path) if path.suffix == ".json" else read_header(path)
        return cls(tensors, path)

    def read_bytes(self, name: str) -> np.ndarray[Any, Any]:
        """The bytes of one tensor as a read-only one-dimensional uint8 array, mapped and not copied."""
        stored = self._tensors[name]
        if stored.start == stored.stop:
            return np.empty(0, np.uint8)
        mapped = np.memmap(stored.path, np.uint8, "r")
        return mapped[stored.start : stored.stop]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def find_in_directory(path: Path) -> Path:
    """The file of a model directory that tells most: its checkpoint's, or else its configuration."""
    for name in ("model.safetensors.index.json", "model.safetensors", "config.json"):
        if (path / name).exists():
            return path / name
    files = sorted(path.glob("*.safetensors"))
    if len(files) == 1:
        return files[0]
    raise CommandError(
        f"{path} holds no model.safetensors, model.safetensors.index.json or config.json"
        + (f", and {len(files)} other .safetensors files: name one of them" if files else "")
    )


def read_header(path: Path) -> dict[str, StoredTensor]:
    """What a ``.safetensors`` file holds, in the order of the bytes."""
    try:
        length = path.stat().st_size
        with path.open("rb") as file:
            start, header = _parse_header(path, file.read(8), file, length)
    except OSError as error:
        raise CommandError(f"cannot read the checkpoint {path}: {error.strerror or error}") from None
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            tensors[name] = _stored(path, name, entry, start, length)
    return dict(sorted(tensors.items(), key=lambda item: (item[1].start, item[0])))


def read_index(path: Path) -> dict[str, StoredTensor]:
    """What a sharded checkpoint holds, by its ``.index.json``, in the index's order."""
    try:
        where = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        files = {str(file): path.parent / str(file) for file in where.values()}
    except OSError as error:
        raise CommandError(f"cannot read the index {path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CommandError(f"{path} is no safetensors index: it has no 'weight_map' object") from None
    headers = {file: read_header(file_path) for file, file_path in files.items()}
    missing = [name for name, file in where.items() if name not in headers[str(file)]]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CommandError(f"{path} places {missing[0]}{more} in {where[missing[0]]}, which does not hold it")
    return {name: headers[str(file)][name] for name, file in where.items()}


def _parse_header(path: Path, prefix: bytes, file: Any, length: int) -> tuple[int, dict[str, Any]]:
    if len(prefix) < 8:
        raise CommandError(
            f"{path} is no safetensors file: it has {length} bytes, fewer than a header's length takes"
        )
    size = int.from_bytes(prefix, "little")
    if size > _LARGEST_HEADER:
        raise CommandError(f"{path} is no safetensors file: its first 8 bytes give a header of {size} bytes")
    if 8 + size > length:
        raise CommandError(f"{path} is truncated: its header takes {8 + size} bytes, the file has {length}")
    try:
        header = json.loads(file.read(size))
    except ValueError:
        raise CommandError(f"{path} is no safetensors file: its header is not JSON") from None
    if not isinstance(header, dict):
        raise CommandError(f"{path} is no safetensors file: its header is not a JSON object")
    return 8 + size, header


def _stored(path: Path, name: str, entry: Any, start: int, length: int) -> StoredTensor:
    try:
        code, shape = entry["dtype"], tuple(int(n) for n in entry["shape"])
        first, last = (int(n) for n in entry["data_offsets"])
    except (KeyError, TypeError, ValueError):
        raise CommandError(
            f"{path}: the header's entry of {name} lacks dtype, shape or data_offsets"
        ) from None
    if code not in _DTYPES:
        raise CommandError(f"{path}: {name} has dtype {code}; known are {', '.join(_DTYPES)}")
    dtype, item = _DTYPES[code]
    expected = math.prod(shape) * item
    if min(shape, default=0) < 0 or first < 0 or last - first != expected:
        raise CommandError(
            f"{path}: {name} of shape {shape} and dtype {code} takes {expected} bytes, "
            f"its offsets give {last - first}"
        )
    if start + last > length:
        raise CommandError(f"{path} is truncated: {name} ends at byte {start + last}, the file has {length}")
    return StoredTensor(TensorInfo(shape, dtype), path, start + first, start + last)


def _config_beside(path: Path) -> dict[str, Any] | None:
    try:
        config = json.loads((path.parent / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None
