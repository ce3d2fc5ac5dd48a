# SPDX-License-Identifier: Apache-2.0
"""Tiny models of many families as transformers makes and saves them: names, shapes, types, configurations.

They lie beside in one file, so that the tests need no transformers; `record.py` makes it anew.
"""

from __future__ import annotations

import gzip
import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from nccl_m2n.models import Manifest

PATH = Path(__file__).with_name("tiny_models.json.gz")
_NUMBER = re.compile(r"\d+")
_DTYPES = {"BF16": "bfloat16", "F32": "float32", "I64": "int64"}


@dataclass(frozen=True)
class Tiny:
    """One model."""

    manifest: Manifest  # of its checkpoint, with its configuration
    plan: Mapping[str, str]  # transformers' own tensor-parallel plan: a module -> what becomes of it


def _read() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(gzip.decompress(PATH.read_bytes()))
    return found


def version() -> str:
    """Of the transformers that made them."""
    return str(_read()["transformers"])


@lru_cache(maxsize=1)
def models() -> dict[str, Tiny]:
    """By family."""
    found = _read()["models"]
    return {
        family: Tiny(Manifest(unpacked(one["tensors"]), family, one["config"]), one["plan"])
        for family, one in found.items()
    }


def unpacked(packed: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Names with shape and type, out of templates and the numbers in them."""
    made = {}
    for template, numbers in packed.items():
        name, code, *shape = template.split(" ")
        extents = tuple(int(n) for n in shape)
        for chosen in _chosen(numbers):
            values = iter(chosen)
            made[re.sub("#", lambda _, v=values: next(v), name)] = extents, _DTYPES[code]
    return made


def _chosen(numbers: str | list[str]) -> list[tuple[str, ...]]:
    if isinstance(numbers, list):
        return [tuple(one.split(" ")) for one in numbers]
    return list(itertools.product(*(one.split(",") for one in numbers.split(";")))) if numbers else [()]


def packed(tensors: Mapping[str, tuple[list[int], str]]) -> dict[str, str | list[str]]:
    """The reverse."""
    found: dict[str, list[str]] = {}
    for name, (shape, code) in tensors.items():
        template = " ".join([_NUMBER.sub("#", name), code, *map(str, shape)])
        found.setdefault(template, []).append(" ".join(_NUMBER.findall(name)))
    return {template: _ranges(numbers) for template, numbers in found.items()}


def _ranges(numbers: list[str]) -> str | list[str]:
    columns = [sorted(set(column), key=int) for column in zip(*(n.split() for n in numbers), strict=True)]
    text = ";".join(",".join(column) for column in columns)
    whole = sorted(" ".join(one) for one in _chosen(text)) == sorted(numbers)
    return text if whole else numbers
