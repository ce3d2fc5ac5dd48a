# SPDX-License-Identifier: Apache-2.0
"""`refit`: move a model's real bytes between two shardings, and verify every one where it arrives."""

from __future__ import annotations

import argparse
import statistics
import struct
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TypeVar

import numpy as np

from nccl_m2n.cli import transports
from nccl_m2n.cli.model import find_model
from nccl_m2n.cli.output import check_writable, methods_data, pairs_text, plain_errors, progress, publish
from nccl_m2n.cli.problem import Problem
from nccl_m2n.cli.shards import Shards
from nccl_m2n.cli.updates import ADAM, UpdatedWeights, keep_as
from nccl_m2n.cli.weights import MadeUpWeights, StoredWeights
from nccl_m2n.errors import CommandError, VerificationError
from nccl_m2n.execution.bound import Bound
from nccl_m2n.execution.delta.changes import Changes
from nccl_m2n.measure.check import count_wrong
from nccl_m2n.planning import Plan
from nccl_m2n.transport import KINDS, Transport
from nccl_m2n.transport.agree import together
from nccl_m2n.transport.meeting import Meeting
from nccl_m2n.typing import JsonObject

Result = TypeVar("Result")


@dataclass
class Refitting:
    """One refit under way; the steps in the order in which they are taken."""

    arguments: argparse.Namespace
    problem: Problem
    weights: UpdatedWeights
    transport: Transport
    carrier: str  # what the transport is called
    plan: Plan
    domains_from: str
    seconds: dict[str, float] = field(default_factory=dict)  # by step, of this process
    moves: list[float] = field(default_factory=list)  # seconds of each move, its slowest rank's
    changes: list[Changes] = field(default_factory=list)  # of each move, with --delta
    verified: int = 0  # bytes, all ranks together

    def __post_init__(self) -> None:
        devices = getattr(self.transport, "devices", {})
        transfers, self.shown = self.plan.transfers, 0 in self.transport.local_ranks
        self.sources = {
            rank: Shards(((t.name, t.source, t.dtype) for t in transfers), rank, devices.get(rank))
            for rank in self.transport.local_ranks
        }
        self.destinations = {
            rank: Shards(((t.name, t.destination, t.dtype) for t in transfers), rank, devices.get(rank))
            for rank in self.transport.local_ranks
        }

    @property
    def host_bytes(self) -> int:
        """Host memory that this process's arrays take."""
        if self.transport.memory == "device":
            return 0
        return sum(s.allocated for side in (self.sources, self.destinations) for s in side.values())

    def read(self) -> None:
        """Every source rank reads what it holds, and nothing else. Collective."""

        def allocate(rank: int) -> None:
            self.destinations[rank].allocate()
            self.sources[rank].allocate()

        together(self.transport, "allocate", plain_errors(allocate))
        self._timed("read", self._fill)

    def _fill(self) -> None:
        """Put the weights of this step in the sources. Collective."""

        def fill(rank: int) -> None:
            mine = self.sources[rank]
            for name in progress(mine, len(mine), f"read {rank}", self.shown):
                mine.fill(name, self.weights)

        together(self.transport, "read", plain_errors(fill))

    def move(self) -> None:
        """Bind, run as often as asked, and verify what arrived. Collective.

        Where values change, or only what changed is sent, that is after every step.
        """
        sources, destinations = (
            {rank: shards.views() for rank, shards in side.items()}
            for side in (self.sources, self.destinations)
        )
        asked, steps = self.arguments, self.arguments.steps
        bound = self._timed(
            "bind", lambda: self.plan.bind(self.transport, sources, destinations, delta=asked.delta)
        )
        stepwise = bool(asked.delta or asked.update)
        with bound:
            for step in progress(range(steps), steps, "move", self.shown and not stepwise):
                self._step(bound, step)
                if stepwise or step == steps - 1:
                    self.verify()

    def _step(self, bound: Bound, step: int) -> None:
        """One move, from a start in common."""
        if step and self.arguments.update:
            self.weights.step = step
            self._fill()
        if not (step and self.arguments.delta):  # what did not change is not sent again
            for shards in self.destinations.values():
                shards.poison()
        self._slowest(0.0)  # all ranks start together
        began = time.perf_counter()
        bound.run()
        bound.wait(self.arguments.timeout)
        self.moves.append(self._slowest(time.perf_counter() - began))
        if bound.changes is not None:
            self.changes.append(bound.changes)

    def verify(self) -> None:
        """Compare every destination byte with where it came from. Collective.

        Raises:
            VerificationError: Naming what is wrong.
        """

        def verify(rank: int) -> int:
            shards = self.destinations[rank]
            for name in progress(shards, len(shards), f"verify {rank}", self.shown):
                read = partial(self.weights.read, name)
                wrong = count_wrong(shards.read(name), shards.layouts[name], rank, read)
                if wrong:
                    raise VerificationError(
                        f"tensor {name!r}: {wrong} bytes differ from {self.weights.label}"
                    )
            return shards.nbytes

        done = self._timed("verify", lambda: together(self.transport, "verify", plain_errors(verify)))
        payload = {rank: struct.pack("<q", count) for rank, count in done.items()}
        self.verified = sum(struct.unpack("<q", said)[0] for said in self.transport.exchange(payload))

    def _timed(self, step: str, work: Callable[[], Result]) -> Result:
        began = time.perf_counter()
        result = work()
        self.seconds[step] = time.perf_counter() - began
        return result

    def _slowest(self, seconds: float) -> float:
        """The largest of all ranks' numbers. Collective."""
        payload = dict.fromkeys(self.transport.local_ranks, struct.pack("<d", seconds))
        return max(float(struct.unpack("<d", said)[0]) for said in self.transport.exchange(payload))


