# SPDX-License-Identifier: Apache-2.0
"""Reading safetensors checkpoints: one file, or several with an index.

The format is small: eight bytes with the header's length, a JSON header, then the tensors' bytes. It is read
here so that a manifest needs no further package, and so that a damaged file is told from a sound one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from nccl_m2n.errors import CommandError
from nccl_m2n.models.manifest import Manifest, TensorInfo
from nccl_m2n.models.reading import (
    LARGEST_JSON,
    exists,
    parse_json,
    read_config,
    read_json,
    regular_size,
    shown,
    whole,
    within,
)

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
_MAX_NDIM = 8  # of a tensor that a layout can describe
_SHARD = re.compile(r"(.+)-(\d+)-of-(\d+)\.safetensors")
_MOST_FILES = 10_000
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.ckpt")


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

    def __init__(self, tensors: Mapping[str, StoredTensor], path: Path) -> None:
        self._tensors = dict(tensors)
        self.path = path
        self.manifest = Manifest({n: t.info for n, t in tensors.items()}, path.name, _config_beside(path))

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Open a ``.safetensors`` file, an ``.index.json`` or a directory that holds either.

        A file of several, such as ``model-00001-of-00003.safetensors``, stands for all of them where no
        index is beside it.

        Raises:
            CommandError: If a file is missing, is no safetensors file, or is truncated.
        """
        path = Path(path)
        if path.is_dir():
            path = find_in_directory(path)
        if path.suffix == ".json":
            return cls(read_index(path), path)
        tensors: dict[str, StoredTensor] = {}
        for part in _all_shards(path):
            found = read_header(part)
            twice = tensors.keys() & found.keys()
            if twice:
                raise CommandError(
                    f"{shown(min(twice))} is in {shown(part)} and in another part of its checkpoint"
                )
            tensors.update(found)
        return cls(tensors, path)

    def read_bytes(self, name: str) -> npt.NDArray[np.uint8]:
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


def find_in_directory(path: Path, *, weights: bool = False) -> Path:
    """The file of a model directory that tells most: its checkpoint's, or else its configuration.

    Args:
        path: The directory.
        weights: Refuse a directory whose weights are in files of other kinds; else its configuration does.

    Raises:
        CommandError: If it has neither, or weights that cannot be read.
    """
    for name in ("model.safetensors.index.json", "model.safetensors"):
        if exists(path / name):
            return path / name
    files = sorted(path.glob("*.safetensors"))
    sets = {found[1] for file in files if (found := _SHARD.fullmatch(file.name))}
    if len(files) == 1 or (len(sets) == 1 and all(map(_SHARD.fullmatch, (file.name for file in files)))):
        return files[0]
    if files:
        raise CommandError(
            f"{shown(path)} holds {len(files)} .safetensors files and no model.safetensors.index.json: name one of them"
        )
    others = [file.name for kind in _OTHER_WEIGHTS for file in sorted(path.glob(kind))]
    if others and (weights or not exists(path / "config.json")):
        raise CommandError(
            f"{shown(path)} holds its weights in {shown(others[0])}, and only .safetensors files are read here: "
            "convert them (transformers: save_pretrained), or move made-up weights with --made-up"
        )
    if exists(path / "config.json"):
        return path / "config.json"
    raise CommandError(
        f"{shown(path)} holds no model.safetensors, model.safetensors.index.json or config.json"
    )


def read_header(path: Path) -> dict[str, StoredTensor]:
    """What a ``.safetensors`` file holds, in the order of the bytes.

    Raises:
        CommandError: If it is no such file, is truncated, or its tensors do not lie end to end.
    """
    length = regular_size(path, "the checkpoint")
    start, header = _parse_header(path, length)
    tensors = [(n, _stored(path, n, e, start, length)) for n, e in header.items() if n != "__metadata__"]
    tensors.sort(key=lambda item: (item[1].start, item[1].stop))
    end = start
    for name, stored in tensors:
        if stored.start != end:
            which = "overlaps another tensor" if stored.start < end else "leaves a gap before it"
            raise CommandError(
                f"{shown(path)}: {name} {which}: it begins at byte {stored.start}, the last one ends at {end}"
            )
        end = stored.stop
    if end != length:
        raise CommandError(f"{shown(path)} has {length - end} bytes behind its last tensor")
    return dict(tensors)


