# SPDX-License-Identifier: Apache-2.0
"""The command: draws case after case, counts problems, tells what went wrong and how to see it again."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from random import Random

from tests.fuzz import launch
from tests.fuzz.bind_case import bind_case, twins_case
from tests.fuzz.outcome import Outcome
from tests.fuzz.refit_case import refit_case
from tests.fuzz.refusal_case import refusal_case
from tests.fuzz.reshard_case import reshard_case
from tests.fuzz.steps_case import delta_case, rebind_case, refit_delta_case
from tests.fuzz.world import TRANSPORTS, World, find_transport, make_transport

Case = Callable[[World, Random, str, Collection[int] | None], Outcome]

KINDS: dict[str, tuple[int, Case]] = {  # how often, what
    "bind": (6, bind_case),
    "twins": (2, twins_case),
    "reshard": (4, reshard_case),
    "refit": (4, refit_case),
    "refusal": (1, refusal_case),
    "delta": (2, delta_case),
    "rebind": (1, rebind_case),
    "refit-delta": (1, refit_delta_case),
}


def arguments() -> argparse.ArgumentParser:
    """What the command takes."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description="Random problems, checked to the byte."
    )
    parser.add_argument(
        "--seconds", type=float, help="stop after so long (default 10, unless --count is given)"
    )
    parser.add_argument("--count", type=int, help="stop after so many problems")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=8, help="ranks of a local transport")
    parser.add_argument("--processes", type=int, help="start so many ranks over --transport, each a process")
    parser.add_argument(
        "--jobs", type=int, default=1, help="processes, or groups of --processes, that share the work"
    )
    parser.add_argument(
        "--kind", choices=KINDS, action="append", help="only cases of this kind; may be repeated"
    )
    parser.add_argument("--case", type=int, help="only this case")
    parser.add_argument("--tensors", help="of a bind case, only these tensors: 3,17")
    parser.add_argument("--transport", choices=TRANSPORTS, help="default: what the launcher says")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds that the transport may take")
    parser.add_argument("--failures", type=int, default=5, help="stop after so many cases that went wrong")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--step", type=int, default=1, help="from one case to the next")
    parser.add_argument("--json", action="store_true", help="one line of JSON in the end")
    return parser


def run_case(
    world: World, options: argparse.Namespace, number: int, chosen: Collection[int] | None
) -> Outcome:
    """One case; an error is an outcome too. Every process calls it."""
    seed = f"{options.seed}.{number}"
    rng = Random(seed)
    kinds = options.kind or list(KINDS)
    kind = rng.choices(kinds, [KINDS[k][0] for k in kinds])[0]
    try:
        outcome = KINDS[kind][1](world, rng, seed, chosen)
    except Exception:
        outcome = Outcome(wrong=[traceback.format_exc()])
    outcome.counts[kind] += 1
    return outcome


def fuzz(world: World, options: argparse.Namespace) -> tuple[Counter[str], int]:
    """Case after case; gives what was counted and how many cases went wrong."""
    counts: Counter[str] = Counter()
    failures, number, began = 0, options.first, time.monotonic()
    chosen = None if options.tensors is None else {int(n) for n in options.tensors.split(",")}
    seconds = options.seconds if options.seconds or options.count else 10.0
    while True:
        if options.case is not None:
            number = options.case
        outcome = run_case(world, options, number, chosen)
        counts += outcome.counts
        over = bool(seconds) and time.monotonic() - began > seconds
        said = world.gather([outcome.wrong, over])
        wrong = [what for wrong, _ in said for what in wrong]
        if wrong:
            failures += 1
            report(world, options, number, wrong)
            if world.kind != "local":
                world.give_up()  # ranks may be anywhere
        counted = options.count is not None and counts["problems"] >= options.count
        if said[0][1] or counted or options.case is not None or failures >= options.failures:
            return counts, failures
        number += options.step


def report(world: World, options: argparse.Namespace, number: int, wrong: Sequence[str]) -> None:
    """How to see it again, in one line, and what went wrong."""
    if not world.leader:
        return
    kinds = "".join(f" --kind {kind}" for kind in options.kind or ())
    again = f"python -m tests.fuzz --seed {options.seed} --ranks {world.size} --case {number}{kinds}"
    alone = _smallest(world, options, number, wrong) if world.kind == "local" else None
    print(f"WRONG: {again}" + (f" --tensors {alone}" if alone else f"  # {world.kind}"))
    for what in list(dict.fromkeys(wrong))[:6]:
        print("  " + what[:2000].replace("\n", "\n  "), flush=True)


def _smallest(world: World, options: argparse.Namespace, number: int, wrong: Sequence[str]) -> str | None:
    """A tensor that goes wrong alone."""
    if options.tensors is not None:
        return str(options.tensors)
    for tensor in range(150):
        outcome = run_case(world, options, number, {tensor})
        if outcome.wrong:
            return str(tensor)
    return None


def share_out(options: argparse.Namespace, given: Sequence[str]) -> int:
    """Run as several processes and add up what they say."""
    command = [sys.executable, "-m", "tests.fuzz", *given, "--json", "--step", str(options.jobs)]
    if options.count is not None:
        command += ["--count", str(-(-options.count // options.jobs))]
    command += ["--jobs", "1", *([] if options.processes else ["--transport", "local"])]
    began = time.monotonic()
    jobs = [
        subprocess.Popen([*command, "--first", str(options.first + job)], stdout=subprocess.PIPE, text=True)
        for job in range(options.jobs)
    ]
    counts, failures, broken = Counter[str](), 0, 0
    for job in jobs:
        out = job.communicate()[0].splitlines()
        print(*[line for line in out if not line.startswith("{")], sep="\n", end="\n" if len(out) > 1 else "")
        lines = [json.loads(line) for line in out if line.startswith("{")]
        broken += not lines
        for line in lines:
            counts += line["counts"]
            failures += line["failures"]
    tell(
        options,
        counts,
        failures + broken,
        time.monotonic() - began,
        f"{options.jobs} jobs of {options.processes or options.ranks}",
    )
    return 1 if failures or broken else 0


def tell(
    options: argparse.Namespace, counts: Counter[str], failures: int, seconds: float, where: str
) -> None:
    """The last line."""
    if options.json:
        print(json.dumps({"counts": counts, "failures": failures, "seconds": seconds}), flush=True)
        return
    cases = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind])
    print(
        f"{counts['problems']} problems in {counts['plans']} plans ({cases} cases), {failures} cases wrong, seed "
        f"{options.seed}, {where} ranks, {seconds:.1f} s: {counts['problems'] / max(seconds, 1e-9):.0f} a second",
        flush=True,
    )


def main(given: Sequence[str]) -> int:
    """Run the command; the exit status is 1 if anything went wrong."""
    options = arguments().parse_args(given)
    kind = options.transport or find_transport()
    if options.jobs > 1 and (kind == "local" or options.processes) and options.case is None:
        return share_out(options, given)
    if options.processes:
        started = [*given, "--processes", "0"]
        return launch.run(
            kind, options.processes, [*(["-m", "mpi4py"] * (kind == "mpi")), "-m", "tests.fuzz", *started]
        )
    began = time.monotonic()
    transport = make_transport(kind, options.ranks, options.timeout)
    world = World(transport, kind, options.timeout)
    counts, failures = fuzz(world, options)
    if world.leader:
        tell(options, counts, failures, time.monotonic() - began, f"{world.kind}, {world.size}")
    transport.close()
    return 1 if failures else 0
