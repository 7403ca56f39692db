"""The part of a group that runs on one host, as the agent of that host has it."""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, Protocol

from bandmaster.codec import Payload
from bandmaster.contract import Call, Reply, Workers
from bandmaster.errors import RowsLost
from bandmaster.errors.failure import Failure, FailureKind
from bandmaster.hosts.messages import Packed
from bandmaster.hosts.rows import Coming
from bandmaster.wire.messages import ReplyKind

__all__ = ["Entry", "Held", "Hosted", "RanksHere"]

PATIENCE_S = 0.002  # for the other replies of this host to a call, which then come in one frame


class RanksHere(Workers, Protocol):
    """The workers of some ranks of a group on the host of an agent."""

    @property
    def rendezvous(self) -> Mapping[str, str]:
        """The environment variables by which ranks find the rendezvous; empty as long as rank 0 is on another host."""

    def announce(self, rendezvous: Mapping[str, str]) -> None:
        """Have the ranks here find a rendezvous that rank 0 has opened."""

    def reserve(self, sizes: Sequence[int], is_kept: bool = False) -> Payload:
        """A payload whose head and buffers of these sizes are still to be written, where the workers can read it.

        Args:
            sizes: Bytes of the head and of each buffer.
            is_kept: Whether calls are to name it as kept rows.

        Raises:
            ResourceError: There is no memory or no descriptor for it.
            ClosedError: The workers were stopped.
        """


class Entry(NamedTuple):
    """One call, as a frame says it.

    Attributes:
        number: Number of the call, by which it is replied to.
        ranks: The ranks; None for all of the group on this host.
        method: Name of the method.
        parts: Places of its arguments in the table of payloads.
        how: As `Call.how`.
        rows: Kept rows, as label, place and what is there: the place is ``("shelf", number)`` or ``("table", place)``,
            and the numbers of the rows that are there are None for all of them.
    """

    number: int
    ranks: tuple[int, ...] | None
    method: str
    parts: tuple[int, ...]
    how: tuple[int, bool, bool]
    rows: tuple[tuple[int, Any, Any], ...]


class Held:
    """Calls that came in one frame, and the rows that they take.

    Attributes:
        entries: The calls.
        payloads: The payloads that they name.
        rows: The kept rows that they name, by place, which may be on their way; a failure if they are gone.
    """

    def __init__(self, entries: Sequence[Entry], payloads: Sequence[Payload], rows: Any) -> None:
        self.entries, self.payloads, self.rows = list(entries), payloads, rows

    def are_here(self) -> bool:
        """Whether all rows are there, or some are gone."""
        if isinstance(self.rows, Failure):
            return True
        coming = {place: rows for place, rows in self.rows.items() if isinstance(rows, Future)}
        if not all(rows.done() for rows in coming.values()):
            return False
        come = {place: _outcome(rows) for place, rows in coming.items()}
        lost = [outcome for outcome in come.values() if isinstance(outcome, Failure)]
        self.rows = lost[0] if lost else {**self.rows, **come}
        return True


def _outcome(coming: Coming) -> Payload | Failure:
    error = coming.exception()
    if error is None:
        return coming.result()
    return Failure(FailureKind.LOST, str(error)) if isinstance(error, RowsLost) else Failure.of(error)


class _Open:
    """A call that ranks of this host have not all replied to."""

    __slots__ = ("is_sent", "n_below", "patience_s", "since", "tickets", "unsent")

    def __init__(self, n_below: int) -> None:
        self.tickets: dict[int, Any] = {}
        self.is_sent = False  # to the ranks of this host
        self.n_below = n_below  # ranks on other hosts, whose replies come here as well
        self.patience_s = PATIENCE_S
        self.unsent: dict[int, Any] = {}
        self.since = 0.0  # when the first of the unsent replies came


