# SPDX-License-Identifier: Apache-2.0
"""Turn off or double every constant and branch of planning's heuristics: a test must fail each time.

usage: python -m tests.mutate [beginning of a name]

Each line of `MUTATIONS` changes the source of one module; the test named beside it passes before and fails under it.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import nccl_m2n.planning
from tests.planning import test_heuristics

PACKAGE = "nccl_m2n.planning"


class Mutation(NamedTuple):
    module: str  # of planning
    old: str  # occurs once in its source
    new: str
    test: str  # in tests/planning/test_heuristics.py

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.module}: {self.old.strip()}  →  {self.new.strip() or 'nothing'}"


def constant(module: str, name: str, value: str, test: str, *others: str) -> list[Mutation]:
    """A constant doubled, and set to what turns it off."""
    doubled = Mutation(module, f"\n{name} = {value}", f"\n{name} = 2 * ({value})", test)
    return [
        doubled,
        *[Mutation(module, f"\n{name} = {value}", f"\n{name} = {other}", test) for other in others],
    ]


MUTATIONS = [
    *constant("tapes", "ALIGN", "16", "test_cuts_fall_on_multiples_of_16_bytes", "1"),
    *constant("tapes", "MIN_FLOW", "64 << 10", "test_what_is_short_is_not_cut_below_64_kib", "1"),
    Mutation("tapes", "cut = _snap(", "cut = (lambda cut, *_: cut)(", "test_cuts_near_the_end_of_a_stream_snap_to_it"),
    Mutation("tapes", "near_start, near_stop = within < MIN_FLOW", "near_start, near_stop = within < 0",
             "test_cuts_near_the_end_of_a_stream_snap_to_it"),
    Mutation("tapes", "stop[row] - cut < MIN_FLOW", "stop[row] - cut < 0",
             "test_cuts_near_the_end_of_a_stream_snap_to_it"),
    *constant("tapes", "MIN_FLOW", "64 << 10", "test_cuts_farther_off_do_not_snap"),
    Mutation("tapes", "turn = np.where(short,", "turn = np.where(short & False,",
             "test_short_tapes_start_at_another_member_each"),
    Mutation("routes", "rail = topology.rail_table[table.single[holders]]", "rail = np.zeros_like(holders)",
             "test_flows_keep_to_their_rail"),
    *constant("feeds", "TOLERANCE", "1.02", "test_sources_feed_as_many_domains_as_keep_them_no_busier_than_needers",
              "1.0"),
    *constant("feeds", "TOLERANCE", "1.02",
              "test_holders_of_a_domain_serve_it_unless_they_send_more_than_needers_receive", "1.0"),
    Mutation("feeds", "calm = most[0] <= TOLERANCE * most[1]", "calm = most[0] < 0",
             "test_holders_of_a_domain_serve_it_unless_they_send_more_than_needers_receive"),
    Mutation("feeds", "table.counts[feeds.needers] <= table.counts[feeds.senders]",
             "table.counts[feeds.needers] < 0",
             "test_as_many_holders_as_needers_serve_them_directly_in_a_busy_domain"),
    Mutation("feeds", "chain = nth * chains // np.maximum(count, 1)", "chain = np.minimum(nth, chains - 1)",
             "test_chains_differ_by_one_domain_at_most"),
    Mutation("routes", "new = opens(*key)", "new = np.ones(len(sort), bool)",
             "test_what_a_sender_feeds_to_several_chains_is_packed_once"),
    *constant("routes", "FAN_OUT", "256", "test_1500_replicas_in_a_domain", "1 << 40"),
    Mutation("routes", "(expand(counts)[1] - position[row]) % counts[row]", "expand(counts)[1]",
             "test_handing_on_through_others_reaches_everyone_once_and_evenly"),
    *constant("rounds", "ROUNDS_PER_CROSSING", "24", "test_24_rounds_for_each_crossing_of_a_chain", "1"),
    *constant("rounds", "ROUNDS_PER_CROSSING", "24", "test_rounds_hide_what_is_handed_on_last", "1 << 40"),
    *constant("rounds", "HANDED_ON_LATE", "0.025", "test_rounds_hide_what_is_handed_on_last", "1e9"),
    *constant("rounds", "NVLINK_PER_NIC", "9", "test_rounds_hide_what_is_handed_on_last", "1e9"),
    *constant("rounds", "MIN_ROUNDS", "12", "test_rounds_hide_what_is_handed_on_last", "1"),
    *constant("rounds", "MIN_ROUND_BYTES", "1 << 20", "test_a_round_moves_a_mebibyte_at_least", "1"),
    *constant("rounds", "ROUNDS_SINGLE_HOP", "8", "test_few_rounds_for_a_single_hop", "1 << 40"),
    *constant("rounds", "MIN_ROUND_BYTES_SINGLE_HOP", "128 << 20", "test_few_rounds_for_a_single_hop", "1"),
    *constant("options", "DEFAULT_STAGING_BYTES", "256 << 20", "test_staging_of_256_mib_where_none_is_said"),
    Mutation("rounds", "rounds = rounds * 8 // 7 + 1", "rounds = rounds * 16 // 7 + 1",
             "test_no_more_rounds_than_staging_asks_for"),
    *constant("rounds", "MIN_CHUNK", "64 << 10", "test_short_flows_get_a_chunk_for_each_64_kib", "1 << 40"),
    Mutation("rounds", "return _ordinal(sender, receiver) + _ordinal(receiver, sender)",
             "return _ordinal(receiver, sender)", "test_receivers_are_served_one_after_another"),
    Mutation("rounds", "return _ordinal(sender, receiver) + _ordinal(receiver, sender)",
             "return _ordinal(sender, receiver)", "test_receivers_are_served_one_after_another"),
    *constant("rounds", "MAX_MESSAGES", "1024", "test_a_group_has_1024_messages_at_most", "1 << 40"),
    Mutation("rounds", "made = _cap_groups(routes, world, made)", "",
             "test_flows_that_take_no_turns_do_not_meet_in_one_group"),
    Mutation("rounds", 'flows["phase"] = (np.arange(len(flows)) * GOLDEN % 2**32) * rounds >> 32', "pass",
             "test_flows_that_take_no_turns_do_not_meet_in_one_group"),
    Mutation("rounds", "\nGOLDEN = 2654435769", "\nGOLDEN = 0",
             "test_flows_that_take_no_turns_do_not_meet_in_one_group"),  # twice as much would do as well
    *constant("rounds", "CHUNKS_AT_ONCE", "1 << 18", "test_counting_loads_takes_little_memory", "1 << 40"),
    *constant("rounds", "BIG_FLOW", "1 / 8", "test_flows_of_an_eighth_of_a_nic_take_turns", "0"),
    *constant("rounds", "UNEVEN", "1.08", "test_turns_that_leave_nics_idle_are_not_taken"),
    Mutation("rounds", "\nUNEVEN = 1.08", "\nUNEVEN = 0", "test_flows_of_an_eighth_of_a_nic_take_turns"),
    Mutation("rounds", "not _take_turns(routes, world, crossing, made)", "True",
             "test_flows_of_an_eighth_of_a_nic_take_turns"),
    Mutation("rounds", 'fill = 1 + int(hops["depth"][hops["network"]].max()) / rounds', "fill = 1",
             "test_the_fill_of_a_chain_is_no_fault_of_turns"),
    *constant("rounds", "PORT_BYTES", "4 << 20", "test_where_senders_meet_rounds_are_gentle", "1 << 40"),
    *constant("rounds", "MAX_GENTLE_ROUNDS", "64", "test_where_senders_meet_rounds_are_gentle", "1 << 40"),
    Mutation("rounds", "if rounds < gentle and _senders_meet(routes, crossing):", "if rounds < gentle:",
             "test_a_sender_alone_needs_no_gentle_rounds"),
    Mutation("rounds", "if rounds < gentle and _senders_meet(routes, crossing):", "if False:",
             "test_where_senders_meet_rounds_are_gentle"),
    *constant("traffic", "MOST_ASKED", "512", "test_up_to_512_sets_of_ranks_are_asked_for_the_bound_of_nics", "0"),
    *constant("methods", "MAX_COMPARED_HOPS", "50_000",
              "test_other_methods_are_compared_as_far_as_they_make_50_000_hops", "0"),
]  # fmt: skip


def modules() -> list[ModuleType]:
    """All modules of planning."""
    names = [info.name for info in pkgutil.iter_modules(nccl_m2n.planning.__path__)]
    return [nccl_m2n.planning, *[importlib.import_module(f"{PACKAGE}.{name}") for name in names]]


@contextmanager
def mutated(mutation: Mutation) -> Iterator[None]:
    """A module made anew from changed source, and known to all modules that imported from it."""
    module = importlib.import_module(f"{PACKAGE}.{mutation.module}")
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    if source.count(mutation.old) != 1:
        raise SystemExit(
            f"{mutation.name}: expected what is changed once, got it {source.count(mutation.old)} times"
        )
    known = [*modules(), test_heuristics]
    before = [dict(vars(each)) for each in known]
    own = dict(vars(module))
    changed: dict[str, Any] = {"__name__": module.__name__, "__file__": module.__file__}
    exec(compile(source.replace(mutation.old, mutation.new), str(module.__file__), "exec"), changed)
    try:
        for each in known:
            for name, value in list(vars(each).items()):
                if not name.startswith("__") and name in changed and name in own and value is own[name]:
                    setattr(each, name, changed[name])
        vars(module).update({k: v for k, v in changed.items() if not k.startswith("__")})
        yield
    finally:
        for each, names in zip(known, before, strict=True):
            vars(each).clear()
            vars(each).update(names)


def cases(test: Callable[..., None]) -> list[dict[str, Any]]:
    """The arguments of each case of a test."""
    made: list[dict[str, Any]] = [{}]
    for mark in getattr(test, "pytestmark", []):
        names, values = mark.args
        names = [names] if isinstance(names, str) else names
        made = [
            {**one, **dict(zip(names, value if len(names) > 1 else [value], strict=True))}
            for one in made
            for value in values
        ]
    return made


@lru_cache
def passes_unchanged(name: str) -> bool:
    """Whether a test passes without any change."""
    return passes(name)


def passes(name: str) -> bool:
    """Whether a test passes in all of its cases."""
    test = getattr(test_heuristics, name)
    try:
        for arguments in cases(test):
            test(**arguments)
    except Exception:
        return False
    return True


def main(wanted: str = "") -> int:
    """Try every mutation; return how many went unnoticed."""
    tried = unnoticed = 0
    for mutation in MUTATIONS:
        if not mutation.name.startswith(wanted):
            continue
        if not passes_unchanged(mutation.test):
            raise SystemExit(f"{mutation.test} fails without any change")
        with mutated(mutation):
            noticed = not passes(mutation.test)
        tried, unnoticed = tried + 1, unnoticed + (not noticed)
        print(f"{'fails' if noticed else 'PASSES':6}  {mutation.test}  under  {mutation.name}", flush=True)
    print(f"{tried} mutations, {unnoticed} unnoticed")
    return unnoticed


if __name__ == "__main__":
    raise SystemExit(min(main(*sys.argv[1:2]), 1))
