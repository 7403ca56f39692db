"""The ranks of a group that run on one host, on the side of that host's agent.

::

    connection ── calls ──► the queue, until their rows are here ──► Workers.call ──► ranks
               ◄─ replies that differ, with their ranks ◄── the replies of the ranks, and those of the hosts below
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

from bandmaster.codec import Payload, encode
from bandmaster.contract import Kept, KeptCopy, Reply, Ticket, WorkerCall, Workers
from bandmaster.errors import RowsLost
from bandmaster.errors.failure import Failure, FailureKind
from bandmaster.hosts.link import Link, Message
from bandmaster.hosts.rows import RowKey, RowStore, StoredRows
from bandmaster.wire.client import RequestTicket
from bandmaster.wire.messages import (
    CallContent,
    KeptElsewhere,
    MessageKind,
    ReplyKind,
    header_of,
    inline,
    read_content,
    read_small_call,
    reply_message,
    small_reply,
)

PATIENCE_S = 0.002  # for the other replies of this host to a call, which then come in one message

Replies = list[tuple[tuple[int, ...], bytes]]  # each that differs, with its ranks
_Reply = tuple[Sequence[int], bytes, Mapping[int, Payload]]  # of ranks, and the large payloads that it names


class WorkersHere(Workers, Protocol):
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


class _Queued(NamedTuple):
    """A call, or requests for one rank, which wait for their rows, or are behind calls that do.

    Attributes:
        calls: The call or the requests, by number. Their parts are payloads, and their rows may be on their way.
        are_requests: Whether these are requests.
    """

    calls: Mapping[int, WorkerCall]
    are_requests: bool = False

    @property
    def is_ready(self) -> bool:
        """Whether all rows that they take are here, or lost."""
        rows = [rows for call in self.calls.values() for _, rows in call.rows]
        return all(one.done() for one in rows if isinstance(one, Future))


class HostRanks:
    """The ranks of one group on this host.

    Attributes:
        workers: Their workers.
        ranks: The ranks.
        home: The connection that calls come by, and replies go back by; None for that of the controller.
        below: The connections to agents that calls for all hosts are passed on to.
        n_below: The number of ranks that these have, and those below them.
        made: The rows that the ranks have left here and that are not released.

    Args:
        workers: The workers.
        ranks: Their ranks.
        store: Keeps rows that calls leave here.
        wake: Has the agent look for replies that are to be sent.
    """

    def __init__(self, workers: WorkersHere, ranks: Sequence[int], store: RowStore, wake: Callable[[], object]) -> None:
        self.workers, self.ranks = workers, tuple(ranks)
        self._store, self._wake = store, wake
        self.home: Link | None = None
        self.below: list[Link] = []
        self.n_below = 0
        self.made: WeakValueDictionary[RowKey, Kept] = WeakValueDictionary()
        self._queue: deque[_Queued] = deque()  # calls that wait for rows, and what is behind them
        self._open: dict[int, dict[int, Any]] = {rank: {} for rank in ranks}  # tickets by rank and number
        self._n_missing: dict[int, int] = {}  # by number of the call: the replies that are still to come
        self._done: deque[tuple[int, int]] = deque()  # ranks that have replied, and numbers of the calls
        self._items: deque[_Reply] = deque()  # of streams
        self._item_numbers = itertools.count(1)
        self._unsent: dict[int, list[_Reply]] = {}  # by number of the call
        self._since = 0.0  # when the first of these replies came
        self._failed: dict[int, tuple[int, Any]] = {}  # by rank, number and ticket of the call that it has failed last
        self._resumed: set[tuple[int, int]] = set()  # ranks that were let go on, with calls that they have yet to fail
        self._told: Mapping[int, Failure] = {}  # the deaths that the controller was told of
        self._reported: Mapping[int, object] = {}  # the reports that it was told of, by rank

    # --- calls ---

    def take(self, message: Message, is_passed_on: bool) -> None:
        """Send the calls of a message behind those that came before, once their rows are here.

        Args:
            message: The message.
            is_passed_on: Whether the hosts below have got the calls, too, so that their replies come here.
        """
        for ranks, body in message.content[1]:
            flags, number = header_of(body)
            if flags == MessageKind.REQUESTS:
                requests = {}
                for number, content, is_timed in read_content(memoryview(body)):
                    call, names = _read(content, message)
                    requests[number] = self._queued(call._replace(ranks=ranks, is_timed=is_timed), names, message)
                self._n_missing.update(dict.fromkeys(requests, 1))
                self._queue.append(_Queued(requests, are_requests=True))
                continue
            if flags & MessageKind.CALL:
                call, names = _read(read_content(memoryview(body)), message)
            else:
                method, reply, stream = read_small_call(memoryview(body))
                call, names = WorkerCall((), method, (Payload(bytes(stream)),), Reply(reply)), ()
            is_timed, is_fenced = bool(flags & MessageKind.TIMED), bool(flags & MessageKind.FENCED)
            mine = self.ranks if ranks is None else ranks
            call = call._replace(ranks=mine, is_timed=is_timed, is_fenced=is_fenced)
            self._n_missing[number] = len(mine) + (self.n_below if is_passed_on else 0)
            self._queue.append(_Queued({number: self._queued(call, names, message)}))
        self.advance()

    def _queued(self, call: WorkerCall, names: Sequence[tuple[int, Any]], message: Message) -> WorkerCall:
        """A call with the rows that it takes, which have these names."""
        rows, present = {}, {}
        for label, name in names:
            is_key = type(name) is tuple and type(name[0]) is int  # else it is a part
            found = self._store.get(name) if is_key else StoredRows(KeptCopy(message.unpack(name)))
            if found is not None:  # else the ranks here do not need them
                rows[label] = found.rows
                if found.numbers is not None:
                    present[label] = found.numbers
        return call._replace(present=present, rows=tuple(rows.items()))

    def advance(self) -> None:
        """Send the calls whose rows are here, in their order."""
        while self._queue and self._queue[0].is_ready:
            calls, are_requests = self._queue.popleft()
            if are_requests:
                self._request(calls)
            else:
                for number, call in calls.items():
                    self._call(number, call)

    def _call(self, number: int, call: WorkerCall) -> None:
        """Send a call."""
        sent: dict[int, Any] = {}
        try:
            self.workers.call([self._placed(call)], sent)
        except Exception as error:
            self._fail(number, [rank for rank in call.ranks if rank not in sent], _failure_of(error))
        for rank, ticket in sent.items():
            self._watch(rank, number, ticket)

    def _request(self, requests: Mapping[int, WorkerCall]) -> None:
        """Send requests to their rank."""
        (rank,) = {request.ranks[0] for request in requests.values()}
        placed: dict[int, WorkerCall] = {}
        for number, request in requests.items():
            try:
                placed[number] = self._placed(request)
            except Exception as error:
                self._fail(number, [rank], _failure_of(error))
        try:
            self.workers.request(rank, list(placed.values()), partial(self._watch_all, rank, tuple(placed)))
        except Exception as error:
            for number in placed:
                self._open[rank].pop(number, None)
                self._fail(number, [rank], _failure_of(error))

    def _watch_all(self, rank: int, numbers: Sequence[int], tickets: Sequence[Ticket]) -> None:
        for number, ticket in zip(numbers, tickets, strict=True):
            ticket.on_item = partial(self._made, rank, number)
            self._watch(rank, number, ticket)

    def _watch(self, rank: int, number: int, ticket: Any) -> None:
        """Note a ticket, and have its reply sent when it is there."""
        self._open[rank][number] = ticket
        ticket.on_done = partial(self._is_done, rank, number)
        if ticket.is_done:
            self._done.append((rank, number))

    def _made(self, rank: int, number: int, item: Any) -> None:
        kind, content, large = _content_of(item, next(self._item_numbers) << 96 | number << 24 | rank)
        self._items.append(((rank,), reply_message(number, kind | ReplyKind.ITEM, content)[4:], large))
        self._wake()

    def _is_done(self, rank: int, number: int) -> None:
        self._done.append((rank, number))
        self._wake()

    def _placed(self, call: WorkerCall) -> WorkerCall:
        """A call whose parts and rows are where the workers can read them."""
        rows = [rows.result() if isinstance(rows, Future) else rows for _, rows in call.rows]
        placed, n = self.workers.put([*call.parts, *rows]), len(call.parts)
        labelled = tuple([(label, part) for (label, _), part in zip(call.rows, placed[n:], strict=True)])
        return call._replace(parts=tuple(placed[:n]), rows=labelled)

    # --- replies ---

    def _fail(self, number: int, ranks: Iterable[int], why: Failure) -> None:
        for rank in ranks:
            self._add([rank], reply_message(number, ReplyKind.FAILURE, inline(encode(why)))[4:], {})

    def _add(self, ranks: Sequence[int], body: bytes, large: Mapping[int, Payload]) -> None:
        """Add a reply to those that are to be sent."""
        number = header_of(body)[1]
        self._since = self._since if self._unsent else time.monotonic()
        self._unsent.setdefault(number, []).append((ranks, body, large))
        self._n_missing[number] = max(0, self._n_missing.get(number, 0) - len(ranks))

    def take_replies(self, message: Message) -> None:
        """Take replies of ranks on hosts below, which go on together with those of this host."""
        for ranks, body in message.content[1]:
            if header_of(body)[0] & ReplyKind.ITEM:
                self._items.append((ranks, body, message.large))
            else:
                self._add(ranks, body, message.large)

    def news(self) -> tuple[Replies, Mapping[int, Payload], Mapping[int, Failure]]:
        """Remove and return what is to be sent now: replies and reports, the large payloads that they name, and deaths.

        Calls that only some ranks have replied to wait for the others, unless one has failed or a rank has died.
        """
        known, self._told = self._told, dict(self.workers.deaths)
        deaths = {rank: failure for rank, failure in self._told.items() if known.get(rank) is not failure}
        while self._done:
            rank, number = self._done.popleft()
            ticket = self._open[rank].pop(number, None)
            if ticket is not None:
                self._add([rank], *self._reply(rank, number, ticket))
        told, self._reported = self._reported, dict(self.workers.reports)
        new = [(rank, report) for rank, report in self._reported.items() if told.get(rank) is not report]
        said: Replies = [((rank,), reply_message(0, ReplyKind.REPORT, report)[4:]) for rank, report in new]
        large: dict[int, Payload] = {}
        while self._items:  # those before the replies that were taken above
            ranks, body, its = self._items.popleft()
            said.append((tuple(ranks), body))
            large |= its
        is_flushed = bool(deaths) or time.monotonic() - self._since >= PATIENCE_S
        for number, unsent in list(self._unsent.items()):
            is_whole = not self._n_missing[number]
            if is_whole or is_flushed or any(_has_failed(body) for _, body, _ in unsent):
                said += _merged(unsent)
                large |= {key: payload for _, _, its in unsent for key, payload in its.items()}
                del self._unsent[number]
            if is_whole:
                del self._n_missing[number]
        return said, large, deaths

    def _reply(self, rank: int, number: int, ticket: Any) -> tuple[bytes, Mapping[int, Payload]]:
        """The reply of a rank, and the large payload that it names."""
        try:
            outcome = self.workers.fetch(ticket)
        except Exception as error:  # that of unpickling
            outcome = Failure.of(error)
        if outcome is None or isinstance(outcome, Failure | Payload):
            kind, content, large = _content_of(outcome, number << 24 | rank)
        else:
            kind, content, large = ReplyKind.ROWS, ((number, rank), inline(_described(outcome))), {}
            self._store[number, rank] = StoredRows(outcome)
            self.made[number, rank] = outcome
        if isinstance(outcome, Failure) and not (ticket.is_dropped or isinstance(ticket, RequestTicket)):
            self._failed[rank] = number, ticket
            if (rank, number) in self._resumed:  # its reply was not waited for: what passes it on was lost
                self._resumed.remove((rank, number))
                self.workers.resume({rank: ticket})
        return reply_message(number, kind, content, ticket.times and ticket.times[0])[4:], large

    @property
    def has_news(self) -> bool:
        """Whether there may be something to send."""
        is_told = self.workers.deaths == self._told and self.workers.reports == self._reported
        return bool(self._done or self._items or self._unsent) or not is_told

    @property
    def due_s(self) -> float | None:
        """Seconds after which replies are to be sent; None if there are none."""
        return max(0.0, self._since + PATIENCE_S - time.monotonic()) if self._unsent else None

    def lose_home(self) -> None:
        """Tell the controller itself from here on, and once more what ranks have reported, which may be lost."""
        self.home, self._reported = None, {}

    # --- interrupting ---

    def interrupt(self, numbers: Mapping[int, int | None]) -> None:
        """Interrupt calls by their numbers; see `contract.Workers.interrupt`."""
        why = Failure(FailureKind.CANCELLED, "cancelled before it was sent")
        self._fail_queued(lambda rank, number: numbers.get(rank) == number, why)
        self.workers.interrupt(self.tickets(numbers))

    def forget(self, rank: int) -> None:
        """Fail what waits here for the worker of a rank that is about to be replaced: it is not for the new worker."""
        why = self.workers.deaths.get(rank) or Failure(FailureKind.DIED, "ended by the controller to be replaced")
        self._fail_queued(lambda other, _: other == rank, why)

    def _fail_queued(self, is_meant: Callable[[int, int], bool], why: Failure) -> None:
        """Fail queued calls on the ranks that are meant, given with a call's number, and send those that are ready."""
        queue, self._queue = self._queue, deque()
        for calls, are_requests in queue:
            left = {}
            for number, call in calls.items():
                self._fail(number, [rank for rank in call.ranks if is_meant(rank, number)], why)
                ranks = tuple([rank for rank in call.ranks if not is_meant(rank, number)])
                if ranks:
                    left[number] = call._replace(ranks=ranks)
            if left:
                self._queue.append(_Queued(left, are_requests))
        self.advance()

    def cancel(self) -> None:
        """Interrupt all calls, as their caller is gone."""
        self._queue.clear()
        for rank, tickets in self._open.items():
            for ticket in list(tickets.values()):
                self.workers.interrupt({rank: ticket})

    def resume(self, numbers: Mapping[int, int]) -> None:
        """Let ranks begin their next calls, by the numbers of calls; see `contract.Workers.resume`."""
        failed: dict[int, Any] = {}
        for rank, number in numbers.items():
            last, ticket = self._failed.get(rank, (0, None))
            if last == number:
                failed[rank] = ticket
            elif last < number and rank not in self.workers.deaths:  # else it has gone on, and failed a later call
                self._resumed.add((rank, number))
        self.workers.resume(failed)

    def tickets(self, numbers: Mapping[int, int | None]) -> dict[int, Any]:
        """The tickets of calls that ranks have not replied to; None stands for whatever a rank is doing."""
        return {
            rank: None if number is None else self._open[rank][number]
            for rank, number in numbers.items()
            if number is None or number in self._open[rank]
        }