class Hosted:
    """The workers of one group on this host.

    Attributes:
        workers: The workers.
        ranks: Their ranks.
        home: The link that calls come by, and replies go back by.
        below: The links to agents that calls for all hosts are passed on to.
        n_below: How many ranks these have, and those below them.

    Args:
        workers: The workers.
        ranks: Their ranks.
        keep: Keeps rows that a call has left here; returns the number by which they are known.
    """

    def __init__(self, workers: RanksHere, ranks: Sequence[int], keep: Callable[[Any], int]) -> None:
        self.workers, self.ranks = workers, tuple(ranks)
        self._keep = keep
        self.home: Any = None
        self.below: list[Any] = []
        self.n_below = 0
        self._open: dict[int, _Open] = {}
        self._done: deque[tuple[int, int]] = deque()  # numbers of calls, and ranks that have replied
        self._fresh: set[int] = set()  # numbers of calls with replies that were not told of
        self._failed: dict[int, tuple[int, Any]] = {}  # by rank, number and ticket of the call that it has failed last
        self._n_deaths = 0
        self._held: deque[Held] = deque()  # what waits for rows, and what came behind it

    # --- calls ---

    def take(self, held: Held) -> None:
        """Send calls behind those that came before, once their rows are there."""
        self._held.append(held)
        self.advance()

    def advance(self) -> None:
        """Send what can be sent."""
        while self._held and self._held[0].are_here():
            held = self._held.popleft()
            if isinstance(held.rows, Failure):
                self._fail(held.entries, held.rows)
            else:
                self._send(held.entries, held.payloads, held.rows)

    def _send(self, entries: Sequence[Entry], payloads: Sequence[Payload], rows: Mapping[Any, Any]) -> None:
        """Send calls to the workers; what cannot be sent has failed.

        Args:
            entries: The calls.
            payloads: The payloads that they name.
            rows: The kept rows that they name.
        """
        sent: dict[int, Any] = {}
        why: Failure | None = None
        try:
            placed = self.workers.put(payloads)
            labels = list(rows)
            at = dict(zip(labels, self.workers.put([rows[label] for label in labels]), strict=True)) if labels else {}
            self.workers.call([self._call(entry, placed, at) for entry in entries], sent)
        except Exception as error:  # there is no memory, or the group was stopped
            why = Failure.of(error)
        for entry in entries:
            self._await(entry, sent, why)

    def _fail(self, entries: Sequence[Entry], why: Failure) -> None:
        """Calls cannot be sent."""
        for entry in entries:
            self._await(entry, {}, why)

    def _call(self, entry: Entry, parts: Sequence[Any], rows: Mapping[Any, Any]) -> Call:
        reply, is_timed, is_fenced = entry.how
        named = tuple([(label, rows[place]) for label, place, _ in entry.rows])
        there = {label: numbers for label, _, numbers in entry.rows if numbers is not None}
        chosen = tuple([parts[place] for place in entry.parts])
        ranks = self._ranks_of(entry)
        return Call(ranks, entry.method, chosen, Reply(reply), named, is_timed, there=there, is_fenced=is_fenced)

    def _ranks_of(self, entry: Entry) -> tuple[int, ...]:
        return self.ranks if entry.ranks is None else entry.ranks

    def _await(self, entry: Entry, sent: Mapping[int, Any], why: Failure | None) -> None:
        ranks = self._ranks_of(entry)
        opened = self._open.setdefault(entry.number, _Open(0))
        opened.tickets, opened.is_sent = {rank: sent[rank] for rank in ranks if rank in sent}, True
        for rank, ticket in list(opened.tickets.items()):
            ticket.on_done = partial(self._done.append, (entry.number, rank))
            if ticket.is_done:
                self._done.append((entry.number, rank))
        for rank in ranks:
            if rank not in sent:
                assert why is not None, "a call that was sent has a ticket for each of its ranks"
                opened.unsent[rank] = (ReplyKind.FAILURE, why, None)
                self._fresh.add(entry.number)

    # --- replies ---

    @property
    def arrivals(self) -> int | None:
        """As `Workers.arrivals`."""
        return self.workers.arrivals

    @property
    def has_open_calls(self) -> bool:
        """Whether some rank has not replied."""
        return bool(self._open)

    def look(self) -> None:
        """Take what has arrived."""
        self.workers.check(is_thorough=False)
        if self.workers.arrivals is None:  # nothing tells of replies to calls that do not go over lanes
            self._ask()

    def _ask(self) -> None:
        for number, opened in self._open.items():
            if opened.tickets:
                by_id = {id(ticket): rank for rank, ticket in opened.tickets.items()}
                done = self.workers.wait(list(opened.tickets.values()), 0.0)
                self._done.extend((number, by_id[id(ticket)]) for ticket in done)

    @property
    def has_news(self) -> bool:
        """Whether there may be something to tell."""
        return bool(self._done or self._fresh) or len(self.workers.deaths) != self._n_deaths

    def replies(self, packed: Packed, is_flushed: bool = False) -> list[tuple[Any, ...]]:
        """What is to be told of calls: ``(number, ranks, kind, content, times)`` for each different reply.

        Args:
            packed: Gets the payloads.
            is_flushed: Whether to tell at once, also of calls that only some ranks have replied to.
        """
        while self._done:
            number, rank = self._done.popleft()
            opened = self._open.get(number)
            ticket = None if opened is None else opened.tickets.pop(rank, None)
            if ticket is not None and opened is not None:
                opened.unsent[rank] = said = self._said(ticket)
                if said[0] == ReplyKind.FAILURE and not ticket.is_dropped:
                    self._failed[rank] = number, ticket
                self._fresh.add(number)
        found: list[tuple[Any, ...]] = []
        now = time.monotonic()
        for number in list(self._fresh):
            opened = self._open[number]
            opened.since = opened.since or now
            has_failed = any(kind == ReplyKind.FAILURE for kind, _, _ in opened.unsent.values())
            is_whole = opened.is_sent and not opened.tickets and not opened.n_below
            if not (is_whole or is_flushed or has_failed or now - opened.since >= opened.patience_s):
                continue
            opened.patience_s *= 2
            found += _merged(number, opened.unsent, packed)
            opened.unsent, opened.since = {}, 0.0
            self._fresh.remove(number)
            if is_whole:
                del self._open[number]
        return found

    def await_below(self, numbers: Sequence[int]) -> None:
        """Calls were passed on: the replies of the other hosts belong to those of this one."""
        for number in numbers:
            self._open[number] = _Open(self.n_below)

    def pass_back(self, replies: Sequence[tuple[Any, ...]], payloads: Sequence[Payload]) -> None:
        """Replies of ranks on other hosts have come."""
        for number, ranks, kind, content, times in replies:
            opened = self._open.get(number)
            if opened is None:  # it was for other hosts alone
                opened = self._open[number] = _Open(0)
                opened.is_sent = True
            value = payloads[content] if kind == ReplyKind.PART else content
            said = kind, Payload(value) if kind == ReplyKind.VALUE else value, times
            opened.unsent.update(dict.fromkeys(ranks, said))
            opened.n_below = max(0, opened.n_below - len(ranks))
            self._fresh.add(number)

    def due_s(self) -> float | None:
        """Seconds after which there is something to tell; None if there is nothing."""
        if not self._fresh:
            return None
        moments = [self._open[number].since + self._open[number].patience_s for number in self._fresh]
        return max(0.0, min(moments) - time.monotonic())

    def _said(self, ticket: Any) -> tuple[int, Any, Any]:
        """Kind, content and times of a reply."""
        try:
            value = self.workers.fetch(ticket)
        except Exception as error:  # what Ray or unpickling raises
            value = Failure.of(error)
        times = getattr(ticket, "times", None)
        known = None if times is None else times[0]
        if value is None:
            return ReplyKind.NOTHING, None, known
        if isinstance(value, Failure):
            return ReplyKind.FAILURE, value, known
        if isinstance(value, Payload):
            return (ReplyKind.PART if value.buffers else ReplyKind.VALUE), value, known
        facts = value.facts
        assert facts is not None, "a value without rows is returned"
        return ReplyKind.ROWS, (self._keep(value), tuple(facts)), known

    def deaths(self) -> dict[int, bytes]:
        """Ranks that have died since this was asked last, and how, pickled."""
        if len(self.workers.deaths) == self._n_deaths:
            return {}
        known = dict(self.workers.deaths)
        self._n_deaths = len(known)
        return {rank: pickle.dumps(failure) for rank, failure in known.items()}

    def forget_deaths(self) -> None:
        """A rank has come back."""
        self._n_deaths = len(self.workers.deaths)

    # --- interrupting ---

    def interrupt(self, numbers: Mapping[int, int | None]) -> None:
        """As `Workers.interrupt`, by the numbers of calls."""
        for held in self._held:
            given_up = [entry for entry in held.entries if entry.number in numbers.values()]
            held.entries = [entry for entry in held.entries if entry not in given_up]
            self._fail(given_up, Failure(FailureKind.CANCELLED, "cancelled before it was sent"))
        self.workers.interrupt(self.tickets(numbers))

    def resume(self, numbers: Mapping[int, int]) -> None:
        """As `Workers.resume`, by the numbers of calls."""
        failed = {rank: self._failed.get(rank, (0, None)) for rank in numbers}
        self.workers.resume({rank: ticket for rank, (number, ticket) in failed.items() if number == numbers[rank]})

    def stacks(self, numbers: Mapping[int, int | None]) -> dict[int, str]:
        """As `Workers.stacks`, by the numbers of calls."""
        return dict(self.workers.stacks(self.tickets(numbers)))

    def tickets(self, numbers: Mapping[int, int | None]) -> dict[int, Any]:
        """The tickets of calls that ranks have not replied to."""
        found: dict[int, Any] = {}
        for rank, number in numbers.items():
            opened = self._open.get(number) if number is not None else None
            if number is None:
                found[rank] = None
            elif opened is not None and rank in opened.tickets:
                found[rank] = opened.tickets[rank]
        return found


