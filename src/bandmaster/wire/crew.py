"""The controller's side of a group whose workers are reached by lanes.

::

    call ── the same body for all ranks that get the same ──► lane of each rank ──► loop in the worker
    wait ◄── whoever waits reads the lanes that have something, and keeps what is for others ◄── answers, in order
"""

from __future__ import annotations

import math
import pickle
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from bandmaster.backends import Call, Reply
from bandmaster.errors import ResourceError
from bandmaster.failure import Failure, FailureKind
from bandmaster.wire.codec import Payload, decode
from bandmaster.wire.lane import INLINE_NBYTES, Closed, Lane, SegmentPart, inline
from bandmaster.wire.segments import OWNER, Segment, SegmentWriter

__all__ = ["LaneCrew", "Ticket", "Written"]


class Ticket:
    """One message on one lane, and in time its answer."""

    __slots__ = ("is_done", "is_failure", "outcome")

    def __init__(self) -> None:
        self.is_done = False
        self.is_failure = False
        self.outcome: Payload | Failure | None = None


class Written:
    """A payload in a segment: what `LaneCrew.put` returns, kept as long as somebody may still call with it."""

    def __init__(self, crew: LaneCrew, segment: Segment) -> None:
        self.segment = segment
        self._crew = crew

    def __del__(self) -> None:
        self._crew.give_back(self.segment)


