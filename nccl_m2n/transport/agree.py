# SPDX-License-Identifier: Apache-2.0
"""Agreement: all ranks find out together whether they may go on, and raise the same error if not."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from nccl_m2n import errors
from nccl_m2n.errors import DisagreementError, M2nError
from nccl_m2n.text import short_ranks
from nccl_m2n.transport.base import Transport

Result = TypeVar("Result")

MAX_REPORTS = 8  # ranks whose errors one message quotes


def together(
    transport: Transport,
    purpose: str,
    work: Callable[[int], Result],
    *,
    facts: Callable[[Mapping[int, Result]], Mapping[str, Any]] | None = None,
    limit: float | None = None,
) -> dict[int, Result]:
    """Do each local rank's share of some work, and raise the same error on every rank if one failed. Collective.

    Args:
        transport: Joins the ranks.
        purpose: What this is for.
        work: Does a rank's share; it may not wait for other ranks.
        facts: What of the results must be equal on all ranks, as for `raise_together`.
        limit: Time limit in seconds; None: the transport's own.
    """
    failures: dict[int, Exception] = {}
    made = {rank: attempt(partial(work, rank), failures, rank) for rank in transport.local_ranks}
    found = attempt(lambda: facts(made) if facts and not failures else {}, failures, transport.local_ranks[0])
    raise_together(transport, failures, found or {})
    return made


def attempt(work: Callable[[], Any], failures: dict[int, Exception], rank: int) -> Any:
    """Do one rank's share of the work, keeping its error for `raise_together`."""
    try:
        return work()
    except Exception as error:  # whatever it is, the peers must hear of it instead of waiting
        failures[rank] = error
        return None


def raise_together(
    transport: Transport,
    failures: Mapping[int, Exception],
    facts: Mapping[str, Any],
    details: Callable[[], Mapping[str, Any]] | None = None,
) -> None:
    """Raise the same error on every rank if any rank failed or the ranks' facts differ. Collective.

    Args:
        transport: Joins the ranks.
        failures: Errors of local ranks, to be raised everywhere.
        facts: What must be equal on all ranks; JSON data by name. They are compared by the order given and
            the first that differs is reported with the values and their ranks.
        details: More facts, exchanged only where the first ones differ, to say what the difference is.

    Raises:
        M2nError: The first failing rank's kind of error; `DisagreementError` if facts differ.
    """
    mine = json.dumps(facts)
    reports = [
        json.loads(report)
        for report in transport.exchange(
            {
                rank: json.dumps([_error_data(failures.get(rank)), mine]).encode()
                for rank in transport.local_ranks
            }
        )
    ]
    failed = {rank: error for rank, (error, _) in enumerate(reports) if error is not None}
    if failed:
        _raise_failure(failed, failures)
    texts = [text for _, text in reports]
    if len(set(texts)) > 1:
        if details is not None:  # every rank has seen the same texts, so all of them go on to this
            raise_together(transport, {}, details())
        raise _difference([json.loads(text) for text in texts])


def _error_data(error: Exception | None) -> list[str] | None:
    if error is None:
        return None
    name = type(error).__name__
    return [name, str(error) if isinstance(error, M2nError) else f"{name}: {error}"]


def _raise_failure(failed: Mapping[int, Sequence[str]], failures: Mapping[int, Exception]) -> None:
    by_text: dict[tuple[str, str], list[int]] = {}
    for rank, (kind, text) in failed.items():
        by_text.setdefault((kind, text), []).append(rank)
    lines = [f"rank {short_ranks(ranks)}: {text}" for (_, text), ranks in by_text.items()]
    if len(lines) > MAX_REPORTS:
        lines[MAX_REPORTS:] = [f"… and {len(lines) - MAX_REPORTS} more"]
    kind = getattr(errors, next(iter(by_text))[0], errors.TransportError)
    raise kind("\n".join(lines)) from next(iter(failures.values()), None)


def _difference(facts: Sequence[Mapping[str, Any]]) -> M2nError:
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


def _narrowed(name: str, values: Sequence[Any]) -> tuple[str, Sequence[Any]]:
    """Of lists, which may be long, the first entries that differ."""
    if all(isinstance(value, list) for value in values):
        for number, row in enumerate(itertools.zip_longest(*values)):
            if any(value != row[0] for value in row):
                return f"{name}, number {number}", row
    return name, values


def _fact_text(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or "nothing"
    return json.dumps(value, ensure_ascii=False)
