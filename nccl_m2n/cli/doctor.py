# SPDX-License-Identifier: Apache-2.0
"""`doctor`: what is here, what works and what does not. It never fails for what is missing."""

from __future__ import annotations

import argparse
import json
import os
import socket
from collections.abc import Mapping, Sequence

from nccl_m2n.cli import probes, transports
from nccl_m2n.cli.output import pairs_text, publish
from nccl_m2n.text import pip_install, short_ranks
from nccl_m2n.transport import KINDS
from nccl_m2n.transport.meeting import Meeting
from nccl_m2n.transport.rendezvous import protection
from nccl_m2n.typing import JsonObject, ReadJson

NCCL_VARIABLES = ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_DISABLE", "NCCL_HOSTID", "NCCL_DEBUG")


def doctor(arguments: argparse.Namespace, meeting: Meeting) -> None:
    """Carry out the command. Collective where several processes were started."""
    from nccl_m2n.transport.nccl_domains import host_label

    mine = examine(meeting)
    host, _ = probes.probe(host_label)
    mine["host"] = host or socket.gethostname()
    mine["domains"], mine["problems"]["domains"] = domains(meeting)
    every = [json.loads(said) for said in meeting.share(json.dumps(mine).encode(), "examine")]
    if meeting.rank == 0:
        data = {**every[0], "ranks": [_summary(each) for each in every]}
        publish(_text(every, meeting), "doctor", data, arguments.json)


def domains(meeting: Meeting) -> tuple[list[list[int]] | None, str]:
    """The NVLink domains as a transport finds them: of the ranks, or alone of the GPUs here. Collective."""
    lacking = transports.lack_of_gpus(transports.gpu_states(meeting), 1)
    if lacking:  # the same on all ranks: none of them goes on alone
        return None, lacking

    def discover() -> list[list[int]]:
        with KINDS["nccl"].join(meeting.place.launcher, meeting.world, None) as transport:
            return transport.discover_domains()

    return probes.probe(discover)


def examine(meeting: Meeting) -> JsonObject:
    """Everything about this process, as JSON data."""
    found: JsonObject = {"versions": probes.versions(), "problems": {}}
    looks = {
        "mpi_library": probes.mpi_library,
        "nccl": probes.nccl_library,
        "cuda": probes.cuda_versions,
        "gpus": probes.gpus,
        "nics": probes.nics,
    }
    for name, look in looks.items():
        found[name], problem = probes.probe(look)
        if problem:
            found["problems"][name] = problem
    if found["gpus"]:
        found["pack_kernel"], found["problems"]["pack_kernel"] = probes.probe(probes.pack_kernel)
    found["launcher"] = {
        "kind": meeting.place.launcher,
        "processes": meeting.size,
        "lacking": meeting.lacking,
    }
    found["environment"] = {name: os.environ[name] for name in NCCL_VARIABLES if name in os.environ}
    found["works"] = {name: {"works": not why, "why": why} for name, why in _works(found).items()}
    return found


def _works(found: ReadJson) -> dict[str, str]:
    """What can be used, and for what cannot the reason and the remedy."""
    has, problems = found["versions"], found["problems"]
    gpu = "" if found["gpus"] else problems.get("gpus") or problems.get("cuda") or "no GPU"
    nccl = problems.get("nccl", "")
    kernel = problems.get("pack_kernel", "")
    mpi = problems.get("mpi_library", "") and f"{problems['mpi_library']}; {pip_install('mpich')}"
    return {
        "layouts, plans, one process": "",
        "TCP, host memory, under torchrun": "",
        "MPI, host memory": mpi or found["launcher"]["lacking"],
        "NCCL, GPU memory": nccl or gpu or kernel,
        "bfloat16 and fp8 in NumPy": "" if has["ml_dtypes"] else pip_install("checkpoint"),
        "casts between float types": "" if has["ml_dtypes"] else "without ml_dtypes NumPy's own types only",
    }