def _read(content: CallContent, message: Message) -> tuple[WorkerCall, Sequence[tuple[int, Any]]]:
    """A call, and the names of the rows that it takes, by label."""
    method, reply, parts, names, _ = content
    return WorkerCall((), method, tuple(map(message.unpack, parts)), Reply(reply)), names


def _content_of(outcome: Payload | Failure | None, name: int) -> tuple[int, Any, Mapping[int, Payload]]:
    """The kind and content of a reply, and the large payload that it names; no other reply has the name."""
    if (small := small_reply(outcome)) is not None:
        return *small, {}
    if isinstance(outcome, Failure):
        return ReplyKind.FAILURE, name, {name: encode(outcome)}
    assert outcome is not None, "it would be small"
    return ReplyKind.PART, name, {name: outcome}


def _has_failed(body: bytes) -> bool:
    """Whether a reply tells of a failure."""
    return bool(header_of(body)[0] & ~ReplyKind.TIMED == ReplyKind.FAILURE)


def _merged(replies: Sequence[_Reply]) -> Replies:
    """Replies with their ranks: those that are the same come as one, but for failures."""
    found: dict[tuple[bytes, int | None], list[int]] = {}
    for ranks, body, _ in replies:
        found.setdefault((body, ranks[0] if _has_failed(body) else None), []).extend(ranks)
    return [(tuple(ranks), body) for (body, _), ranks in found.items()]


def _described(rows: Kept) -> Payload:
    """The facts about rows, encoded, which this process need not decode."""
    if isinstance(rows, KeptElsewhere):
        return rows.described
    assert rows.facts is not None, "a value without rows is returned"
    return encode(rows.facts.plain)


def _failure_of(error: Exception) -> Failure:
    """The failure of a call that cannot be sent: rows are gone, there is no memory, or the group was stopped."""
    return Failure(FailureKind.LOST, str(error)) if isinstance(error, RowsLost) else Failure.of(error)
