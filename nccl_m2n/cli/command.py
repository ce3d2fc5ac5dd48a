# SPDX-License-Identifier: Apache-2.0
"""From the command line to an exit status: who prints, who waits for whom, and how all ranks end together."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence

from nccl_m2n.cli.arguments import PROGRAM, parse
from nccl_m2n.cli.output import one_line, plain_errors
from nccl_m2n.errors import M2nError, TransportError, VerificationError
from nccl_m2n.transport.agree import together
from nccl_m2n.transport.meeting import Meeting, Place

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
        arguments = together(
            meeting,
            "read the command line",
            plain_errors(lambda _: parse(given)),
            # Compared, so that no rank waits in a step that another one was not asked to take.
            facts=lambda _: {"the command line": " ".join(given)},
        )[meeting.rank]
        _dispatch(arguments, meeting)
    except BrokenPipeError:  # `... | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAULT
    except (Exception, KeyboardInterrupt) as error:
        known = isinstance(error, M2nError) and (error.raised_by > 0 or meeting.size == 1)
        if known and not _is_fault(error.__cause__):
            status = _say(error, given, meeting.rank)
            meeting.close()
            return status
        _report_fault(error, _title(given))
        if meeting.size > 1:
            meeting.end_all(FAULT)
        return FAULT
    meeting.close()
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


def _say(error: BaseException, given: Sequence[str], rank: int) -> int:
    """Print an error that all ranks know of, on one of them; gives the exit status."""
    if rank == 0:
        print(f"{_title(given)}: error: {one_line(error)}", file=sys.stderr, flush=True)
    return FAULT if isinstance(error, VerificationError) else USAGE


def _is_fault(cause: BaseException | None) -> bool:
    """Whether an error comes of one that nobody raised on purpose: then where it was is what matters."""
    return isinstance(cause, Exception) and not isinstance(cause, M2nError | OSError | MemoryError)


def _report_fault(error: BaseException, command: str) -> None:
    """Print an error that only this rank may know of, or one of this program."""
    if isinstance(error, M2nError) and not _is_fault(error.__cause__):
        print(f"{command}: error: {one_line(error)}", file=sys.stderr)
    else:
        traceback.print_exception(error)


def _title(given: Sequence[str]) -> str:
    return " ".join([PROGRAM, *[word for word in given[:1] if not word.startswith("-")]])