def refit(arguments: argparse.Namespace, meeting: Meeting) -> None:
    """Carry out the command. Collective."""
    problem, weights = together(meeting, "read the problem", plain_errors(lambda _: _pose(arguments)))[
        meeting.rank
    ]
    kind = transports.choose(arguments.transport, meeting, problem, arguments.ranks)
    with transports.make(kind, meeting, problem, arguments.ranks) as transport:
        found = transports.domains_found(transport) if arguments.domain is None else []
        domain = problem.domain_for(arguments.domain, transport.memory, found)
        began = time.perf_counter()

        def planned(_: int) -> tuple[Plan, str]:
            topology, domains_from = problem.topology(domain, found)
            return problem.plan(topology), domains_from

        plan, domains_from = together(meeting, "plan", plain_errors(planned))[meeting.rank]
        job = Refitting(arguments, problem, weights, transport, KINDS[kind].carrier, plan, domains_from)
        job.seconds["plan"] = time.perf_counter() - began
        transports.require_memory(meeting, job.host_bytes, "take fewer layers (--layers) or more hosts")
        job.read()
        job.move()
        if meeting.rank == 0:
            publish(_text(job), "refit", _data(job), arguments.json)


def _pose(arguments: argparse.Namespace) -> tuple[Problem, UpdatedWeights]:
    """What is moved, and where its values come from."""
    check_writable(arguments.json)
    model = find_model(arguments, data=not arguments.made_up)
    stored, update = model.manifest, arguments.update
    has_data = model.checkpoint is not None and not arguments.made_up
    if not has_data and ((update and update.kind == ADAM) or arguments.keep_as):
        raise CommandError(
            f"{model.label} has no data for --update adam and --keep-as; take a checkpoint, or --update random:0.01"
        )
    if arguments.keep_as:
        model = replace(model, manifest=keep_as(stored, arguments.keep_as))
    problem = Problem.of(arguments, model)
    problem.transfers  # noqa: B018 - what cannot be divided is refused here
    weights = StoredWeights(model.checkpoint) if model.checkpoint and has_data else MadeUpWeights(stored)
    return problem, UpdatedWeights(weights, stored, model.manifest, update)


