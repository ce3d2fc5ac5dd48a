# SPDX-License-Identifier: Apache-2.0
"""One word, one meaning: the vocabulary of docs/plans.md against the code."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import nccl_m2n

PACKAGE = Path(nccl_m2n.__file__).parent
PAGE = PACKAGE.parent / "docs" / "plans.md"
ROOMS = ("layout", "planning", "simulation")

# Words that used to mean some bytes, beside others that mean the same.
DROPPED = {"block", "stretch", "strand", "site", "reach", "slot"}

pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="needs the source tree")


def vocabulary() -> list[str]:
    """The words of the table, in order."""
    return re.findall(r"^\| \*([\w ]+)\* \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for room in ROOMS:
        for path in sorted((PACKAGE / room).glob("*.py")):
            yield path, ast.parse(path.read_text(encoding="utf-8"))


def names(tree: ast.AST) -> Iterator[str]:
    """Every name that code gives to something, and every field of a table."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.value


def words(name: str) -> set[str]:
    """The words in a name, in lower case and in the singular."""
    found = {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}
    return found | {word.removesuffix("s") for word in found}


def test_each_word_is_explained_once() -> None:
    assert [word for word, times in Counter(vocabulary()).items() if times > 1] == []
    assert len(vocabulary()) > 15


def test_every_table_of_planning_is_in_the_vocabulary() -> None:
    tables = {
        target.id.lower()
        for _, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("np.dtype(")
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    assert tables >= {"bundle", "flow", "hop", "chunk", "span"}
    assert {word for word in tables if not any(each.startswith(word) for each in vocabulary())} == set()


def test_every_word_is_used() -> None:
    used = set().union(
        *(words(name) for path in PACKAGE.rglob("*.py") for name in names(ast.parse(path.read_text())))
    )
    assert [word for word in vocabulary() if not set(word.split()) & used] == []


def test_dropped_words_name_nothing() -> None:
    """What a delta compares lies in slots of its own, see `nccl_m2n.planning.delta`."""
    found = {(path.stem, name) for path, tree in trees() for name in names(tree) if words(name) & DROPPED}
    assert {one for one in found if not one[0].startswith("delta") and one[1] != "dense_slots"} == set()
