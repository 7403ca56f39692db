"""The calls that ranks have not replied to, and the wait for their replies: the same over lanes and over links.

::

    call ── one message per call ──► peers: a lane to each rank of this host, a link to the agent of another host
    wait ◄── the waiting thread reads the peers that have something, also replies for others ◄── replies, in order

There is no reader thread. A `LaneClient` has the ranks of one host as its peers; `bandmaster.hosts.workers` has agents.
A process may have several clients, so that it can call several groups.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bandmaster import contract
from bandmaster.codec import Payload
from bandmaster.contract import Kept
from bandmaster.errors.failure import Failure
from bandmaster.wire.messages import (
    HEADER_NBYTES,
    TIMES_NBYTES,
    Receiver,
    ReplyKind,
    SmallReply,
    header_of,
    outcome_of,
    read_content,
)
from bandmaster.wire.poller import Poller

_VALUE, _SEVERAL, _REPORT = ReplyKind.VALUE, ReplyKind.SEVERAL, ReplyKind.REPORT
_TIMED, _NOTHING, _ITEM = ReplyKind.TIMED, ReplyKind.NOTHING, ReplyKind.ITEM


class MessageTicket(contract.Ticket):
    """One message, and in time its reply.

    Attributes:
        number: Number of the message.
        outcome: The reply to a call: payload, kept rows or failure; what an agent answers; None before it has come, and
            for a value that was dropped.
        holds: The rows that must not be released before the reply has come.
    """

    __slots__ = ("holds", "number")

    def __init__(self, number: int) -> None:
        self.outcome = self.on_done = self.on_item = self.times = None  # by itself, as there is one for each rank
        self.is_done = self.is_dropped = False
        self.number = number
        self.holds: Sequence[Any] = ()


class RequestTicket(MessageTicket):
    """The ticket of a request, whose reply may come before those to earlier messages."""

    __slots__ = ()


class Client:
    """The open calls of some ranks, their replies, and the ranks that have died. Any thread may call it.

    Attributes:
        deaths: The ranks whose processes have ended, and how.
        reports: What the workers have reported of themselves.
        lock: Guards all state.
        ranks_are_own: True.

    Args:
        poller: Where what arrives is waited for.
        numbers: The numbers of messages.
    """

    ranks_are_own = True

    def __init__(self, poller: Poller, numbers: Iterator[int]) -> None:
        self.deaths: dict[int, Failure] = {}
        self.reports = contract.Reports()
        self.lock = poller.lock
        self._poller, self._numbers = poller, numbers
        self._open: dict[int, dict[int, MessageTicket]] = {}  # by rank and number, in the order in which they were sent
        self._requests: dict[int, dict[int, MessageTicket]] = {}  # of them, those that are replied to in any order
        self._n_failed = 0

    # --- sending; the lock is held ---

    def _living(self, ranks: Sequence[int], number: int, tickets: dict[int, Any]) -> Sequence[int]:
        """The ranks that have not died; the tickets of the others say so."""
        for rank in self.deaths.keys() & set(ranks):
            tickets[rank] = MessageTicket(number)
            tickets[rank].is_dropped = True
            self._finish(tickets[rank], self.deaths[rank])
        return [rank for rank in ranks if rank not in self.deaths]

    def _new_requests(
        self, rank: int, n: int, take: Callable[[Sequence[contract.Ticket]], object]
    ) -> list[RequestTicket]:
        """The tickets of requests that are about to be sent; none if the rank has died, as they say already."""
        tickets = [RequestTicket(next(self._numbers)) for _ in range(n)]
        take(tickets)
        self._requests[rank].update({ticket.number: ticket for ticket in tickets})
        if rank not in self.deaths:
            return tickets
        for ticket in tickets:
            ticket.is_dropped = True
        self._fail_open(rank, self.deaths[rank])
        return []

    # --- receiving ---

    def wait(self, tickets: Sequence[MessageTicket], timeout_s: float | None) -> list[MessageTicket]:
        """Wait for replies; see `contract.Workers.wait`."""
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self.lock:  # Ctrl-C comes when it is left, and may be the user's to handle without an exception
                done = self._wait(tickets, deadline)
            if done is not None:
                return done

    def _wait(self, tickets: Sequence[MessageTicket], deadline: float) -> list[MessageTicket] | None:
        """The tickets that are done; None when Ctrl-C has come before any of that."""
        n_done, n_failed, n_dead = 0, self._n_failed, len(self.deaths)
        n_tickets = len(tickets)
        if n_failed and any(type(ticket.outcome) is Failure for ticket in tickets):
            return [ticket for ticket in tickets if ticket.is_done]
        while True:
            while n_done < n_tickets and tickets[n_done].is_done:
                n_done += 1
            if n_done == n_tickets:
                return list(tickets)
            if n_dead != len(self.deaths) or n_failed != self._n_failed:
                break
            left = None if deadline == math.inf else deadline - time.monotonic()
            if left is not None and left <= 0:
                self._poller.receive_all()
                break
            if self.lock.must_be_left:
                return None
            self._poller.receive(left)
        return [ticket for ticket in tickets if ticket.is_done]

    def fetch(self, ticket: MessageTicket) -> Payload | Kept | Failure | None:
        """The reply of a ticket; see `contract.Workers.fetch`."""
        reply: Payload | Kept | Failure | None = ticket.outcome
        return reply

    @property
    def arrivals(self) -> int | None:
        """A descriptor that is readable when something has arrived; None once it was closed."""
        try:
            return self._poller.fileno()
        except ValueError:  # it was closed, perhaps just now by another thread
            return None

    def _take_reply(self, ranks: Sequence[int], body: Any, receiver: Receiver) -> bool:
        """Take a reply that some ranks share; False if one of them had replied before. The lock is held."""
        kind, number = header_of(body)
        times = None
        if kind == _SEVERAL:
            for one in read_content(body):
                self._take_one(ranks, one, receiver)
            return True
        if kind >= _TIMED:
            kind, times, body = kind - _TIMED, bytes(body[-TIMES_NBYTES:]), body[:-TIMES_NBYTES]
        content = bytes(body[HEADER_NBYTES:]) if kind == _VALUE else None if kind == _NOTHING else read_content(body)
        return self._take_one(ranks, (number, kind, content, times), receiver)

    def _take_one(self, ranks: Sequence[int], reply: SmallReply, receiver: Receiver) -> bool:
        """Take a reply, an item that a request has made, or a report; False if a rank had replied before."""
        number, kind, content, times = reply
        if kind == _REPORT:
            self.reports.take(ranks[0], content)
            return True
        is_item, kind = kind & _ITEM, kind & ~_ITEM
        outcome = Payload(content) if kind == _VALUE else outcome_of(kind, content, receiver)
        if is_item:
            ticket = self._requests[ranks[0]].get(number)
            if ticket is not None and ticket.on_item is not None:
                ticket.on_item(outcome)
            return True
        received = None if times is None else (times, time.monotonic_ns())
        shared = outcome if len(ranks) > 1 and isinstance(outcome, Payload) and outcome.buffers else None
        is_first = True
        for rank in ranks:
            ticket = self._open[rank].pop(number, None) or self._requests[rank].pop(number, None)
            if ticket is None:
                is_first = False
                continue
            ticket.times = received
            self._finish(ticket, shared.private() if shared else outcome)  # the caller may write to each
        return is_first

    def _finish(self, ticket: MessageTicket, outcome: Any) -> None:
        ticket.outcome, ticket.is_done, ticket.holds = outcome, True, ()
        if type(outcome) is Failure:
            self._n_failed += 1
        if ticket.on_done is not None:
            ticket.on_done()

    def fail_one(self, rank: int, ticket: MessageTicket, why: Failure) -> None:
        """Fail a call or request, unless it has its reply; the lock is held."""
        if self._open[rank].pop(ticket.number, None) or self._requests[rank].pop(ticket.number, None):
            self._finish(ticket, why)

    def _fail_open(self, rank: int, why: Failure) -> None:
        """Fail all calls that a rank has not replied to."""
        for table in (self._open[rank], self._requests.get(rank, {})):  # links are sent none
            while table:
                _, ticket = table.popitem()
                self._finish(ticket, why)
        self._poller.wake_if_blocked()

    def is_at(self, rank: int, ticket: MessageTicket) -> bool:
        """Whether a worker has come to a call or request: it runs what it was sent in order, requests beside others."""
        with self.lock:
            first_call = next(iter(self._open.get(rank, ())), math.inf)
            first_request = next(iter(self._requests.get(rank, ())), math.inf)
            if isinstance(ticket, RequestTicket):
                return first_request < first_call and ticket.number in self._requests[rank]
            return first_call == ticket.number < first_request
