# SPDX-License-Identifier: Apache-2.0
"""Try random problems until the time is over, and say how many there were and what went wrong.

All ranks in this process:   python -m tests.fuzz --seconds 60 --jobs 4
Under MPI:                   mpiexec -n 4 python -m mpi4py -m tests.fuzz --seconds 60
Over NCCL, or TCP:           torchrun --nproc-per-node 4 -m tests.fuzz --seconds 60

A problem is one tensor, moved and compared on every rank. Case N of seed S is always the same on as many ranks.
"""

from __future__ import annotations

import sys

from tests.fuzz.script import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
