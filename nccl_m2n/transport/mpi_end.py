# SPDX-License-Identifier: Apache-2.0
"""How a process ends when a step over MPI has failed: in good order within a limit, or else without one."""

from __future__ import annotations

import atexit
import faulthandler
import sys
from functools import cache

STDERR = 2  # the descriptor: notebooks and tests put something without one in place of sys.stderr


@cache
def end_within(seconds: float | None) -> None:
    """Have MPI finalized at the process's exit, and the process ended if that takes longer.

    MPI ends a process together with all others, and waits for one that is stopped or gone for ever. Nothing of
    Python's runs meanwhile, so a watch that needs none of it ends the process, with status 1. The launcher
    then ends the others, as it does after ``MPI_Abort``.

    Args:
        seconds: The limit; None waits for ever.
    """
    if seconds is not None:
        atexit.register(_finalize, seconds)


def _finalize(seconds: float) -> None:
    import mpi4py
    from mpi4py import MPI

    if MPI.Is_finalized() or mpi4py.rc.finalize is False:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    faulthandler.dump_traceback_later(seconds, exit=True, file=STDERR)
    MPI.Finalize()
    faulthandler.cancel_dump_traceback_later()
