# SPDX-License-Identifier: Apache-2.0
"""Who may import whom: the order of the house, and nothing heavy on the way in."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import nccl_m2n

PACKAGE = Path(nccl_m2n.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))

GROUND = {"_moved", "checks", "dtypes", "errors", "text", "typing"}  # importable from everywhere
PURE = GROUND | {"layout", "planning", "simulation"}  # values in, values out

# Each part of the package, and the parts below it that it may name. `transport` moves bytes and knows no
# plans, only the topology that it discovers. Pictures (`show`) look at values; everyone else may import
# them, but inside functions only.
MAY_IMPORT = {
    **dict.fromkeys(GROUND, GROUND),
    "layout": GROUND,
    "planning": GROUND | {"layout"},
    "simulation": GROUND | {"layout", "planning"},
    "transport": GROUND | {"planning.topology"},
    "execution": GROUND | {"layout", "planning", "transport"},
    "refit": GROUND | {"layout", "planning", "transport", "execution"},
    "models": GROUND,
    "sharding": GROUND | {"layout", "models"},
    "storage": GROUND | {"layout", "models", "sharding", "refit"},
    "interop": GROUND | {"layout", "planning", "transport", "execution", "refit"},
    "show": PURE,
    "resharding": GROUND | {"layout", "planning", "transport", "execution", "interop"},
}
# A method that users call as `plan.bind(...)` is a door into a later part; it names that part in its body,
# and in what only a type checker reads.
DOORS = {"planning.plan": {"execution", "transport"}}
ON_TOP = {"__init__", "__main__", "cli", "measure"}  # they may name every part

# The only modules that may import a package with a device behind it, even inside a function, by how their
# names begin.
DEVICE_MODULES = {
    "nccl": ("transport.nccl_library",),
    "cupy": ("transport.nccl", "transport.gpu", "execution.device", "execution.kernels"),
}


class Import(NamedTuple):
    name: str  # absolute, dotted, with the imported name at its end for `from a import b`
    line: int
    deferred: bool  # inside a function, or for type checkers only


def module_name(path: Path) -> str:
    """The dotted name below the package: 'layout.box', 'layout' for layout/__init__.py."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1]) if len(parts) > 1 and parts[-1] == "__init__" else ".".join(parts)


def part_of(path: Path) -> str:
    return module_name(path).split(".")[0]


def imports(path: Path) -> Iterator[Import]:
    """Every import statement of a module, those for type checkers included, relative ones resolved."""
    package = ("nccl_m2n", *path.relative_to(PACKAGE).parent.parts)

    def walk(node: ast.AST, deferred: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, child.lineno, deferred) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = package[: len(package) - child.level + 1] if child.level else ()
                stem = ".".join([*base, *(child.module or "").split(".")]).strip(".")
                yield from (Import(f"{stem}.{alias.name}", child.lineno, deferred) for alias in child.names)
            else:
                yield from walk(child, deferred or is_deferred(child))

    yield from walk(ast.parse(path.read_text(encoding="utf-8")), False)


def is_deferred(node: ast.AST) -> bool:
    """Whether what stands below is not executed when the module is imported."""
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name):
        return node.test.id == "TYPE_CHECKING"
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def within(name: str, part: str) -> bool:
    return name == part or name.startswith(part + ".")


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_an_import_points_only_to_an_earlier_part(path: Path) -> None:
    part = part_of(path)
    if part in ON_TOP:
        return
    assert part in MAY_IMPORT, f"{part} is new: say in MAY_IMPORT which parts it may import"
    allowed = MAY_IMPORT[part] | {part}
    wrong = []
    for item in imports(path):
        if not within(item.name, "nccl_m2n"):
            continue
        name = item.name.removeprefix("nccl_m2n").lstrip(".")
        later = {"show"} | DOORS.get(module_name(path), set()) if item.deferred else set()
        if not any(within(name, one) for one in allowed | later):
            wrong.append(f"{path}:{item.line} imports {item.name}")
    assert not wrong, f"{part} may import {sorted(allowed)}:\n" + "\n".join(wrong)


@pytest.mark.parametrize("path", [p for p in MODULES if part_of(p) in PURE], ids=module_name)
def test_pure_parts_import_numpy_and_the_standard_library(path: Path) -> None:
    allowed = sys.stdlib_module_names | {"numpy", "nccl_m2n"}
    assert [i for i in imports(path) if i.name.split(".")[0] not in allowed] == []


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_devices_have_their_own_modules(path: Path) -> None:
    for package, beginnings in DEVICE_MODULES.items():
        if not module_name(path).startswith(beginnings):
            assert [i for i in imports(path) if within(i.name, package)] == []


def test_importing_the_package_imports_only_numpy_and_the_standard_library() -> None:
    script = """if True:
        import sys
        before = set(sys.modules)
        import nccl_m2n
        print(*{name.split(".")[0] for name in set(sys.modules) - before})
    """
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert set(run.stdout.split()) - sys.stdlib_module_names <= {"nccl_m2n", "numpy"}


def test_public_names_are_there() -> None:
    exported = getattr(nccl_m2n, "__all__", [])
    assert [name for name in exported if not hasattr(nccl_m2n, name)] == []
    assert sorted(set(exported)) == sorted(exported)


@pytest.mark.parametrize(
    ("line", "name", "deferred"),
    [
        ("from nccl_m2n.planning.plan import Plan", "nccl_m2n.planning.plan.Plan", False),
        ("from ..planning import plan", "nccl_m2n.planning.plan", False),
        ("from . import box", "nccl_m2n.layout.box", False),
        ("import nccl_m2n.transport", "nccl_m2n.transport", False),
        ("def f():\n    from nccl_m2n.show import html", "nccl_m2n.show.html", True),
        ("if TYPE_CHECKING:\n    import numpy", "numpy", True),
    ],
)
def test_the_reader_of_imports_sees(tmp_path, monkeypatch, line: str, name: str, deferred: bool) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    (tmp_path / "layout").mkdir()
    path = tmp_path / "layout" / "layout.py"
    path.write_text(line)
    assert [(i.name, i.deferred) for i in imports(path)] == [(name, deferred)]
