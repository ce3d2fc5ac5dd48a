# SPDX-License-Identifier: Apache-2.0
"""Every scenario with one process a rank, over NCCL; what a launcher such as torchrun starts eight times.

usage: torchrun --nproc-per-node 8 -m tests.gpu.worker [PART OF A NAME ...]

With fewer ranks than eight, the scenarios that need no more are run. Rank 0 tells what went wrong anywhere;
the exit status is 1 then.
"""

from __future__ import annotations

import json
import sys
import traceback

from nccl_m2n.transport.nccl import NcclTransport
from tests import scenarios
from tests.gpu.device_side import DeviceSide


def one_scenario(scenario: scenarios.Scenario, transport: NcclTransport) -> list[str]:
    """What went wrong on this rank."""
    (rank,) = transport.local_ranks

    def side_of_rank(scenario: scenarios.Scenario, rank: int, side: str) -> DeviceSide:
        return DeviceSide(scenario, rank, side, device=transport.devices[rank])

    try:
        return scenarios.run(scenario, transport, 3, side_of_rank, captured_from=1)
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
            ranks = {
                r for t in scenario.transfers() for side in (t.source, t.destination) for r in side.ranks
            }
            if max(ranks, default=0) >= transport.size or (parts and not any(part in name for part in parts)):
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
