"""The chain of a notice: what the ranks of other groups do that stalled ranks wait for, and what those wait for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from bandmaster.calls.open_work import OpenWork
from bandmaster.contract import QUEUED, Workers
from bandmaster.watching.notice import Awaited, Ranks, awaited_by, facts_of, named, places

MOST_CALLS = 8  # that a chain follows
Find = Callable[[str], tuple[Workers, OpenWork] | None]  # the workers and the calls of an open group, by its name


def chain(ranks: Ranks, find: Find) -> list[str]:
    """The lines about the ranks that some ranks wait for, and about those that these wait for.

    Args:
        ranks: The ranks.
        find: Finds other groups.
    """
    lines = list[str]()
    visited = set[Awaited]()
    todo = _awaited(ranks)
    while todo and len(visited) < MOST_CALLS:
        call = todo.pop(0)
        found = find(call.group)
        if call in visited or found is None:
            continue
        visited.add(call)
        facts = _facts(*found, call)
        lines += [f"  {named(alike)} of group {call.group!r}: {words}" for words, alike in places(facts).items()]
        todo += _awaited(facts)
    return list(dict.fromkeys(lines))


def _awaited(ranks: Ranks) -> list[Awaited]:
    """The calls that some ranks wait for, one for each group and method, with the ranks of all."""
    found: dict[tuple[str, str], set[int]] = {}
    for facts in ranks.values():
        for call in awaited_by(facts.stack):
            found.setdefault((call.group, call.method), set()).update(call.ranks)
    return [Awaited(method, group, tuple(sorted(some))) for (group, method), some in found.items()]


def _facts(workers: Workers, work: OpenWork, call: Awaited) -> Ranks:
    """The facts about the ranks that a call waits for: those it was sent to; those of the same call of the controller,
    which may have relayed it; or all, if it waits for a replica."""
    ranks: Iterable[int] = call.ranks or _owing(work, call.method) or range(len(workers.records))
    tickets: dict[int, Any] = dict.fromkeys(ranks)
    signs = workers.signs(list(tickets))  # first: to show its stack, a rank has to run
    stacks = {rank: stack.removeprefix(QUEUED) for rank, stack in workers.stacks(tickets).items()}
    return facts_of(workers, signs, stacks)


def _owing(work: OpenWork, method: str) -> list[int]:
    return sorted({rank for call in work.unanswered() if call.site.method == method for rank in owing(call)})


def owing(call: Any) -> Mapping[int, Any]:
    """The tickets of the ranks that owe a reply to a call."""
    return {rank: ticket for rank, ticket in dict(call.tickets).items() if not ticket.is_done}
