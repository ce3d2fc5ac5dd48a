# SPDX-License-Identifier: Apache-2.0
"""What the README and the pages say is run: their examples, and the outputs printed under them."""

from __future__ import annotations

import doctest
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "bench").glob("*.md"))]
OPTIONS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of one language that are no interpreter sessions."""
    found = FENCE.findall(page.read_text(encoding="utf-8"))
    return [text for name, text in found if name == language and ">>> " not in text]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_sessions_in_a_page(page: Path) -> None:
    # A fence would count as output of the example above it; a blank line ends that, and keeps line numbers.
    text = re.sub(r"^```.*$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    test = doctest.DocTestParser().get_doctest(text, {"__name__": "__main__"}, page.name, str(page), 0)
    said: list[str] = []
    failed, _ = doctest.DocTestRunner(optionflags=OPTIONS).run(test, out=said.append)
    assert failed == 0, "".join(said)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_snippets_of_a_page_are_python(page: Path) -> None:
    for number, text in enumerate(blocks(page, "python")):
        compile(text, f"{page.name}, block {number}", "exec")


def test_readme_example_of_one_process() -> None:
    example, *_ = blocks(ROOT / "README.md", "python")
    assert example.count("\n") <= 15
    run = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, timeout=50)
    assert run.returncode == 0, run.stderr
    assert run.stdout == blocks(ROOT / "README.md", "text")[0]


def test_readme_example_of_eight_processes(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    mpiexec = shutil.which("mpiexec", path=Path(sys.executable).parent) or shutil.which("mpiexec")
    if mpiexec is None:
        pytest.skip("no mpiexec")
    example = blocks(ROOT / "README.md", "python")[1]
    assert example.count("\n") <= 25
    script = tmp_path / "reshard.py"
    script.write_text(example, encoding="utf-8")
    command = [mpiexec, "-n", "8", sys.executable, "-m", "mpi4py", str(script)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=50, cwd=ROOT)
    assert run.returncode == 0, run.stderr
