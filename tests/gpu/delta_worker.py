# SPDX-License-Identifier: Apache-2.0
"""Every scenario moved several times with changes in between, sending only those, one process a rank, over NCCL.

usage: torchrun --nproc-per-node 8 -m tests.gpu.delta_worker [PART OF A NAME ...]
"""

from __future__ import annotations

import json
import sys
import traceback

from nccl_m2n.transport.nccl import NcclTransport
from tests import scenarios
from tests.delta.steps import SHARES, Steps
from tests.gpu.device_side import DeviceSide


def one_scenario(scenario: scenarios.Scenario, transport: NcclTransport) -> list[str]:
    """What went wrong on this rank."""
    (rank,) = transport.local_ranks

    def side_of_rank(scenario: scenarios.Scenario, rank: int, side: str) -> DeviceSide:
        return DeviceSide(scenario, rank, side, device=transport.devices[rank])

    try:
        return Steps(scenario, (rank,), side_of_rank=side_of_rank).run(transport, SHARES)
    except Exception:
        return [f"rank {rank}: {traceback.format_exc()}"]


def main(parts: list[str]) -> int:
    """Run the scenarios whose names have one of the parts; all without parts."""
    import cupy

    failed = done = 0
    with NcclTransport.from_environment(timeout=60.0) as transport:
        (rank,) = transport.local_ranks
        cupy.cuda.Device(transport.devices[rank]).use()
        for name, scenario in scenarios.BY_NAME.items():
            if parts and not any(part in name for part in parts):
                continue
            wrong = one_scenario(scenario, transport)
            every = [json.loads(said) for said in transport.exchange({rank: json.dumps(wrong).encode()})]
            told = [what for wrong in every for what in wrong]
            done, failed = done + 1, failed + bool(told)
            if told and rank == 0:
                print(f"WRONG {name}:", *told[:4], sep="\n  ", flush=True)
    if rank == 0:
        print(f"{done} scenarios on {transport.size} ranks, {failed} went wrong", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
