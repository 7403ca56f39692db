"""Waiting for replies without a reader thread: the thread that waits reads what has arrived, for other threads too."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from bandmaster import contract
from bandmaster.codec import Payload
from bandmaster.contract import Kept
from bandmaster.errors.failure import Failure
from bandmaster.wire.poller import Event, Poller

__all__ = ["ChannelTicket", "Receiver"]


class ChannelTicket(contract.Ticket):
    """One message, and in time its reply.

    Attributes:
        number: Number of the message.
        is_done: Whether it was replied to, or will not be.
        is_dropped: Whether it was not sent, and will not be.
        outcome: The reply; None before it has come, and for a value that was dropped.
    """

    __slots__ = ("is_done", "is_dropped", "number", "outcome")

    def __init__(self, number: int) -> None:
        self.on_done = None
        self.number = number
        self.is_done = self.is_dropped = False
        self.outcome: Payload | Kept | Failure | None = None


class Receiver:
    """Has tickets, and reads replies to them when somebody waits. Any thread may call it.

    Attributes:
        deaths: The ranks whose processes have ended, and how.
        lock: Guards all state.

    Args:
        poller: Where what arrives is waited for.
    """

    def __init__(self, poller: Poller) -> None:
        self.deaths: dict[int, Failure] = {}
        self._n_failed = 0
        self._poller = poller
        self.lock = poller.lock

    def _receive(self, ready: Sequence[Event]) -> None:
        """Take what some events tell of; the lock is held."""
        raise NotImplementedError

    def wait(self, tickets: Sequence[ChannelTicket], timeout_s: float | None) -> list[ChannelTicket]:
        """As `contract.Workers.wait`."""
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self.lock:  # Ctrl-C comes when it is left, and may be the user's to handle without an exception
                done = self._wait(tickets, deadline)
            if done is not None:
                return done

    def _wait(self, tickets: Sequence[ChannelTicket], deadline: float) -> list[ChannelTicket] | None:
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
                self._receive_all()
                break
            if self.lock.has_to_let_go:
                return None
            self._receive(self._poller.wait(left))
        return [ticket for ticket in tickets if ticket.is_done]

    def fetch(self, ticket: ChannelTicket) -> Payload | Kept | Failure | None:
        """As `contract.Workers.fetch`."""
        return ticket.outcome

    @property
    def arrivals(self) -> int | None:
        """As `contract.Workers.arrivals`."""
        try:
            return self._poller.fileno()
        except ValueError:  # it was closed, perhaps just now by another thread
            return None

    def _receive_all(self) -> None:
        """Take what has arrived; the lock is held."""
        while ready := self._poller.now():
            self._receive(ready)

    def _finish(self, ticket: ChannelTicket, outcome: Payload | Kept | Failure | None) -> None:
        ticket.outcome, ticket.is_done = outcome, True
        if type(outcome) is Failure:
            self._n_failed += 1
        if ticket.on_done is not None:
            ticket.on_done()
