# SPDX-License-Identifier: Apache-2.0
"""A transport is its own module and an entry in the table of kinds: commands find it there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nccl_m2n.cli import main
from nccl_m2n.transport import KINDS, LocalTransport, Transport


class EchoTransport(LocalTransport):
    """All that a new kind has to say besides moving bytes."""

    kind, carrier, launchers = "echo", "echoes", ("none",)


def test_every_kind_says_what_it_is() -> None:
    for kind, each in KINDS.items():
        assert issubclass(each, Transport)
        assert each.kind == kind
        assert each.carrier
        assert set(each.launchers) <= {"mpi", "torchrun", "none"}
    for launcher in ("mpi", "torchrun", "none"):
        assert any(launcher in each.launchers and each.memory == "host" for each in KINDS.values())


def test_a_new_kind_is_found_by_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[Any] = []

    class Counted(EchoTransport):
        def __init__(self, ranks: int) -> None:
            super().__init__(ranks)
            made.append(self)

    out = tmp_path / "report.json"
    arguments = ["bench", "--end", "1M", "-n", "2", "-w", "1", "--json", str(out)]
    monkeypatch.setitem(KINDS, "echo", Counted)
    assert main([*arguments, "--transport", "echo"]) == 0, capsys.readouterr().err
    assert len(made) == 1
    assert made[0].broken == "was closed"
    assert "by echoes" in capsys.readouterr().out
    assert json.loads(out.read_text())["transport"] == "echo"


@pytest.mark.parametrize(("kind", "said"), [("mpi", "mpiexec"), ("socket", "torchrun")])
def test_a_kind_that_needs_a_launcher(kind: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "--end", "1M", "-n", "2", "-w", "1", "--transport", kind]
    assert main(arguments) == 2
    assert f"--transport {kind} expects processes that {said} started" in capsys.readouterr().err
