# SPDX-License-Identifier: Apache-2.0
"""Which GPUs NVLink joins: from NCCL where it tells, else from NVML's fabric, else by host."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from nccl_m2n.typing import Communicator, Library

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
FABRIC_COMPLETED = 3  # NVML_GPU_FABRIC_STATE_COMPLETED


def domain_label(bindings: Library, handle: Communicator, device: int) -> str:
    """A text that is equal on exactly the ranks whose GPUs reach each other's memory.

    Args:
        bindings: nccl4py's low-level module.
        handle: The rank's communicator.
        device: The rank's GPU.
    """
    return _lsa_label(bindings, handle) or _fabric_label(device) or host_label()


def host_label() -> str:
    """This host, told apart from others of the same name, as NCCL itself does it."""
    named = os.environ.get("NCCL_HOSTID")
    if named:
        return f"host {named}"
    boot = BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""
    return f"host {socket.gethostname()} {boot}".rstrip()


def _lsa_label(bindings: Library, handle: Communicator) -> str | None:
    """NCCL's team of ranks that load from and store to each other's memory (NCCL 2.28 on)."""
    try:
        if not bindings.comm_query_properties(handle).device_api_support:
            return None
        team = bindings.team_lsa(handle)
        if team.n_ranks < 2:  # also where NCCL could not set symmetric memory up: ask elsewhere
            return None
        first = bindings.comm_user_rank(handle) - team.rank * team.stride
    except (RuntimeError, AttributeError, bindings.NCCLError):  # an older library or older bindings
        return None
    return f"lsa {first}"


def _fabric_label(device: int) -> str | None:
    """The clique of a multi-host NVLink fabric; None within a single host."""
    try:
        import cupy
        import pynvml

        pynvml.nvmlInit()
        bus = cupy.cuda.runtime.deviceGetPCIBusId(device)
        fabric = pynvml.nvmlDeviceGetGpuFabricInfo(pynvml.nvmlDeviceGetHandleByPciBusId(bus))
    except Exception:  # optional package, old driver, no fabric: any of them means that it cannot tell
        return None
    cluster = bytes(value % 256 for value in fabric.clusterUuid)
    if fabric.state != FABRIC_COMPLETED or not any(cluster):
        return None
    return f"fabric {cluster.hex()} {fabric.cliqueId}"
