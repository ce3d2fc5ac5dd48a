# SPDX-License-Identifier: Apache-2.0
"""`plan` and `simulate`: what a refit would move and how long that would take; they need no ranks."""

from __future__ import annotations

import argparse
import time

from nccl_m2n.cli.model import find_model
from nccl_m2n.cli.output import check_writable, methods_data, publish
from nccl_m2n.cli.problem import Problem
from nccl_m2n.errors import CommandError
from nccl_m2n.planning import Plan


def plan(arguments: argparse.Namespace) -> None:
    """Print the plan's table."""
    problem, made, domains_from, seconds = _planned(arguments)
    text = f"{problem.headline()}\n{made}\n({domains_from})\nplanned in {seconds:.3f} s"
    publish(text, "plan", _data(problem, made, seconds), arguments.json)


def simulate(arguments: argparse.Namespace) -> None:
    """Print what the plan and the methods it is compared with would take on given links."""
    try:
        from nccl_m2n.simulation import Links
        from nccl_m2n.simulation import simulate as run
    except ImportError:
        raise CommandError("this version of nccl_m2n has no cost model yet; use the plan command") from None
    problem, made, domains_from, seconds = _planned(arguments)
    links, changed = Links(arguments.nic_gbytes, arguments.nvlink_gbytes), arguments.changed
    timeline = run(made, links, changed=changed)
    methods = methods_data(made)
    for each in [timeline, *timeline.compare()]:
        methods[each.plan.options.method]["seconds"] = each.seconds
    data = _data(problem, made, seconds) | {
        "methods": methods,
        "nic_gbytes": arguments.nic_gbytes,
        "nvlink_gbytes": arguments.nvlink_gbytes,
        "seconds": timeline.seconds,
    }
    publish(f"{problem.headline()}\n{timeline}\n({domains_from})", "simulate", data, arguments.json)


def _planned(arguments: argparse.Namespace) -> tuple[Problem, Plan, str, float]:
    check_writable(arguments.json)
    problem = Problem.of(arguments, find_model(arguments, data=False))
    began = time.perf_counter()
    # As `refit` takes them on one machine.
    found = [list(range(problem.ranks))]
    topology, domains_from = problem.topology(problem.domain_for(arguments.domain, "host", found), found)
    made = problem.plan(topology)
    return problem, made, domains_from, time.perf_counter() - began


def _data(problem: Problem, made: Plan, seconds: float) -> dict[str, object]:
    return {
        **problem.data(),
        "ranks": problem.ranks,
        "domains": [list(ranks) for ranks in made.topology.domains],
        "digest": made.digest,
        "methods": methods_data(made),
        "plan_seconds": seconds,
    }