def read_index(path: Path) -> dict[str, StoredTensor]:
    """What a sharded checkpoint holds, by its ``.index.json``, in the index's order.

    Raises:
        CommandError: If it is no index, or names files or tensors that are not there.
    """
    data = read_json(path, "the index")
    where = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(where, dict):
        raise CommandError(f"{shown(path)} is no safetensors index: it has no 'weight_map' object")
    files = {
        file: within(path.parent, file, shown(path)) for file in dict.fromkeys(map(_text, where.values()))
    }
    headers = {file: read_header(file_path) for file, file_path in files.items()}
    missing = [name for name, file in where.items() if name not in headers[_text(file)]]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CommandError(
            f"{shown(path)} places {shown(missing[0])}{more} in {where[missing[0]]}, which does not hold it"
        )
    return {name: headers[file][name] for name, file in where.items()}


def _text(value: object) -> str:
    return value if isinstance(value, str) else repr(value)[:80] + "\0"  # \0: no file's name


def _all_shards(path: Path) -> list[Path]:
    """The file, or all of its set where it is one of several."""
    found = _SHARD.fullmatch(path.name)
    if found is None:
        return [path]
    stem, number, count = found[1], found[2], int(found[3])
    names = [
        path.with_name(f"{stem}-{n:0{len(number)}}-of-{found[3]}.safetensors")
        for n in range(1, min(count, _MOST_FILES) + 1)
    ]
    missing = [name for name in names if not exists(name)]
    if missing or path not in names:
        raise CommandError(
            f"{shown(path)} is one of {count} files, and {shown((missing or [path])[0])} is not there"
        )
    return names


def _parse_header(path: Path, length: int) -> tuple[int, dict[str, object]]:
    try:
        with path.open("rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise CommandError(
                    f"{shown(path)} is no safetensors file: it has {length} bytes, "
                    "fewer than a header's length takes"
                )
            size = int.from_bytes(prefix, "little")
            if size > LARGEST_JSON:
                raise CommandError(
                    f"{shown(path)} is no safetensors file: its first 8 bytes give a header of {size} bytes"
                )
            if 8 + size > length:
                raise CommandError(
                    f"{shown(path)} is truncated: its header takes {8 + size} bytes, the file has {length}"
                )
            data = file.read(size)
    except OSError as error:
        raise CommandError(f"cannot read the checkpoint {shown(path)}: {error.strerror or error}") from None
    header = parse_json(data, f"{shown(path)} is no safetensors file: its header cannot be read", finite=True)
    if not isinstance(header, dict):
        raise CommandError(f"{shown(path)} is no safetensors file: its header is not a JSON object")
    return 8 + size, header


def _stored(path: Path, name: str, entry: object, start: int, length: int) -> StoredTensor:
    if not name or not name.isprintable():
        raise CommandError(f"{shown(path)} has a tensor called {name!r:.80}, which is no parameter's name")
    code = entry.get("dtype") if isinstance(entry, dict) else None
    shape, offsets = (_numbers(entry, key) for key in ("shape", "data_offsets"))
    if not isinstance(code, str) or shape is None or offsets is None or len(offsets) != 2:
        raise CommandError(f"{shown(path)}: the header's entry of {name} lacks dtype, shape or data_offsets")
    if len(shape) > _MAX_NDIM:
        raise CommandError(f"{shown(path)}: {name} has {len(shape)} dimensions; there may be {_MAX_NDIM}")
    if code not in _DTYPES:
        raise CommandError(
            f"{shown(path)}: {name} has dtype {shown(code[:20])}; known are {', '.join(_DTYPES)}"
        )
    dtype, item = _DTYPES[code]
    expected, (first, last) = math.prod(shape) * item, offsets
    if last - first != expected:
        raise CommandError(
            f"{shown(path)}: {name} of shape {shape} and dtype {dtype} takes {expected} bytes, "
            f"its offsets give {last - first}"
        )
    if start + last > length:
        raise CommandError(
            f"{shown(path)} is truncated: {name} ends at byte {start + last}, the file has {length}"
        )
    return StoredTensor(TensorInfo(shape, dtype), path, start + first, start + last)


def _numbers(entry: object, key: str) -> tuple[int, ...] | None:
    """A list of whole numbers; None for anything else."""
    value = entry.get(key) if isinstance(entry, dict) else None
    return tuple(value) if isinstance(value, list) and all(map(whole, value)) else None


def _config_beside(path: Path) -> dict[str, object] | None:
    beside = path.parent / "config.json"
    return read_config(beside) if exists(beside) else None
