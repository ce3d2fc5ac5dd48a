# SPDX-License-Identifier: Apache-2.0
"""`python -m nccl_m2n`, alone or under mpiexec or torchrun."""

import sys

from nccl_m2n.cli import main

if __name__ == "__main__":
    sys.exit(main())