class LaneCrew:
    """Sends messages to the ranks of a group and hands out their answers. Any thread may call it.

    Args:
        sockets: The controller's end of every rank's lane; owned from here on.
        how_it_died: What is known of a rank whose lane broke.
    """

    has_native_tickets = False

    def __init__(self, sockets: Sequence[Any], how_it_died: Callable[[int], str]) -> None:
        self._writer = SegmentWriter()
        self._lanes = [Lane(sock, self._writer, rank, self._receive_all) for rank, sock in enumerate(sockets)]
        self._by_fd = {lane.fileno(): rank for rank, lane in enumerate(self._lanes)}
        self._pending: list[deque[Ticket]] = [deque() for _ in self._lanes]
        self._dead: dict[int, Failure] = {}
        self._how_it_died = how_it_died
        self._poll = select.epoll()
        for lane in self._lanes:
            self._poll.register(lane.fileno(), select.EPOLLIN)
        self._lock = threading.RLock()  # the lanes, the writer and what is pending
        self._arrived = threading.Condition(self._lock)
        self._has_reader = False  # whether some thread is blocked in the kernel for all of them

    def put(self, payload: Payload) -> Any:
        """The payload itself if it is small, else a segment with one copy of it."""
        if payload.nbytes <= INLINE_NBYTES:
            return inline(payload)
        with self._lock:
            closed = self._writer.trim()
            if closed:
                for lane in self._lanes:
                    lane.closed_segments(closed)
            try:
                return Written(self, self._writer.write([payload.head, *payload.buffers]))
            except OSError as error:
                raise ResourceError(
                    f"cannot share {payload.nbytes:,} bytes with the workers ({error}); free memory, or raise the "
                    "limit on open files (ulimit -n)"
                ) from error

    def call(self, calls: Sequence[Call]) -> list[Ticket]:
        """Send the calls; equal ones are encoded once."""
        bodies: dict[tuple[Any, ...], bytes] = {}
        tickets = []
        for call in calls:
            key = (call.reply, *map(id, call.parts))
            if key not in bodies:
                bodies[key] = _body("call", (call.method, call.reply is not Reply.NOTHING), call.parts)
            tickets.append(self.send(call.rank, bodies[key], _segments(call.parts)))
        return tickets

    def send_parts(self, rank: int, operation: str, arguments: tuple[Any, ...], parts: Sequence[Any]) -> Ticket:
        """Send one operation with payloads that were put."""
        return self.send(rank, _body(operation, arguments, parts), _segments(parts))

    def send(self, rank: int, body: bytes, segments: Sequence[Segment] = ()) -> Ticket:
        """Send a body to one rank; if its worker is gone, the ticket says so."""
        lane = self._lanes[rank]
        ticket = Ticket()
        with self._lock:
            if rank not in self._dead:
                self._pending[rank].append(ticket)
                try:
                    lane.send(body, segments)
                except Closed:
                    self._note_death(rank)
                except OSError as error:
                    self._pending[rank].remove(ticket)
                    self._finish(ticket, Failure.of(error), is_failure=True)
            if rank in self._dead:
                self._finish(ticket, self._dead[rank], is_failure=True)
        return ticket

    def give_back(self, segment: Segment) -> None:
        """The controller itself needs a segment no longer."""
        with self._lock:
            self._writer.give_back([segment.id], OWNER)

    def wait(self, tickets: Sequence[Ticket], timeout_s: float | None) -> list[Ticket]:
        """Wait until all are done, one of them failed, or the time is over; those that are done."""
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        with self._lock:
            n_done = 0
            while True:
                while n_done < len(tickets) and tickets[n_done].is_done:
                    n_done += 1
                if n_done == len(tickets) or any(ticket.is_failure for ticket in tickets):
                    break
                left = None if deadline == math.inf else deadline - time.monotonic()
                if left is not None and left <= 0:
                    self._receive_all()
                    break
                self._wait_for_arrival(left)
            return [ticket for ticket in tickets if ticket.is_done]

    def fetch(self, ticket: Ticket) -> Any | Failure:
        """The decoded value, or the failure."""
        outcome, ticket.outcome = ticket.outcome, None
        if not isinstance(outcome, Payload):
            return outcome
        try:
            return decode(outcome)
        except Exception as error:  # the user's objects may not like to be unpickled here
            return Failure.of(error, FailureKind.RESULT)

    def close_lanes(self) -> None:
        """Hang up on every worker; whoever waits is told that it is gone."""
        with self._lock:
            for rank, lane in enumerate(self._lanes):
                if rank not in self._dead:
                    self._dead[rank] = Failure(FailureKind.DIED, "the group was closed")
                    self._end(rank)
                lane.close()
            self._poll.close()
            self._writer.close()
            self._arrived.notify_all()

    def _wait_for_arrival(self, timeout_s: float | None) -> None:
        """Receive something, or let the thread that is receiving do it; the lock is held, but not while blocked."""
        if self._has_reader:
            self._arrived.wait(timeout_s)
            return
        self._has_reader = True
        self._lock.release()
        try:
            self._poll.poll(timeout_s)
        finally:
            self._lock.acquire()
            self._has_reader = False
        self._receive_all()
        self._arrived.notify_all()

    def _receive_all(self) -> None:
        """Take every answer that is there; the lock is held."""
        if self._poll.closed:
            return
        for fd, _ in self._poll.poll(0):
            rank = self._by_fd[fd]
            try:
                answer = self._lanes[rank].receive(block=False)
            except (Closed, OSError):
                self._note_death(rank)
                continue
            if answer is not None:
                part, is_failure = answer
                payload = None if part is None else self._lanes[rank].unpack(part)
                outcome = decode(payload) if payload is not None and is_failure else payload
                self._finish(self._pending[rank].popleft(), outcome, is_failure)

    def _finish(self, ticket: Ticket, outcome: Payload | Failure | None, is_failure: bool) -> None:
        ticket.outcome, ticket.is_failure, ticket.is_done = outcome, is_failure, True

    def _note_death(self, rank: int) -> None:
        if rank not in self._dead:
            self._dead[rank] = Failure(FailureKind.DIED, self._how_it_died(rank))
            self._poll.unregister(self._lanes[rank].fileno())
            self._end(rank)

    def _end(self, rank: int) -> None:
        self._writer.forget_reader(rank)
        while self._pending[rank]:
            self._finish(self._pending[rank].popleft(), self._dead[rank], is_failure=True)


def _body(operation: str, arguments: tuple[Any, ...], parts: Sequence[Any]) -> bytes:
    named = tuple(SegmentPart(part.segment.id) if isinstance(part, Written) else part for part in parts)
    return pickle.dumps((operation, *arguments, named), protocol=5)


def _segments(parts: Sequence[Any]) -> list[Segment]:
    return [part.segment for part in parts if isinstance(part, Written)]
