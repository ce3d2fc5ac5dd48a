# SPDX-License-Identifier: Apache-2.0
"""The house rules that a linter does not know: sizes, headers, one version of each tool."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import nccl_m2n

PACKAGE = Path(nccl_m2n.__file__).parent
ROOT = PACKAGE.parent
MODULES = sorted(PACKAGE.rglob("*.py"))

MODULE_LINES = 320
FUNCTION_LINES = 50  # without the docstring

in_checkout = pytest.mark.skipif(not (ROOT / "pyproject.toml").is_file(), reason="needs the source tree")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_stays_readable(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert source == "" or source.startswith("# SPDX-License-Identifier: Apache-2.0\n")
    assert source.count("\n") <= MODULE_LINES, "too long for one sitting: does it hold two subjects?"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            lines = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
            assert lines <= FUNCTION_LINES, f"{path}:{node.lineno} {node.name} has {lines} lines"


@in_checkout
def test_tools_have_one_version() -> None:
    pinned = re.compile(r'"([\w-]+==[\w.]+)"')
    extra = re.search(r"^lint = .*$", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert extra is not None
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    assert set(pinned.findall(extra[0])) == set(pinned.findall(hooks))


@in_checkout
def test_the_changelog_names_this_version() -> None:
    changelog = (ROOT / "docs" / "changelog.md").read_text(encoding="utf-8")
    assert nccl_m2n.__version__.split(".dev")[0] in changelog