def _merged(number: int, replies: Mapping[int, tuple[int, Any, Any]], packed: Packed) -> list[tuple[Any, ...]]:
    """Replies to a call; ranks that say the same come together."""
    alike: dict[Any, list[int]] = {}
    found: list[tuple[Any, ...]] = []
    for rank, (kind, content, times) in replies.items():
        if kind == ReplyKind.NOTHING and times is None:
            alike.setdefault((kind, b""), []).append(rank)
        elif kind == ReplyKind.VALUE and times is None:
            alike.setdefault((kind, bytes(content.head)), []).append(rank)
        elif kind == ReplyKind.FAILURE:
            found.append((number, (rank,), kind, content if isinstance(content, bytes) else _pickled(content), times))
        elif isinstance(content, Payload):
            found.append((number, (rank,), ReplyKind.PART, packed.add(content), times))
        else:
            found.append((number, (rank,), kind, content, times))
    return [(number, tuple(ranks), kind, said, None) for (kind, said), ranks in alike.items()] + found


def _pickled(failure: Failure) -> bytes:
    try:
        return pickle.dumps(failure)
    except Exception as error:  # the user's exceptions may do anything when they are pickled
        return pickle.dumps(Failure(FailureKind.RAISED, f"{failure.summary} (which cannot be pickled: {error})"))
