# SPDX-License-Identifier: Apache-2.0
"""What trying problems came to, and the one form in which a collective call is refused."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nccl_m2n import M2nError
from tests.fuzz.world import World


@dataclass
class Outcome:
    """What one process saw of a case."""

    counts: Counter[str] = field(default_factory=Counter)  # the same on every process
    wrong: list[str] = field(default_factory=list)

    def expect(self, good: bool, what: str) -> None:
        """Note what is wrong."""
        if not good:
            self.wrong.append(what)


def refused(world: World, call: Callable[[], Any], what: str) -> list[str]:
    """Make a call that is a mistake on some rank: all ranks must raise the same. Collective."""
    said: list[str] | None = None
    try:
        call()
    except M2nError as error:
        said = [type(error).__name__, str(error)]
    except Exception:
        said = ["expected an M2nError", traceback.format_exc()]
    every = world.gather(said, what)
    if said is None or said[0] == "expected an M2nError":
        return [f"{what}: {'accepted' if said is None else said}"]
    return [] if all(other == said for other in every) else [f"{what}: told different things: {every}"]
