# SPDX-License-Identifier: Apache-2.0
"""Agreement: all ranks find out together whether they may go on, and raise the same error if not."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from nccl_m2n import errors
from nccl_m2n.errors import DisagreementError, M2nError
from nccl_m2n.text import short_ranks
from nccl_m2n.transport.ranks import Ranks, alike
from nccl_m2n.typing import Json, ReadJson

Result = TypeVar("Result")

MAX_REPORTS = 8  # ranks whose errors one message quotes


def together(
    ranks: Ranks,
    purpose: str,
    work: Callable[[int], Result],
    *,
    facts: Callable[[Mapping[int, Result]], Mapping[str, Json]] | None = None,
    details: Callable[[], Mapping[str, Json]] | None = None,
    limit: float | None = None,
) -> dict[int, Result]:
    """Do the work of each local rank; if it fails anywhere, all ranks raise the same error. Collective.

    Args:
        ranks: Who has to agree.
        purpose: What for, in a few words; equal on all ranks.
        work: What to do for one rank. It may not wait for other ranks.
        facts: What of the results must be equal on all ranks: JSON data by name. They are compared in the order
            given, and the first that differs is told, with the values and their ranks.
        details: More facts, exchanged only where the first ones differ, to say what the difference is.
        limit: Seconds that the exchange may take; None for that of `ranks`.

    Returns:
        The result of each local rank.

    Raises:
        M2nError: The first failing rank's kind of error; `DisagreementError` if facts differ, or if ranks came
            for another purpose.
        TransportError: If the ranks cannot exchange anything any more.
    """
    failures: dict[int, Exception] = {}
    made: dict[int, Result] = {}
    for rank in ranks.local_ranks:
        try:
            made[rank] = work(rank)
        except Exception as error:  # whatever it is, the peers must hear of it instead of waiting
            failures[rank] = error
    said = "{}"
    if facts is not None and not failures:
        try:
            said = json.dumps(facts(made))
        except Exception as error:
            failures[ranks.local_ranks[0]] = error
    _agree(ranks, purpose, failures, said, details, limit)
    return made


def _agree(
    ranks: Ranks,
    purpose: str,
    failures: Mapping[int, Exception],
    said: str,
    details: Callable[[], Mapping[str, Json]] | None,
    limit: float | None,
) -> None:
    own = next(iter(failures.values()), None)
    mine = {rank: json.dumps([_error_data(failures.get(rank)), said]).encode() for rank in ranks.local_ranks}
    try:
        reports = [json.loads(report) for report in ranks.exchange(mine, purpose, limit)]
    except M2nError as error:  # it hides what went wrong here
        raise error from own or error.__cause__
    failed = {rank: error for rank, (error, _) in enumerate(reports) if error is not None}
    if failed:
        raise alike(_failure(failed), ranks) from own
    texts = [text for _, text in reports]
    if len(set(texts)) > 1:
        if details is not None:  # every rank has seen the same texts, so all of them go on to this
            together(ranks, f"{purpose}: details", lambda _: None, facts=lambda _: details(), limit=limit)
        raise alike(_difference([json.loads(text) for text in texts]), ranks)


def _error_data(error: Exception | None) -> list[str] | None:
    if error is None:
        return None
    name = type(error).__name__
    return [name, str(error) if isinstance(error, M2nError) else f"{name}: {error}"]


def _failure(failed: Mapping[int, Sequence[str]]) -> M2nError:
    by_text: dict[tuple[str, str], list[int]] = {}
    for rank, (kind, text) in failed.items():
        by_text.setdefault((kind, text), []).append(rank)
    lines = [f"rank {short_ranks(ranks)}: {text}" for (_, text), ranks in by_text.items()]
    if len(lines) > MAX_REPORTS:
        lines[MAX_REPORTS:] = [f"… and {len(lines) - MAX_REPORTS} more"]
    first: type[M2nError] = getattr(errors, next(iter(by_text))[0], M2nError)
    return first("\n".join(lines))


def _difference(facts: Sequence[ReadJson]) -> M2nError:
    names = list(dict.fromkeys(name for each in facts for name in each))
    for fact in names:
        name, values = _narrowed(fact, [each.get(fact) for each in facts])
        by_value: dict[str, list[int]] = {}
        for rank, value in enumerate(values):
            by_value.setdefault(json.dumps(value), []).append(rank)
        if len(by_value) > 1:
            said = "; ".join(
                f"rank {short_ranks(ranks)}: {_fact_text(json.loads(value))}"
                for value, ranks in by_value.items()
            )
            return DisagreementError(
                f"expected all ranks to describe the same problem, got for {name}: {said}"
            )
    return DisagreementError("expected all ranks to describe the same problem, in the same order")


def _narrowed(name: str, values: Sequence[Json]) -> tuple[str, Sequence[Json]]:
    """Of lists, which may be long, the first entries that differ."""
    if all(isinstance(value, list) for value in values):
        for number, row in enumerate(itertools.zip_longest(*values)):
            if any(value != row[0] for value in row):
                return f"{name}, number {number}", row
    return name, values


def _fact_text(value: Json) -> str:
    if value is None or isinstance(value, str):
        return value or "nothing"
    return json.dumps(value, ensure_ascii=False)
