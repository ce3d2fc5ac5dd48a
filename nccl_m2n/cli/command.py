# SPDX-License-Identifier: Apache-2.0
"""From the command line to an exit status: who prints, who waits for whom, and how all ranks end together."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from nccl_m2n.cli.arguments import PROGRAM, parse
from nccl_m2n.errors import M2nError, TransportError
from nccl_m2n.transport.meeting import Meeting, Place, RefusedError, one_line, report_fault, together

COLLECTIVE = ("refit", "bench", "doctor")  # every rank takes part; the others are for rank 0 alone
USAGE, FAULT = 2, 1  # exit statuses


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out one command.

    Errors in what was asked end every rank with status 2, and rank 0 says in one line what was expected, what
    came and what to do. An error that one rank alone meets ends all ranks.

    Args:
        argv: The command line; left out, the process's own.

    Returns:
        The exit status: 0, 1 for bytes that differ or a fault, 2 for what cannot be done.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    place = Place.of(os.environ)
    alone = given[:1] == [] or given[0] not in COLLECTIVE or bool({"-h", "--help"} & set(given))
    if alone and place.rank:
        return 0
    try:
        meeting = Meeting(None if alone else place)
    except TransportError as error:
        if given[0] != "doctor":
            return _say(error, given, place.rank)
        meeting = Meeting(lacking=str(error))
    return _run(given, meeting)


def _run(given: Sequence[str], meeting: Meeting) -> int:
    try:
        # Compared, so that no rank waits in a step that another one was not asked to take.
        arguments = together(meeting, lambda: parse(given), lambda _: {"the command line": " ".join(given)})
        _dispatch(arguments, meeting)
    except RefusedError as error:
        status = _say(error, given, meeting.rank)
        meeting.leave()
        return status
    except BrokenPipeError:  # `... | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAULT
    except (Exception, KeyboardInterrupt) as error:
        if meeting.size == 1 and isinstance(error, M2nError):
            return _say(error, given, 0)
        report_fault(error, _title(given))
        if meeting.size > 1:
            meeting.end_all(FAULT)
        return FAULT
    meeting.leave()
    return 0


def _dispatch(arguments: argparse.Namespace, meeting: Meeting) -> None:
    if arguments.command == "refit":
        from nccl_m2n.cli.refit import refit

        refit(arguments, meeting)
    elif arguments.command == "bench":
        from nccl_m2n.cli.bench import bench

        bench(arguments, meeting)
    elif arguments.command == "doctor":
        from nccl_m2n.cli.doctor import doctor

        doctor(arguments, meeting)
    elif arguments.command == "plan":
        from nccl_m2n.cli.planned import plan

        plan(arguments)
    else:
        from nccl_m2n.cli.planned import simulate

        simulate(arguments)


def _say(error: Exception, given: Sequence[str], rank: int) -> int:
    """Print an error that all ranks know of, on one of them."""
    if rank == 0:
        print(f"{_title(given)}: error: {one_line(error)}", file=sys.stderr, flush=True)
    return error.status if isinstance(error, RefusedError) else USAGE


def _title(given: Sequence[str]) -> str:
    return " ".join([PROGRAM, *[word for word in given[:1] if not word.startswith("-")]])
