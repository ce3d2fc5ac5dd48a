# SPDX-License-Identifier: Apache-2.0
"""Time limits: on calls that cannot be given one, and on conditions that are polled."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from nccl_m2n.errors import TransferTimeout

Result = TypeVar("Result")

SHORTEST_SLEEP = 20e-6  # seconds
LONGEST_SLEEP = 2e-3


def run_within(seconds: float, what: str, call: Callable[[], Result]) -> Result:
    """Run a blocking call, and stop waiting for it after a time.

    The call runs in a thread of its own. Past the limit the thread is left behind: what it waits for is
    a peer that is gone, and nothing can end that wait from outside but the end of the process.

    Args:
        seconds: The limit.
        what: What the call does, for the error.
        call: The call.

    Raises:
        TransferTimeout: If it takes longer.
    """
    outcome: list[Result] = []
    failure: list[BaseException] = []

    def body() -> None:
        try:
            outcome.append(call())
        except BaseException as error:  # handed to the caller's thread
            failure.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    thread.join(seconds)
    if failure:
        raise failure[0]
    if not outcome:
        raise TransferTimeout(
            f"{what} took longer than {seconds:g} s: a peer is most likely gone or never came"
        )
    return outcome[0]


def poll(done: Callable[[], bool], deadline: float | None) -> bool:
    """Sleep until a condition holds or the time is over; never spin, which would starve NCCL's own threads.

    Args:
        done: The condition; may raise to end the wait.
        deadline: On the clock of `time.monotonic`; None for none.

    Returns:
        Whether the condition holds.
    """
    sleep = SHORTEST_SLEEP
    while not done():
        left = sleep if deadline is None else deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(sleep, left))
        sleep = min(sleep * 1.5, LONGEST_SLEEP)
    return True
