# SPDX-License-Identifier: Apache-2.0
"""`bench`: alone and under mpiexec."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nccl_m2n.cli import main
from nccl_m2n.cli.side import Side
from nccl_m2n.measure import peers
from tests.cli.runs import run, succeed

SMALL = ["-b", "1000", "-e", "70K", "-f", "8", "-n", "2", "-w", "1"]
ON_HOST = ["reshard", "limit", "direct", "gather+broadcast, planned"]


def rows(text: str) -> list[list[str]]:
    """The table's cells: size, count, type, method, time, algbw, busbw, #wrong."""
    return [re.split(r"  +", line.strip()) for line in text.splitlines() if not line.startswith("#")]


@pytest.mark.parametrize("ranks", [None, 4])
def test_a_sweep(ranks: int | None, tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    table = rows(succeed("bench", *SMALL, "--destination", "S(1)", "--json", str(out), ranks=ranks))
    said = json.loads(out.read_text())
    assert (said["schema"], said["schema_version"], said["ranks"]) == ("nccl_m2n.bench", 1, ranks or 8)
    assert [r["bytes"] for r in said["results"]] == [992, 8000, 64000]
    assert [row[3] for row in table] == ON_HOST * 3
    assert {row[7] for row in table} == {"0", "N/A"}
    for result in said["results"]:
        height, width = result["shape"]
        largest_shard = -(-height // (said["ranks"] // 2)) * width * 2  # all of it goes to the other side
        assert (result["bus_bytes"], result["bus_tier"]) == (largest_shard, "network")
        for method in result["methods"].values():
            assert len(method["seconds"]) == len(method["host_seconds"]) == 2
            median = statistics.median(method["seconds"])
            assert method["algbw_gbytes"] == pytest.approx(result["bytes"] / median / 1e9)
            assert method["busbw_gbytes"] == pytest.approx(result["bus_bytes"] / median / 1e9)


def test_sides_that_share_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    sides = ["--source", "2x2: R S(0)", "--destination", "4: S(2)", "--overlap", "--json", "-"]
    assert main(["bench", *SMALL, *sides, "--method", "reshard", "-c", "0"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["ranks"], said["overlap"], said["domains"]) == (4, True, [[0, 1, 2, 3]])
    assert [r["shape"] for r in said["results"]] == [[31, 4, 4], [62, 8, 8], [125, 16, 16]]
    assert {r["bus_tier"] for r in said["results"]} == {"within domains"}
    assert {r["methods"]["reshard"]["wrong"] for r in said["results"]} == {None}


def test_what_goes_wrong_is_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Careless(peers.BoundPlan):
        def __init__(self, setting: Any) -> None:
            super().__init__(setting)
            self.spoilt = setting.arrays[1][5]["t0"]

        def wait(self, timeout: float) -> None:
            super().wait(timeout)
            self.spoilt[0, :2] ^= np.uint16(1)

    monkeypatch.setitem(peers.PEERS, "reshard", Careless)
    assert main(["bench", *SMALL, "-e", "1000", "--method", "reshard"]) == 1
    captured = capsys.readouterr()
    assert rows(captured.out)[0][7] == "4"  # two elements, in the first run and in the last
    assert "4 elements were wrong" in captured.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-b", "1Q"], "expected bytes such as 65536, 64K"),
        (["-b", "2M", "-e", "1M"], "--begin of at most --end"),
        (["-f", "1"], "--factor of 2 or more"),
        (["--source", "2x2: R"], "one placement for each of the 2 mesh axes"),
        (["--source", "4: P(0)"], "such as '2x4: R S(0)'"),
        (["--source", "4x: R"], "such as '2x4: R S(0)'"),
        (["--source", "8: R"], "expected ranks for both sides, got 8"),
        (["--method", "fastest"], "invalid choice: 'fastest'"),
        (["--method", "reshard, graph"], "cannot be measured here, only reshard, limit"),
        (["-n", "0"], "a whole number of 1 or more"),
        (["--json", "/no/folder/x"], "a folder that exists"),
    ],
)
def test_bad_arguments(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert said in captured.err


def test_too_few_ranks() -> None:
    done = run("bench", "--source", "4: S(0)", "--destination", "2: S(0)", ranks=4)
    assert (done.returncode, done.stdout) == (2, "")
    assert "6 in all; there are 4: start mpiexec -n 6" in done.stderr


@pytest.mark.parametrize("text", ["4: S(0)", "2x4: R S(1)", "2x2: SS(0, 2) S(0)"])
def test_a_side_prints_as_it_is_written(text: str) -> None:
    assert str(Side.parse(text)) == text
