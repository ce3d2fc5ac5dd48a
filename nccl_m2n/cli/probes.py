# SPDX-License-Identifier: Apache-2.0
"""What this machine has: each probe finds out one thing, and none of them raises."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import nccl_m2n
from nccl_m2n.errors import M2nError
from nccl_m2n.typing import JsonObject

Result = TypeVar("Result")

PACKAGES = ("numpy", "mpi4py", "mpich", "cupy", "nccl4py", "safetensors", "ml_dtypes", "torch")
# Functions that something here would use, with the version of NCCL that brought them.
NCCL_FUNCTIONS = {
    "ncclCommInitRankScalable": "2.23",
    "ncclCommShrink": "2.27",
    "ncclCommWindowRegister": "2.27",
    "ncclCommQueryProperties": "2.29",
    "ncclTeamLsa": "2.28",
    "ncclCommGrow": "2.29",
}
INFINIBAND, NETWORK = Path("/sys/class/infiniband"), Path("/sys/class/net")


def probe(look: Callable[[], Result]) -> tuple[Result | None, str]:
    """What a look at something found, or None and the reason in one line."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return look(), ""
    except (Exception, SystemExit) as error:  # whatever a broken installation does
        text = str(error) if isinstance(error, M2nError) else f"{type(error).__name__}: {error}"
        return None, " ".join(text.split())[:300]


def versions() -> dict[str, str | None]:
    """Versions of this package, of Python, and of the packages that it can use; None for what is missing."""
    found: dict[str, str | None] = {
        "nccl_m2n": nccl_m2n.__version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}, {os.cpu_count()} CPUs",
    }
    for name in PACKAGES:
        found[name] = _version(name)
    return found


def _version(name: str) -> str | None:
    names = [name]
    if name == "cupy":  # one distribution for each CUDA version
        names += ["cupy-cuda12x", "cupy-cuda13x"]
    for each in names:
        try:
            return importlib.metadata.version(each) + (f" ({each})" if each != name else "")
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def mpi_library() -> str:
    """The MPI library behind mpi4py, without initialising it where this process is no MPI rank."""
    import mpi4py

    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.initialize = False
    from mpi4py import MPI

    said = MPI.Get_library_version().strip("\0 \n")
    return " ".join(said.splitlines()[0].split())


def nccl_library() -> JsonObject:
    """The version of NCCL, where it was loaded from, and which of the wanted functions it lacks."""
    from nccl_m2n.transport.nccl_library import nccl_bindings

    number = int(nccl_bindings().get_version())
    path = _loaded("libnccl.so")
    library = ctypes.CDLL(path) if path else None
    lacks = [f"{name} (NCCL {since})" for name, since in NCCL_FUNCTIONS.items() if not hasattr(library, name)]
    version = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    return {"version": version, "path": path, "lacks": lacks if library else []}


def _loaded(name: str) -> str | None:
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        path = line.rpartition(" ")[2]
        if name in path:
            return path
    return None


def gpus() -> list[JsonObject]:
    """The GPUs that this process sees."""
    from nccl_m2n.transport.gpu import device_count, import_cupy

    runtime = import_cupy().cuda.runtime
    made = []
    for device in range(device_count()):
        properties = runtime.getDeviceProperties(device)
        name = properties["name"]
        made.append(
            {
                "device": device,
                "name": name.decode() if isinstance(name, bytes) else str(name),
                "bytes": int(properties["totalGlobalMem"]),
                "compute_capability": f"{properties['major']}.{properties['minor']}",
                "bus": runtime.deviceGetPCIBusId(device),
            }
        )
    return made


def cuda_versions() -> dict[str, str]:
    """The newest CUDA that the driver takes, and the one that CuPy uses."""
    from nccl_m2n.transport.gpu import import_cupy

    runtime = import_cupy().cuda.runtime
    numbers = {"driver": runtime.driverGetVersion(), "runtime": runtime.runtimeGetVersion()}
    return {name: f"{n // 1000}.{n % 1000 // 10}" for name, n in numbers.items()}


def pack_kernel() -> str:
    """Whether CuPy can build kernels here: packing is one."""
    from nccl_m2n.transport.gpu import import_cupy

    cupy = import_cupy()
    kernel = cupy.RawKernel('extern "C" __global__ void probe(int* x) { *x = 7; }', "probe")
    value = cupy.zeros(1, "int32")
    kernel((1,), (1,), (value,))
    return "kernels are built and run" if int(value[0]) == 7 else "kernels give wrong results"


def nics() -> list[JsonObject]:
    """The machine's network interfaces: InfiniBand and RoCE ports, then all others but loopback."""
    return _infiniband() + _network()


def _infiniband() -> list[JsonObject]:
    return [
        {
            "name": f"{port.parents[1].name}:{port.name}",
            "kind": _read(port / "link_layer") or "InfiniBand",
            "state": (_read(port / "state") or "unknown").rpartition(": ")[2].lower(),
            "rate": _read(port / "rate"),
        }
        for port in sorted(INFINIBAND.glob("*/ports/*"))
    ]


def _network() -> list[JsonObject]:
    made = []
    for link in sorted(NETWORK.glob("*")):
        if link.name == "lo" or not link.is_dir():
            continue
        speed = _read(link / "speed")
        rate = f"{int(speed) / 1000:g} Gb/s" if speed and speed.isdecimal() else None
        made.append(
            {
                "name": link.name,
                "kind": "network",
                "state": _read(link / "operstate") or "unknown",
                "rate": rate,
            }
        )
    return made


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except (OSError, ValueError):  # not every interface tells its speed
        return None
