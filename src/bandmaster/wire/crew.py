"""The controller's side of a group whose workers are reached by lanes.

::

    call ── the same body for all ranks that get the same ──► lane of each rank ──► loop in the worker
    wait ◄── whoever waits reads the lanes that have something, and keeps what is for others ◄── answers, in order
"""

from __future__ import annotations

import math
import pickle
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from bandmaster.backends import CLOSED, QUEUED, Call, Reply
from bandmaster.errors import ClosedError
from bandmaster.failure import Failure, FailureKind
from bandmaster.limits import start_thread
from bandmaster.wire import desk
from bandmaster.wire.arrivals import HAS_ROOM, Arrivals, Event
from bandmaster.wire.codec import Payload, decode
from bandmaster.wire.gpu import Loan
from bandmaster.wire.lane import (
    INLINE_NBYTES,
    MAX_PARTS_NBYTES,
    Buffer,
    Closed,
    Lane,
    inline,
)
from bandmaster.wire.lender import Lender
from bandmaster.wire.loop import HEADER, HEADER_NBYTES, UNANSWERED, Answer, message_of, read_answer
from bandmaster.wire.segments import Segment, SegmentWriter
from bandmaster.wire.shelf import Shelf, Written

__all__ = ["LaneCrew", "Ticket"]


class Ticket:
    """One message on one lane, and in time its answer.

    Attributes:
        number: Of the message.
        loans: Kept until it is answered.
        is_done: Whether it was answered, or will not be.
        outcome: The pickle stream of a small value, the payload of a large one, None for nothing, or what went wrong.
        is_interrupted: Whether unpickling the outcome has raised KeyboardInterrupt.
    """

    __slots__ = ("is_done", "is_interrupted", "loans", "number", "outcome")

    def __init__(self, number: int, loans: tuple[Loan, ...] = ()) -> None:
        self.number = number
        self.loans = loans
        self.is_done = self.is_interrupted = False
        self.outcome: bytes | Payload | Failure | None = None


