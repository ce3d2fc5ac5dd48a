# SPDX-License-Identifier: Apache-2.0
"""`plan`, `simulate` and `doctor`, which need no ranks."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from nccl_m2n.cli import main
from nccl_m2n.cli.output import progress
from nccl_m2n.cli.transports import lack_of_gpus
from nccl_m2n.transport.meeting import Place
from tests.cli.runs import run, succeed

LLAMA = ["--model", "Llama-3.1-8B", "--source", "tp=4,pp=2", "--destination", "tp=8,dp=2"]


def test_plan_prints_a_table_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    assert main(["plan", *LLAMA, "--domain", "8", "--json", str(out)]) == 0
    assert "Llama-3.1-8B: tp=4,pp=2 on ranks 0-7 to tp=8,dp=2 on ranks 8-23" in capsys.readouterr().out
    said = json.loads(out.read_text())
    assert (said["schema"], said["schema_version"], said["ranks"]) == ("nccl_m2n.plan", 1, 24)
    assert [len(ranks) for ranks in said["domains"]] == [8, 8, 8]
    reshard = said["methods"]["reshard"]
    assert reshard["network_bytes"] == reshard["network_bytes_bound"] > 0
    assert said["methods"]["direct"]["network_bytes"] >= reshard["network_bytes"]


@pytest.mark.parametrize("command", ["plan", "simulate"])
@pytest.mark.parametrize(
    ("more", "domains", "why"),
    [
        ([], [8, 16], "planned as if each side were a domain of its own"),
        (["--overlap"], [16], "as the transport finds them"),
        (["--domain", "4"], [4] * 6, "as asked"),
    ],
)
def test_domains_are_those_of_refit_on_one_machine(
    command: str,
    more: list[str],
    domains: list[int],
    why: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "plan.json"
    assert main([command, *LLAMA, *more, "--json", str(out)]) == 0
    assert f"({why})" in capsys.readouterr().out
    assert [len(ranks) for ranks in json.loads(out.read_text())["domains"]] == domains


def test_json_in_place_of_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *LLAMA, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["model"]["tensors"] == 291


def test_a_thousand_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--source", "tp=8,pp=8,dp=8", "--destination", "tp=16,dp=32", "--domain", "8"]
    assert main(["plan", "--model", "Llama-3.1-70B", *sizes]) == 0
    assert "1024 ranks in 128 domains of 8" in capsys.readouterr().out


def test_under_mpiexec_one_rank_prints() -> None:
    assert succeed("plan", *LLAMA, ranks=3).count("Llama-3.1-8B") == 1


def test_help_is_printed_once() -> None:
    assert succeed("refit", "--help", ranks=3).count("usage:") == 1


def test_simulate_predicts(tmp_path: Path) -> None:
    out = tmp_path / "simulate.json"
    seconds = []
    for nic in ("50", "25"):
        assert main(["simulate", *LLAMA, "--nic-gbytes", nic, "--json", str(out)]) == 0
        said = json.loads(out.read_text())
        assert said["schema"] == "nccl_m2n.simulate"
        assert said["methods"]["gather_broadcast"]["seconds"] > said["seconds"] > 0
        seconds.append(said["seconds"])
    assert seconds[0] < seconds[1]


def test_doctor_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "started by" in said
    for section in ("versions", "libraries", "GPUs", "NICs", "processes", "works here"):
        assert f"{section}\n" in said


def test_doctor_in_several_processes(tmp_path: Path) -> None:
    out = tmp_path / "doctor.json"
    assert "rank 0-2" in succeed("doctor", "--json", str(out), ranks=3)
    said = json.loads(out.read_text())
    assert said["schema"] == "nccl_m2n.doctor"
    assert len(said["ranks"]) == said["launcher"]["processes"] == 3
    assert said["works"]["MPI, host memory"] == {"works": True, "why": ""}


def test_doctor_with_broken_packages(tmp_path: Path) -> None:
    for name in ("mpi4py", "cupy", "nccl", "ml_dtypes"):
        (tmp_path / f"{name}.py").write_text("raise OSError('libfoo.so: cannot open shared object file')")
    done = run(
        "doctor", environment={"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}", "PMI_RANK": "0"}
    )
    assert done.returncode == 0, done.stderr
    assert "libfoo.so" in done.stdout


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, Place("none")),
        ({"PMI_RANK": "3", "PMI_SIZE": "8"}, Place("mpi", 3, 8)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, Place("mpi", 1, 2)),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"}, Place("mpi", 1, 4)),
        (
            {"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "a", "MASTER_PORT": "1", "SLURM_PROCID": "0"},
            Place("torchrun", 5, 8),
        ),
        (
            {
                "RANK": "5",
                "WORLD_SIZE": "8",
                "MASTER_ADDR": "a",
                "MASTER_PORT": "1",
                "PMI_RANK": "1",
                "PMI_SIZE": "2",
                "TORCHELASTIC_RUN_ID": "none",
            },
            Place("torchrun", 5, 8),
        ),
    ],
)
def test_the_launcher_is_told_by_its_variables(environment: dict[str, str], place: Place) -> None:
    assert Place.of(environment) == place


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "drawn"), [(Terminal, True), (io.StringIO, False)])
def test_a_progress_bar_on_a_terminal_only(monkeypatch, stream: type[io.StringIO], drawn: bool) -> None:
    monkeypatch.setattr(sys, "stderr", stream())
    assert list(progress(range(3), 3, "read", True)) == [0, 1, 2]
    assert ("read" in sys.stderr.getvalue()) == drawn
    assert sys.stderr.getvalue().endswith("\r\x1b[K" if drawn else "")


@pytest.mark.parametrize(
    ("states", "said"),
    [
        ([[4, "", "host a", False]] * 4, ""),
        ([[4, "", "host a", False]] * 5, "host a has 4 GPUs for 5 ranks"),
        ([[1, "", "host a", True]] * 5, ""),
        ([[4, "", "host a", False], [0, "no NCCL", "host b", False]], "rank 1: no NCCL"),
    ],
)
def test_whether_every_rank_can_have_a_gpu(states: list[list[Any]], said: str) -> None:
    assert lack_of_gpus(states, 1).startswith(said)
    assert bool(lack_of_gpus(states, 1)) == bool(said)
