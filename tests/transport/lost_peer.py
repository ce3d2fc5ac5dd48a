# SPDX-License-Identifier: Apache-2.0
"""What each of four processes does in `test_a_process_that_is_lost`: the last one is lost, the others go on.

usage: python -m tests.transport.lost_peer bind|run kill|stop FOLDER, with torchrun's variables

Each survivor writes to a file of its own how long it took to hear of it, what it was told, and what became of the
transport that it then formed with the others that are left.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from nccl_m2n import Layout, M2nError, Mesh, Shard, SocketTransport, Topology, Transfer, plan
from nccl_m2n.typing import Bytes


def problem(ranks: int) -> Transfer:
    """Everybody sends everybody something."""
    rows, columns = (Layout((60, 60), Mesh.arange((ranks,)), [Shard(dim)]) for dim in (0, 1))
    return Transfer(rows, columns, "uint8", "w")


def move(transport: SocketTransport, lose: str = "", how: str = "") -> bool:
    """Whether everything has arrived; a process that is to be lost does not come that far."""
    transfer, everything = problem(transport.size), np.arange(3600, dtype=np.uint8).reshape(60, 60)
    source = np.ascontiguousarray(transfer.source.slice_global(everything, transport.rank))
    wanted: Bytes = transfer.destination.slice_global(everything, transport.rank)
    destination = np.zeros_like(wanted)
    if lose == "bind":
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    with plan([transfer], Topology.regular(transport.size, 2)).bind(
        transport, {"w": source}, {"w": destination}
    ) as bound:
        if lose == "run":
            os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        bound.run()
        bound.wait(timeout=2.0)
    return bool(np.array_equal(destination, wanted))


def main(where: str, how: str, folder: str) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    transport = SocketTransport.from_environment(timeout=30.0)
    transport.exchange({rank: b""})  # from here on, what takes long takes long for that reason alone
    transport.timeout = 2.0
    Path(folder, f"{rank}.pid").write_text(str(os.getpid()), encoding="utf-8")
    began = time.monotonic()
    try:
        move(transport, where if rank == size - 1 else "", how)
        said = "nothing"
    except M2nError as error:
        said = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - began
    anew = os.environ | {"WORLD_SIZE": str(size - 1), "TORCHELASTIC_RUN_ID": "anew"}
    with SocketTransport.from_environment(timeout=30.0, environment=anew) as survivors:
        right = move(survivors)
    Path(folder, f"{rank}.json").write_text(json.dumps([seconds, said, right]), encoding="utf-8")
    if rank == 0:  # who was stopped cannot end by itself
        while len(list(Path(folder).glob("*.json"))) < size - 1:
            time.sleep(0.02)
        os.kill(int(Path(folder, f"{size - 1}.pid").read_text(encoding="utf-8")), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