MAX_UNANSWERED = min(256, desk.N_SLOTS // 2)  # messages to one worker: each needs a slot of its own to be given up
_Outgoing = tuple[bytes, Sequence[Segment], Ticket | None]  # a message, and the ticket of its answer if it has one


class LaneCrew:
    """Sends messages to the ranks of a group and hands out their answers. Any thread may call it.

    Attributes:
        deaths: How each rank ended whose lane broke.
        is_stopped: Whether `close_lanes` was called.
        processes: That of each rank.
        lock: Of the lanes, what is written and what is pending. The messages of one call are sent while it is held, so
            that all ranks get the calls of several threads in the same order.

    Args:
        sockets: The controller's end of the lane of each rank that has one; owned from here on.
        pids: The process of each of them.
        how_it_died: What is known of a rank whose lane broke.
    """

    has_native_tickets = False

    def __init__(
        self, sockets: Mapping[int, socket.socket], pids: Mapping[int, int], how_it_died: Callable[[int], Failure]
    ) -> None:
        self.processes: dict[int, int] = {}
        self.deaths: dict[int, Failure] = {}
        self._how_it_died = how_it_died
        self._ended: dict[int, str] = {}  # why, where that was on purpose
        self._writer = SegmentWriter()
        self._shelf = Shelf(self._writer)
        self._buffer = Buffer()
        self._lanes: dict[int, Lane] = {}
        self._by_fd: dict[int, int] = {}
        self._pending: dict[int, dict[int, Ticket]] = {}  # by rank and number, in the order they were asked
        self._n_messages = 0
        self._queues: dict[int, deque[_Outgoing]] = {}  # what a worker that is busy has not taken yet
        self._sender: threading.Thread | None = None
        self._n_failed = 0
        self._lender = Lender(self._try_to_lend)
        self._trials: set[int] = set()  # numbers of messages that no call waits for
        self._left: dict[int, list[tuple[Loan, ...]]] = {}  # lent to ranks that are dead, or soon will be
        self._arrivals = Arrivals()
        self.is_stopped, self._why_closed = False, CLOSED
        self.lock = self._arrivals.lock
        for rank, sock in sockets.items():
            self.add_lane(rank, sock, pids[rank])

    def lend(self, ranks: Sequence[int], memory: Any) -> Loan | None:
        """Lend a copy of what is on a GPU to ranks that can copy from there."""
        return self._lender.lend(ranks, memory)

    def _try_to_lend(self, rank: int, loan: Loan, sample: bytes) -> Callable[[], bool]:
        ticket = self.send(rank, "borrow", (loan.handle, loan.offset, sample), loans=(loan,))
        self._trials.add(ticket.number)
        return lambda: ticket.is_done and self.fetch(ticket) is True

    def put(self, payloads: Sequence[Payload]) -> list[Any]:
        """Small payloads themselves; for each large one a segment for one copy of it."""
        parts: list[Any] = []
        for payload in payloads:
            if not payload.buffers and len(payload.head) <= INLINE_NBYTES:  # as most are
                parts.append((payload.head, ()))
            else:
                parts.append(inline(payload) if payload.nbytes <= INLINE_NBYTES else None)
        if None in parts:
            with self.lock:
                parts = [part or self.place(payload) for part, payload in zip(parts, payloads, strict=True)]
        return parts

    def place(self, payload: Payload) -> Any:
        """What `put` returns for one payload; the lock is held.

        Raises:
            ClosedError: The lanes were closed.
            ResourceError: There is no memory or no descriptor for it.
        """
        if payload.nbytes <= INLINE_NBYTES:
            return inline(payload)
        if self.is_stopped:
            raise ClosedError(self._why_closed)
        return self._shelf.put(payload)

    def call(self, calls: Sequence[Call], tickets: dict[int, Any]) -> None:
        """Send the calls as a unit: no other call comes between them on any rank."""
        with self.lock:
            self.send_calls(calls, tickets)

    def send_calls(self, calls: Sequence[Call], tickets: dict[int, Any]) -> None:
        """Send calls, each encoded once; the lock is held.

        Raises:
            ResourceError: There is no memory or no descriptor for what they say; none was sent.
        """
        messages = [self._that_fit(call.parts) for call in calls]
        for call, parts in zip(calls, messages, strict=True):
            arguments = call.method, call.reply is not Reply.NOTHING
            self._submit(tickets, call.ranks, "call", arguments, parts, call.loans)

    def send(
        self,
        rank: int,
        operation: str,
        arguments: tuple[Any, ...] = (),
        parts: Sequence[Any] = (),
        loans: tuple[Loan, ...] = (),
    ) -> Ticket:
        """Send one operation to one rank, with payloads that were put."""
        tickets: dict[int, Ticket] = {}
        with self.lock:
            self._submit(tickets, (rank,), operation, arguments, parts, loans)
        return tickets[rank]

    def pause(self, rank: int) -> None:
        """Have a worker leave its lane, once it has done what was sent before; the lock is held."""
        if rank not in self.deaths:
            self._send_in_order(rank, (message_of(UNANSWERED, "pause", (), ()), (), None))

    def _submit(
        self,
        tickets: dict[int, Ticket],
        ranks: Sequence[int],
        operation: str,
        arguments: tuple[Any, ...],
        parts: Sequence[Any],
        loans: tuple[Loan, ...] = (),
    ) -> None:
        """Send the same message to some ranks; where the worker is gone, the ticket says so. The lock is held."""
        self._n_messages = number = self._n_messages + 1
        if self.deaths:
            ranks = [rank for rank in ranks if not self._answer_for_the_dead(rank, number, tickets)]
        if not ranks:
            return
        segments: list[Segment] = []
        named: list[Any] = []
        for part in parts:
            if isinstance(part, Written):
                segments.append(part.segment)
                named.append(part.segment.id)
            else:
                named.append(part)
        message = message_of(number, operation, arguments, named)
        for rank in ranks:
            tickets[rank] = ticket = Ticket(number, loans)
            for segment in segments:
                self._writer.lend(segment, rank)
            self._pending[rank][number] = ticket
            self._send_in_order(rank, (message, segments, ticket))

    def _answer_for_the_dead(self, rank: int, number: int, tickets: dict[int, Ticket]) -> bool:
        """Whether a rank is dead; then its ticket says so."""
        if rank in self.deaths:
            tickets[rank] = Ticket(number)
            self._finish(tickets[rank], self.deaths[rank])
        return rank in self.deaths

    def _that_fit(self, parts: Sequence[Any]) -> Sequence[Any]:
        """The parts of one message; those that are too large together have gone into segments, the largest first."""
        if len(parts) < 2:
            return parts
        sizes = [0 if isinstance(part, Written) else Payload(*part).nbytes for part in parts]
        fitting = list(parts)
        while sum(sizes) > MAX_PARTS_NBYTES:
            largest = sizes.index(max(sizes))
            fitting[largest] = self._shelf.put(Payload(*parts[largest]))
            sizes[largest] = 0
        return fitting

    def _send_in_order(self, rank: int, outgoing: _Outgoing) -> None:
        """Send a message now, or behind those that wait for the worker to read."""
        if self._queues[rank] or len(self._pending[rank]) > MAX_UNANSWERED or not self._send(rank, outgoing):
            self._queues[rank].append(outgoing)
            if self._sender is None:
                self._sender = start_thread("bandmaster-sender", self._send_queued)

    def _send(self, rank: int, outgoing: _Outgoing) -> bool:
        """Send a message; False if the worker does not read now: then there will be an event when it has read."""
        message, segments, _ = outgoing
        try:
            self._lanes[rank].send(message, segments)
        except BlockingIOError:
            self._arrivals.ask_for_room(self._lanes[rank].fileno(), True)
            return False
        except Closed:
            self._read_to_the_end(rank)
        except OSError as error:
            self._drop(rank, outgoing, Failure.of(error))
        return True

    def _drop(self, rank: int, outgoing: _Outgoing, why: Failure) -> None:
        """A message that was not sent and will not be: answers come in order, and none is for this one."""
        _, segments, ticket = outgoing
        self._writer.give_back([segment.id for segment in segments], rank)
        if ticket is not None:
            del self._pending[rank][ticket.number]
            self._finish(ticket, why)
            self._arrivals.tell()

    def _send_queued(self) -> None:
        """A thread's: see to it that queued messages are sent though nobody may wait for anything.

        It goes on until all is answered: a worker whose answers nobody reads stops as well.
        """
        with self.lock:
            while any(self._pending.values()) and not self._arrivals.is_closed:
                self._receive(self._arrivals.wait(None))
            self._sender = None

    def _flush(self, rank: int) -> None:
        """Send what is queued for a rank as far as it reads and answers."""
        queue = self._queues[rank]
        while queue and len(self._pending[rank]) - len(queue) < MAX_UNANSWERED:
            outgoing = queue.popleft()
            if not self._send(rank, outgoing):
                queue.appendleft(outgoing)
                break

    def give_up(self, tickets: Mapping[int, Ticket]) -> None:
        """Interrupt what is asked for where it runs, and have it passed over where it does not run yet."""
        with self.lock:
            sent = {rank: ticket for rank, ticket in tickets.items() if not ticket.is_done}
            for rank, ticket in list(sent.items()):
                for outgoing in [queued for queued in self._queues[rank] if queued[2] is ticket]:
                    self._queues[rank].remove(outgoing)
                    self._drop(rank, outgoing, Failure(FailureKind.CANCELLED, "given up before it was sent"))
                    del sent[rank]
        for rank, ticket in sent.items():
            desk.give_up(self.processes[rank], ticket.number)

    def stacks(self, tickets: Mapping[int, Ticket]) -> dict[int, str]:
        """The Python stacks of ranks, as far as they can be had."""
        queued = {rank: "" if self.is_at(rank, ticket) else QUEUED for rank, ticket in tickets.items()}
        texts = desk.stacks([self.processes[rank] for rank in tickets])
        pids = {rank: self.processes[rank] for rank in tickets}
        return {rank: queued[rank] + texts[pid] for rank, pid in pids.items() if pid in texts}

    def is_at(self, rank: int, ticket: Ticket) -> bool:
        """Whether a worker has come to a call: it answers them in order."""
        with self.lock:
            calls = (asked for number, asked in self._pending.get(rank, {}).items() if number not in self._trials)
            return next(calls, None) is ticket

    def note_end(self, rank: int, why: str) -> None:
        """The process of a rank is ended on purpose: when its lane breaks, that is why."""
        self._ended.setdefault(rank, why)

    def wait(self, tickets: Sequence[Ticket], timeout_s: float | None) -> list[Ticket]:
        """Wait until all are done, some call has failed, or the time is over; those that are done."""
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self.lock:  # Ctrl-C comes when it is left, and may be the user's to handle without an exception
                done = self._wait(tickets, deadline)
            if done is not None:
                return done

    def _wait(self, tickets: Sequence[Ticket], deadline: float) -> list[Ticket] | None:
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
            self._receive(self._arrivals.wait(left))
        return [ticket for ticket in tickets if ticket.is_done]

    def fetch(self, ticket: Ticket) -> Any | Failure:
        """The decoded value, or the failure."""
        outcome = ticket.outcome
        try:
            if type(outcome) is bytes:
                return pickle.loads(outcome)
            return decode(outcome) if isinstance(outcome, Payload) else outcome
        except BaseException as error:  # the user's objects may raise anything as they are unpickled
            was_interrupted, ticket.is_interrupted = ticket.is_interrupted, isinstance(error, KeyboardInterrupt)
            return Failure.unreadable(error, was_interrupted)

    def look_for_deaths(self) -> None:
        """Read what has arrived; a lane that was hung up tells of a death."""
        with self.lock:
            self._receive_all()

    def forget_death(self, rank: int) -> None:
        """There is a new worker for a rank that has died; `add_lane` if it has a lane."""
        with self.lock:
            del self.deaths[rank]
            self._ended.pop(rank, None)
            self._lender.forget(rank)
            self._left.pop(rank, None)
            lane = self._lanes.pop(rank, None)
            if lane is not None:
                del self._by_fd[lane.fileno()], self.processes[rank]
                lane.close()

    def add_lane(self, rank: int, sock: socket.socket, pid: int) -> None:
        """A lane for a rank that has none. The socket is owned from here on."""
        with self.lock:
            lane = Lane(sock, self._writer, rank, blocks=False)
            self._lanes[rank], self.processes[rank] = lane, pid
            self._by_fd[lane.fileno()] = rank
            self._pending[rank], self._queues[rank] = {}, deque()
            self._arrivals.watch(lane.fileno())

    def bury(self, rank: int) -> None:
        """Note the death of a rank that its lane has not told of yet, or that has no lane."""
        with self.lock:
            self._note_death(rank)

    def close_lanes(self, why: str = CLOSED) -> None:
        """Hang up on every worker; whoever waits is told that it is gone."""
        with self.lock:
            if self.is_stopped:
                return
            self.is_stopped, self._why_closed = True, why
            for rank, lane in self._lanes.items():
                if rank not in self.deaths:
                    self.deaths[rank] = Failure(FailureKind.DIED, why)
                    self._end(rank)
                lane.close()
            self._arrivals.close()
            self._writer.close()

    def forget_loans(self) -> None:
        """No process of a dead rank is there any more, which might read what was lent to it."""
        self._left.clear()

    def _read_to_the_end(self, rank: int) -> None:
        """Take what a worker answered before it hung up."""
        n_pending = len(self._pending[rank]) + 1
        while rank not in self.deaths and len(self._pending[rank]) < n_pending:
            n_pending = len(self._pending[rank])
            self._receive([(self._lanes[rank].fileno(), 0)])
        self._note_death(rank)

    def _receive_all(self) -> None:
        """Take what has arrived; the lock is held."""
        while ready := self._arrivals.now():
            self._receive(ready)

    def _receive(self, ready: Sequence[Event]) -> None:
        """Take an answer of each lane that has one, and send what waits for it; they may be other threads' calls."""
        if not ready:
            return
        try:
            for fd, events in ready:
                rank = self._by_fd.get(fd)
                if rank is None or rank in self.deaths:
                    continue
                if events & HAS_ROOM:
                    self._arrivals.ask_for_room(fd, False)
                if events != HAS_ROOM:
                    self._receive_from(rank)
                if self._queues[rank] and rank not in self.deaths:
                    self._flush(rank)
        finally:
            self._arrivals.tell()

    def _receive_from(self, rank: int) -> None:
        """Take one answer, if there is one."""
        try:
            body = self._lanes[rank].receive(block=False, buffer=self._buffer)
            if body is not None:
                kind, number = HEADER.unpack_from(body)
                ticket = self._pending[rank].pop(number, None)
                if ticket is None:
                    return  # a worker that was interrupted as it answered has answered twice
                if kind == Answer.VALUE:
                    self._finish(ticket, bytes(body[HEADER_NBYTES:]))
                else:
                    self._finish_with(ticket, rank, kind, body)
        except Closed:
            self._note_death(rank)
        except OSError as error:  # the answer came, but there was no descriptor left for what it is in
            body = self._lanes[rank].body
            assert body is not None, "it was received before its segments were opened"
            self._finish(self._pending[rank].pop(HEADER.unpack_from(body)[1]), Failure.of(error))

    def _finish_with(self, ticket: Ticket, rank: int, kind: int, body: memoryview) -> None:
        try:
            self._finish(ticket, read_answer(self._lanes[rank], kind, body))
        except BaseException as error:  # the user's exceptions may do anything when they are unpickled
            self._finish(ticket, Failure.of(error))

    def _finish(self, ticket: Ticket, outcome: bytes | Payload | Failure | None) -> None:
        ticket.outcome, ticket.is_done, ticket.loans = outcome, True, ()
        if type(outcome) is Failure:
            self._n_failed += 1

    def _note_death(self, rank: int) -> None:
        if rank not in self.deaths:
            failure = self._how_it_died(rank)
            if rank in self._ended:
                failure = replace(failure, kind=FailureKind.CANCELLED, summary=self._ended[rank])
            self.deaths[rank] = failure
            if rank in self._lanes:
                self._arrivals.ignore(self._lanes[rank].fileno())
                self._end(rank)

    def _end(self, rank: int) -> None:
        self._writer.forget_reader(rank)
        self._queues[rank].clear()
        while self._pending[rank]:
            _, ticket = self._pending[rank].popitem()
            if ticket.loans:
                self._left.setdefault(rank, []).append(ticket.loans)
            self._finish(ticket, self.deaths[rank])
        self._arrivals.tell()
