# SPDX-License-Identifier: Apache-2.0
"""Reading JSON that strangers wrote: regular files of bounded size, and one line that says what is wrong."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from nccl_m2n.errors import CommandError

LARGEST_JSON = 100_000_000  # bytes; also the limit of safetensors for a header
# Hugging Face's cache keeps files as links from snapshots/REVISION/ to blobs/ beside snapshots/.
_SNAPSHOTS, _BLOBS = "snapshots", "blobs"


def regular_size(path: Path, what: str) -> int:
    """Bytes of a regular file.

    Raises:
        CommandError: If there is none, or it is a folder, a FIFO or a device.
    """
    try:
        found = path.stat()
    except (OSError, ValueError) as error:
        raise CommandError(f"cannot read {what} {shown(path)}: {_reason(error)}") from None
    if not stat.S_ISREG(found.st_mode):
        raise CommandError(f"cannot read {what} {shown(path)}: it is no regular file")
    return found.st_size


def read_json(path: Path, what: str) -> object:
    """What a JSON file says.

    Args:
        path: The file.
        what: What it is, for messages: ``"the configuration"``.

    Raises:
        CommandError: If it cannot be read, is too large, or is no JSON.
    """
    size = regular_size(path, what)
    if size > LARGEST_JSON:
        raise CommandError(f"cannot read {what} {shown(path)}: it has {size:,} bytes, too many")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CommandError(f"cannot read {what} {shown(path)}: {_reason(error)}") from None
    return parse_json(data, f"cannot read {what} {shown(path)}")


def parse_json(data: bytes, failed: str, *, finite: bool = False) -> object:
    """What JSON text says; no key twice, no nesting deeper than the stack.

    Args:
        data: UTF-8.
        failed: How the message begins if it is no JSON.
        finite: Refuse Infinity and NaN, which configurations may have.

    Raises:
        CommandError: If it is no such JSON.
    """
    constant: Callable[[str], float] = _refuse_constant if finite else float
    try:
        return json.loads(data.decode(), object_pairs_hook=_object, parse_constant=constant)
    except RecursionError:
        raise CommandError(f"{failed}: it is nested too deeply") from None
    except ValueError as error:
        raise CommandError(f"{failed}: {_reason(error)}") from None


def read_config(path: Path) -> dict[str, object]:
    """A model's ``config.json``.

    Raises:
        CommandError: If it cannot be read or is no JSON object.
    """
    config = read_json(path, "the configuration")
    if not isinstance(config, dict):
        raise CommandError(f"{shown(path)} is not a model's configuration: it is not a JSON object")
    return config


def whole(value: object) -> bool:
    """Whether a JSON value is a whole number of 0 or more that an array's extent could be."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**48


def within(folder: Path, name: object, source: str) -> Path:
    """The file that an index names, in its own folder.

    Args:
        folder: Where the index lies.
        name: What it calls the file.
        source: The index, for messages.

    Raises:
        CommandError: If the name is no relative path, or leads out of the folder, by a link too.
    """
    if not isinstance(name, str) or not name or not name.isprintable():
        raise CommandError(f"{source} names the file {name!r:.80}, which is no file's name")
    path = Path(name)
    if not path.is_absolute() and ".." not in path.parts:
        found, allowed = (folder / path).resolve(), [folder.resolve()]
        if folder.parent.name == _SNAPSHOTS:
            allowed.append((folder.parent.parent / _BLOBS).resolve())
        if any(found.is_relative_to(root) for root in allowed):
            return folder / path
    raise CommandError(f"{source} names the file {shown(name)}, which lies outside of its folder")


def exists(path: str | Path) -> bool:
    """Whether there is such a file or folder; False for what cannot be the name of one."""
    try:
        return os.path.exists(path)
    except ValueError:
        return False


def shown(name: str | Path) -> str:
    """A name as it can stand in one line of a message."""
    text = str(name)
    return text if text.isprintable() and len(text) <= 400 else f"{text[:400]!r}"


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made: dict[str, object] = {}
    for key, value in pairs:
        if key in made:
            raise ValueError(f"it has the key {shown(key)} twice")
        made[key] = value
    return made


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"it has the number {text}")


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return "it is not JSON"
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    if isinstance(error, OSError):
        return str(error.strerror or error)
    return str(error)