def _summary(found: ReadJson) -> JsonObject:
    """What may differ from rank to rank."""
    return {
        "host": found["host"],
        "gpus": [gpu["name"] for gpu in found["gpus"] or []],
        "nccl": (found["nccl"] or {}).get("version"),
        "python": found["versions"]["python"],
        "nccl_m2n": found["versions"]["nccl_m2n"],
        "numpy": found["versions"]["numpy"],
    }


def _text(every: Sequence[ReadJson], meeting: Meeting) -> str:
    found = every[0]
    problems = found["problems"]
    sections = [
        ("versions", [(name, said or "not installed") for name, said in found["versions"].items()]),
        (
            "libraries",
            [
                ("MPI", found["mpi_library"] or _lacks(problems.get("mpi_library"))),
                *_nccl_rows(found["nccl"], problems.get("nccl")),
                ("CUDA", _cuda(found["cuda"]) or _lacks(problems.get("cuda"))),
            ],
        ),
        ("GPUs", [_gpu_row(gpu) for gpu in found["gpus"] or []] or [("none", problems.get("gpus", ""))]),
        ("NICs", [_nic_row(nic) for nic in found["nics"] or []] or [("none", problems.get("nics", ""))]),
        ("processes", _process_rows(every, meeting)),
        ("works here", [(name, _verdict(said)) for name, said in found["works"].items()]),
    ]
    if found["environment"]:
        sections.insert(-1, ("NCCL's settings", list(found["environment"].items())))
    return "\n\n".join(f"{title}\n{_indent(pairs_text(rows))}" for title, rows in sections)


def _nccl_rows(nccl: ReadJson | None, problem: str | None) -> list[tuple[str, str]]:
    if nccl is None:
        return [("NCCL", _lacks(problem))]
    lacks = ", ".join(nccl["lacks"]) or "nothing that is used here"
    return [("NCCL", f"{nccl['version']} ({nccl['path']})"), ("  lacks", lacks)]


def _process_rows(every: Sequence[ReadJson], meeting: Meeting) -> list[tuple[str, str]]:
    """Ranks by host, then what differs between ranks that should be alike."""
    place = meeting.place.launcher
    rows = [("started by", {"none": "no launcher", "mpi": "an MPI launcher"}.get(place, place))]
    if place == "torchrun":
        rows.append(("rendezvous", protection(os.environ)))
    hosts: dict[str, list[int]] = {}
    for rank, each in enumerate(every):
        hosts.setdefault(each["host"], []).append(rank)
    for host, ranks in hosts.items():
        count = len(every[ranks[0]]["gpus"] or [])
        rows.append((f"rank {short_ranks(ranks)}", f"{host}, {count} GPUs"))
    joined = every[0]["domains"]
    said_joined = "; ".join(map(short_ranks, joined)) if joined else _lacks(every[0]["problems"]["domains"])
    rows.append((f"NVLink joins {'ranks' if len(every) > 1 else 'GPUs'}", said_joined))
    for what in ("python", "nccl_m2n", "numpy", "nccl"):
        said: dict[str, list[int]] = {}
        for rank, each in enumerate(map(_summary, every)):
            said.setdefault(str(each[what]), []).append(rank)
        if len(said) > 1:
            text = "; ".join(f"rank {short_ranks(ranks)}: {version}" for version, ranks in said.items())
            rows.append((f"{what} differs", text))
    return rows


def _gpu_row(gpu: ReadJson) -> tuple[str, str]:
    return (
        f"GPU {gpu['device']}",
        f"{gpu['name']}, {gpu['bytes'] / 1e9:.0f} GB, "
        f"compute capability {gpu['compute_capability']}, {gpu['bus']}",
    )


def _nic_row(nic: ReadJson) -> tuple[str, str]:
    return nic["name"], f"{nic['kind']}, {nic['state']}, {nic['rate'] or 'speed unknown'}"


def _cuda(cuda: Mapping[str, str] | None) -> str:
    return f"{cuda['runtime']}, the driver takes up to {cuda['driver']}" if cuda else ""


def _verdict(said: ReadJson) -> str:
    return "yes" if said["works"] else f"no: {said['why']}"


def _lacks(problem: str | None) -> str:
    return f"not available: {problem}" if problem else "not available"


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