def _data(job: Refitting) -> JsonObject:
    """The report as JSON data."""
    manifest, median = job.problem.model.manifest, statistics.median(job.moves)
    methods = methods_data(job.plan)
    moved = sum(manifest[t.name].nbytes for t in job.plan.transfers)
    return {
        **job.problem.data(),
        "weights": job.weights.label,
        "transport": job.carrier,
        "memory": job.transport.memory,
        "ranks": job.problem.ranks,
        "domains": [list(ranks) for ranks in job.plan.topology.domains],
        "domains_from": job.domains_from,
        "digest": job.plan.digest,
        "methods": methods,
        "reshard_share": moved / manifest.nbytes if manifest.nbytes else 1.0,
        "seconds": median,
        "seconds_of_each_step": job.moves,
        "seconds_of_rank_0": job.seconds,
        **({"changes_of_each_step": [asdict(each) for each in job.changes]} if job.changes else {}),
        "model_gbytes_per_second": manifest.nbytes / median / 1e9,
        "network_gbytes_per_second": methods["reshard"]["network_bytes"] / median / 1e9,
        "verified_bytes": job.verified,
        "wrong_bytes": 0,
    }


def _text(job: Refitting) -> str:
    """The report for people."""
    data, own = _data(job), job.seconds
    model, reshard = data["model"], data["methods"]["reshard"]
    bound = reshard["network_bytes_bound"]
    conventional = data["methods"].get("gather_broadcast")
    network = f"{reshard['network_bytes']:,} bytes, the least there can be is {bound:,}"
    if conventional:
        nic, theirs = reshard["busiest_nic_bytes"], conventional["busiest_nic_bytes"]
        ratio = f", {theirs / nic:.2f} × as much" if nic else ""
        busiest = f"{nic:,} bytes; gather+broadcast: {theirs:,}{ratio}"
        network += f"; gather+broadcast: {conventional['network_bytes']:,}"
    else:
        busiest = f"{reshard['busiest_nic_bytes']:,} bytes"
    median, spread = data["seconds"], data["seconds_of_each_step"]
    rows = [
        (
            "tensors",
            f"{model['tensors']:,}, {model['bytes']:,} bytes, {data['reshard_share']:.1%} of them by Reshard",
        ),
        ("network", network),
        ("busiest NIC", busiest),
        ("rounds", f"{reshard['rounds']:,}"),
        ("messages", f"{reshard['messages']:,}"),
        ("seconds", f"{median:.4f}, median of {len(spread)}: {np.min(spread):.4f} to {np.max(spread):.4f}"),
        ("speed", f"{data['model_gbytes_per_second']:.2f} GB/s of model, GB = 1e9 bytes"),
        ("before", f"plan {own['plan']:.3f} s, read {own['read']:.3f} s, bind {own['bind']:.3f} s"),
        ("verified", f"{job.verified:,} bytes on the destination ranks, every one as in {job.weights.label}"),
    ]
    rows[-1:-1] = _step_rows(job)
    made_up = ", made-up weights" if job.weights.label == MadeUpWeights.label else ""
    head = job.problem.headline(f"{made_up}, by {job.carrier}, {job.transport.memory} memory")
    return f"{head}\n{job.plan}\n({job.domains_from})\n\n{pairs_text(rows)}"


def _step_rows(job: Refitting) -> list[tuple[str, str]]:
    """What changed in each step, and what was sent of it."""
    return [
        (
            f"step {step}",
            f"{each.changed:.2%} changed, {each.network_bytes:,} of {each.dense_bytes:,} bytes over the network, "
            f"{seconds:.4f} s",
        )
        for step, (each, seconds) in enumerate(
            zip(job.changes, job.moves, strict=False), 1
        )  # none without --delta
    ]
