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
TYPES = "for types"
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
# A method that users or notebooks call as `plan.bind(...)` is a door into a later part; it names that part in its body,
# and in what only a type checker reads. There are no other doors, and without them no circles.
DOORS = {
    "planning.plans": {"bind": {"execution", "transport"}, "_repr_html_": {"show"}},
    "layout.layout": {"_repr_html_": {"show"}},
    "models.manifest": {name: {"models.find"} for name in ("load", "from_file", "from_config", "named")},
}
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
    function: str | None  # in which it stands; TYPES for what only type checkers read; None for eager ones

    @property
    def deferred(self) -> bool:
        """Whether the module can be imported without it."""
        return self.function is not None


def module_name(path: Path) -> str:
    """The dotted name below the package: 'layout.box', 'layout' for layout/__init__.py."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1]) if len(parts) > 1 and parts[-1] == "__init__" else ".".join(parts)


NAMES = {module_name(path) for path in MODULES}


def part_of(path: Path) -> str:
    return module_name(path).split(".")[0]


def imports(path: Path) -> Iterator[Import]:
    """Every import statement of a module, those for type checkers included, relative ones resolved."""
    package = ("nccl_m2n", *path.relative_to(PACKAGE).parent.parts)

    def walk(node: ast.AST, function: str | None) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, child.lineno, function) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = package[: len(package) - child.level + 1] if child.level else ()
                stem = ".".join([*base, *(child.module or "").split(".")]).strip(".")
                yield from (Import(f"{stem}.{alias.name}", child.lineno, function) for alias in child.names)
            else:
                yield from walk(child, function or deferring(child))

    yield from walk(ast.parse(path.read_text(encoding="utf-8")), None)


def deferring(node: ast.AST) -> str | None:
    """The function (or `TYPES`) below which nothing is executed when the module is imported."""
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return TYPES
    return node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else None


def through_a_door(module: str, item: Import) -> bool:
    """Whether an import stands in a door of its module, or is there for such a door's types."""
    doors = DOORS.get(module, {})
    parts = set().union(*doors.values()) if item.function == TYPES else doors.get(item.function or "", set())
    return any(within(item.name.removeprefix("nccl_m2n."), part) for part in parts)


def imported_module(name: str) -> str | None:
    """The module of the package that an import of `name` needs; None for other packages."""
    if not within(name, "nccl_m2n"):
        return None
    parts = name.split(".")[1:]
    while parts and ".".join(parts) not in NAMES:
        parts.pop()
    return ".".join(parts)


def circles(needs: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that need one another."""

    def reached(start: str) -> set[str]:
        found, new = set(), [start]
        while new:
            fresh = needs.get(new.pop(), set()) - found
            found |= fresh
            new += fresh
        return found

    all_reached = {module: reached(module) for module in needs}
    groups = {
        frozenset(other for other in found if module in all_reached.get(other, ()))
        for module, found in all_reached.items()
        if module in found
    }
    return sorted(sorted(group) for group in groups)


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
        if not through_a_door(module_name(path), item) and not any(within(name, one) for one in allowed):
            wrong.append(f"{path}:{item.line} imports {item.name}")
    assert not wrong, f"{part} may import {sorted(allowed)}:\n" + "\n".join(wrong)


def test_no_module_needs_itself_in_a_circle() -> None:
    """Neither eagerly nor inside functions nor for types, but for the doors."""
    needs = {
        module_name(path): {
            str(imported_module(item.name))
            for item in imports(path)
            if imported_module(item.name) is not None and not through_a_door(module_name(path), item)
        }
        for path in MODULES
    }
    assert circles(needs) == []


def test_every_door_leads_somewhere() -> None:
    for module, doors in DOORS.items():
        path = PACKAGE / f"{module.replace('.', '/')}.py"
        assert {item.function for item in imports(path) if through_a_door(module, item)} - {
            TYPES
        } == doors.keys()


@pytest.mark.parametrize(
    ("needs", "found"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, []),
        ({"a": {"b"}, "b": {"a"}, "c": {"a"}}, [["a", "b"]]),
        ({"a": {"a"}}, [["a"]]),
        ({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"e"}, "e": {"d"}}, [["a", "b", "c"], ["d", "e"]]),
    ],
)
def test_the_finder_of_circles_finds(needs: dict[str, set[str]], found: list[list[str]]) -> None:
    assert circles(needs) == found


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
    ("line", "name", "function"),
    [
        ("from nccl_m2n.planning.plans import Plan", "nccl_m2n.planning.plans.Plan", None),
        ("from ..planning import plans", "nccl_m2n.planning.plans", None),
        ("from . import box", "nccl_m2n.layout.box", None),
        ("import nccl_m2n.transport", "nccl_m2n.transport", None),
        ("def f():\n    from nccl_m2n.show import html", "nccl_m2n.show.html", "f"),
        ("class A:\n    def f(self):\n        import numpy", "numpy", "f"),
        ("if TYPE_CHECKING:\n    import numpy", "numpy", TYPES),
    ],
)
def test_the_reader_of_imports_sees(
    tmp_path, monkeypatch, line: str, name: str, function: str | None
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    (tmp_path / "layout").mkdir()
    path = tmp_path / "layout" / "layout.py"
    path.write_text(line)
    assert [(i.name, i.function) for i in imports(path)] == [(name, function)]
