"""The client of the ranks of a group on this host, each of which is reached over a lane.

::

    call ── the same body for all ranks that get the same ──► lane of each rank ──► bandmaster.worker_process.loop
      └── large payloads ──► segments, which the lanes share
    wait ◄── bandmaster.wire.client ◄────── replies, in order ── lanes
"""

from __future__ import annotations

import itertools
import pickle
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from bandmaster.codec import Payload, encode
from bandmaster.contract import CLOSED, MORE_ITEMS, QUEUED, Kept, Signs, Ticket, WorkerCall
from bandmaster.errors import ClosedError, ResourceError
from bandmaster.errors.failure import Failure, FailureKind
from bandmaster.platform.limits import start_thread
from bandmaster.wire import status_page
from bandmaster.wire.client import Client, MessageTicket, RequestTicket
from bandmaster.wire.lane import TELL_S, Lane
from bandmaster.wire.messages import (
    APART,
    INLINE_NBYTES,
    MAX_MESSAGE_NBYTES,
    MAX_PARTS_NBYTES,
    CallContent,
    Closed,
    MessageKind,
    ReplyKind,
    as_fit,
    call_message,
    control_message,
    header_of,
    inline,
    nbytes_of,
)
from bandmaster.wire.poller import HAS_ROOM, Poller
from bandmaster.wire.segment_reader import KeptSegment
from bandmaster.wire.segments import Segment, SegmentPayload, SegmentWriter, SharedPayload

MAX_UNANSWERED = min(256, status_page.N_SLOTS // 2)  # messages to one worker: each needs a slot on its status page

_T = TypeVar("_T")

# A message, the segments that it names, and the tickets that it has replies for.
_Outgoing = tuple[bytes, Sequence[Segment], Sequence[MessageTicket]]


class LaneClient(Client):
    """Sends messages to the ranks of a group on this host and hands out their replies. Any thread may call it.

    Attributes:
        is_stopped: Whether `close` was called.
        processes: The process of each rank that has a lane.
        lock: Guards all state. The messages of one call are sent while it is held, so that all ranks get the calls of
            several threads in one order.

    Args:
        how_it_died: Says how a rank ended whose lane broke.
        numbers: The numbers of messages; no two callers of a worker use the same ones. By default from 1 on.
    """

    def __init__(self, how_it_died: Callable[[int], Failure], numbers: Iterator[int] | None = None) -> None:
        super().__init__(Poller(), numbers or itertools.count(1))
        self.processes: dict[int, int] = {}
        self.is_stopped, self._why_closed = False, CLOSED
        self._how_it_died = how_it_died
        self._writer = SegmentWriter()
        self._buffer = bytearray(MAX_MESSAGE_NBYTES)  # what all lanes receive in
        self._lanes: dict[int, Lane] = {}
        self._queues: dict[int, deque[_Outgoing]] = {}  # messages that a worker that is busy has not taken yet
        self._n_beside: dict[int, int] = {}  # how many of these are no calls
        self._resumed: dict[int, int] = {}  # the last call, by number, after which each rank was let go on
        self._sender: threading.Thread | None = None
        self._teller: threading.Thread | None = None  # as long as there are leases
        self._is_over = threading.Event()  # set with `is_stopped`

    # --- sending ---

    def put(self, payloads: Sequence[Payload | Kept]) -> list[Any]:
        """Make parts of payloads: small ones as they are, and a shared segment for each large one."""
        parts: list[Any] = [
            inline(payload) if type(payload) is Payload and payload.nbytes <= INLINE_NBYTES else None
            for payload in payloads
        ]
        if None in parts:
            with self.lock:
                parts = [part or self.place(payload) for part, payload in zip(parts, payloads, strict=True)]
        return parts

    def place(self, payload: Payload | Kept) -> Any:
        """The part of one payload, or of kept rows; the lock is held.

        Raises:
            ClosedError: The lanes were closed.
            ResourceError: There is no memory or no descriptor for it.
        """
        if isinstance(payload, KeptSegment):
            return self._writer.adopt(payload.lease)
        if isinstance(payload, SegmentPayload):
            is_ours = payload.owner is self._writer
            return payload.placed if is_ours else self._share(payload, payload.placed.segment.is_kept)
        encoded = payload if isinstance(payload, Payload) else payload.payload()
        is_kept = encoded is not payload
        return inline(encoded) if encoded.nbytes <= INLINE_NBYTES else self._share(encoded, is_kept)

    def _share(self, payload: Payload, is_kept: bool = False) -> SharedPayload:
        return self._with_room(payload.nbytes, partial(self._writer.put, payload, is_kept))

    def reserve(self, sizes: Sequence[int], is_kept: bool = False) -> SegmentPayload:
        """A payload in a segment, whose head and buffers of these sizes the caller writes before it is put.

        Args:
            sizes: Bytes of the head and of each buffer.
            is_kept: Whether calls are to name it as kept rows.

        Raises:
            ClosedError: The lanes were closed.
            ResourceError: There is no memory or no descriptor for it.
        """
        with self.lock:
            self._have_leases_ended()
            return self._with_room(sum(sizes), partial(self._writer.reserve, sizes, is_kept))

    def _with_room(self, nbytes: int, make: Callable[[], _T]) -> _T:
        if self.is_stopped:
            raise ClosedError(self._why_closed)
        try:
            return make()
        except OSError as error:
            raise ResourceError(
                f"cannot share {nbytes:,} bytes with the workers ({error}); free memory, or raise the limit on open "
                "files (ulimit -n)"
            ) from error

    def call(self, calls: Sequence[WorkerCall], tickets: dict[int, Any]) -> None:
        """Send calls; see `contract.Workers.call`."""
        with self.lock:
            self.send_calls(calls, tickets)

    def send_calls(self, calls: Sequence[WorkerCall], tickets: dict[int, Any]) -> None:
        """Send calls; the lock is held."""
        if self._writer.collected:
            self._writer.release()
        for call in [self._that_fits(call) if len(call.parts) > 1 or call.rows else call for call in calls]:
            self._send_call(call, tickets)

    def change_environment(self, rank: int, variables: Mapping[str, str]) -> None:
        """Set variables in a worker's environment, once it has done what was sent before."""
        with self.lock:
            self._send_control(rank, control_message(MessageKind.ENVIRONMENT, dict(variables)))

    def pause(self, rank: int) -> None:
        """Have a worker leave its lane, once it has done what was sent before; the lock is held."""
        self._send_control(rank, control_message(MessageKind.PAUSE))

    def request(self, rank: int, requests: Sequence[WorkerCall], take: Callable[[Sequence[Ticket]], object]) -> None:
        """Send requests to a rank; see `contract.Workers.request`."""
        with self.lock:
            if rank not in self.deaths:
                requests = [self._that_fits(call) if len(call.parts) > 1 or call.rows else call for call in requests]
            numbered = list(zip(requests, self._new_requests(rank, len(requests), take), strict=False))
            for some in as_fit(numbered, lambda one: nbytes_of(one[0])):
                segments: list[Segment] = []
                content = [(ticket.number, self._content_of(call, segments), call.is_timed) for call, ticket in some]
                if segments:
                    self._have_leases_ended()
                for segment in segments:
                    self._writer.lease(segment, rank)
                message = control_message(MessageKind.REQUESTS, content)
                if content[0][1][0] == MORE_ITEMS:  # calls in the queue wait for its stream
                    with suppress(Closed, OSError):  # `_flush` meets it again
                        self._lanes[rank].send(message, segments)
                        continue
                self._send_beside(rank, (message, segments, [ticket for _, ticket in some]))

    def _send_control(self, rank: int, message: bytes) -> None:
        if rank not in self.deaths:
            self._send_beside(rank, (message, (), ()))

    def _send_beside(self, rank: int, outgoing: _Outgoing) -> None:
        """Send a message that is no call, and has no place among the calls to interrupt."""
        self._n_beside[rank] += 1
        self._queues[rank].append(outgoing)
        self._flush(rank)

    def _send_call(self, call: WorkerCall, tickets: dict[int, Any]) -> None:
        """Send one call to its ranks; where the worker is gone, the ticket says so. The lock is held."""
        number = next(self._numbers)
        ranks = self._living(call.ranks, number, tickets) if self.deaths else call.ranks
        if not ranks:
            return  # nor is there a segment any more, if the lanes were closed
        segments: list[Segment] = []
        content = self._content_of(call, segments)
        if segments:
            self._have_leases_ended()
        message = call_message(number, content, call.is_timed, call.is_fenced)
        for rank in ranks:
            open_here, queue = self._open[rank], self._queues[rank]
            open_here[number] = tickets[rank] = ticket = MessageTicket(number)
            for segment in segments:
                self._writer.lease(segment, rank)
            if not queue and len(open_here) <= MAX_UNANSWERED:
                try:
                    self._lanes[rank].send(message, segments)
                    continue
                except (Closed, OSError):  # `_flush` meets it again
                    pass
            queue.append((message, segments, (ticket,)))
            self._flush(rank)

    def _content_of(self, call: WorkerCall, segments: list[Segment]) -> CallContent:
        """The content of a message with a call; the segments that it names are added to the list."""
        parts = call.parts
        if len(parts) != 1 or type(parts[0]) is SharedPayload:  # else it is small, as most are
            parts = tuple([_named(part, segments) for part in parts])
        rows = [(label, _named(part, segments)) for label, part in call.rows] if call.rows else ()
        return call.method, int(call.reply), parts, rows, _present_in(call)

    def _that_fits(self, call: WorkerCall) -> WorkerCall:
        """A call that fits into one message: what is too large together, or too many parts, goes into one segment."""
        if nbytes_of(call) <= MAX_PARTS_NBYTES:
            return call
        parts = [part for part in call.parts if type(part) is tuple]
        rows = [(label, part) for label, part in call.rows if type(part) is tuple]
        apart = self._share(Payload(pickle.dumps((parts, rows, _present_in(call)), protocol=5)))
        return call._replace(
            parts=tuple([part for part in call.parts if type(part) is not tuple]),
            rows=((APART, apart), *[(label, part) for label, part in call.rows if type(part) is not tuple]),
            present={},
        )

    def _flush(self, rank: int) -> None:
        """Send the queued messages of a rank, as far as it reads and replies; a thread sends the rest."""
        queue, lane = self._queues[rank], self._lanes[rank]
        while queue and len(self._open[rank]) - (len(queue) - self._n_beside[rank]) < MAX_UNANSWERED:
            try:
                lane.send(queue[0][0], queue[0][1])
            except BlockingIOError:  # there will be an event when it has read
                self._poller.ask_for_room(lane.fileno(), True)
                break
            except Closed:
                self._read_to_the_end(rank)
                self.note_death(rank)
                return
            except OSError as error:
                self._drop(rank, queue[0], Failure.of(ResourceError(str(error))))
            self._n_beside[rank] -= not _is_call(queue.popleft())
        if queue and self._sender is None:
            self._sender = start_thread("bandmaster-sender", self._send_queued)

    def _drop(self, rank: int, outgoing: _Outgoing, why: Failure) -> None:
        """Fail a message that was not sent and will not be: replies come in order, and none comes for this one."""
        _, segments, tickets = outgoing
        self._writer.end_leases([segment.id for segment in segments], rank)
        for ticket in tickets:
            (self._open if _is_call(outgoing) else self._requests)[rank].pop(ticket.number, None)
            ticket.is_dropped = True
            self._finish(ticket, why)
            self._poller.wake_if_blocked()

    def _send_queued(self) -> None:
        """Send queued messages from a thread, though no other thread may wait for anything.

        It goes on until all is replied to: a worker whose replies nobody reads stops as well.
        """
        with self.lock:
            while any((*self._open.values(), *self._requests.values())) and not self.is_stopped:
                self._poller.receive(None)
            self._sender = None

    # --- receiving ---

    def check(self, is_thorough: bool = True) -> bool:
        """Read everything that has arrived; a lane that was hung up tells of a death. False once `close` was called."""
        with self.lock:
            self._poller.receive_all()
        return not self.is_stopped

    def _take(self, rank: int, events: int) -> bool:
        """Take one reply of a rank, if there is one, and send what waits for it; it may be that of another thread.

        Returns:
            Whether there was one.
        """
        if rank in self.deaths:
            return False
        lane = self._lanes[rank]
        if events & HAS_ROOM:
            self._poller.ask_for_room(lane.fileno(), False)
        try:
            body = lane.receive(block=False)
        except Closed:
            if not self.is_stopped:
                self.note_death(rank)
            return False
        if body is not None:
            if not self._take_reply((rank,), body, lane):  # a worker that was interrupted as it replied replies twice
                status_page.resume(self.processes[rank], header_of(body)[1])
            if body[0] > ReplyKind.VALUE and lane.has_leases:
                self._have_leases_ended()
        if self._queues[rank]:
            self._flush(rank)
        return body is not None

    # --- leases ---

    def _have_leases_ended(self) -> None:
        """Tell of leases that end, though no message may be sent that does; the lock is held."""
        if self._teller is None and not self.is_stopped:
            with suppress(ResourceError):
                self._teller = start_thread("bandmaster-leases", self._tell_of_leases)

    def _tell_of_leases(self) -> None:
        """In a thread, as long as there are leases: tell workers of those that have ended, and hear of theirs."""
        while not self._is_over.wait(TELL_S):
            with self.lock:
                if self.is_stopped:
                    return
                if self._poller.receive_all():
                    self._poller.wake()  # a thread that waits for `arrivals` looks at what this one has taken
                self._writer.release()
                has_more = [lane.tell() for rank, lane in self._lanes.items() if rank not in self.deaths]
                if not (any(has_more) or self._writer.has_leases):
                    self._teller = None
                    return

    # --- interrupting ---

    def interrupt(self, tickets: Mapping[int, MessageTicket]) -> None:
        """Interrupt calls; see `contract.Workers.interrupt`."""
        with self.lock:
            sent = {rank: ticket for rank, ticket in tickets.items() if not ticket.is_done}
            for rank, ticket in list(sent.items()):
                if isinstance(ticket, RequestTicket):
                    self._send_control(rank, control_message(MessageKind.CANCEL, (ticket.number,)))
                    del sent[rank]
                    continue
                for outgoing in [queued for queued in self._queues[rank] if queued[2] == (ticket,)]:
                    self._queues[rank].remove(outgoing)
                    self._drop(rank, outgoing, Failure(FailureKind.CANCELLED, "cancelled before it was sent"))
                    del sent[rank]
        for rank, ticket in sent.items():
            status_page.interrupt(self.processes[rank], ticket.number)

    def resume(self, tickets: Mapping[int, MessageTicket]) -> None:
        """Let ranks begin their next calls; see `contract.Workers.resume`."""
        with self.lock:
            for rank, ticket in tickets.items():
                is_last = ticket.number > self._resumed.get(rank, 0)  # a rank may not have seen the last number yet
                if is_last and rank not in self.deaths and not ticket.is_dropped:
                    self._resumed[rank] = ticket.number
                    status_page.resume(self.processes[rank], ticket.number)

    def stacks(self, tickets: Mapping[int, MessageTicket]) -> dict[int, str]:
        """The stacks of ranks; see `contract.Workers.stacks`."""
        queued = {
            rank: "" if ticket is None or isinstance(ticket, RequestTicket) or self.is_at(rank, ticket) else QUEUED
            for rank, ticket in tickets.items()
        }
        pids = {rank: self.processes[rank] for rank in tickets}
        texts = status_page.stacks(list(pids.values()))
        return {rank: queued[rank] + texts[pid] for rank, pid in pids.items() if pid in texts}

    def signs(self, ranks: Sequence[int]) -> dict[int, Signs]:
        """The signs of life of ranks; see `contract.Workers.signs`."""
        return {rank: status_page.signs_of(self.processes[rank]) for rank in ranks if rank in self.processes}

    # --- workers that come and go ---

    def admit(self, rank: int, caller: socket.socket, first: bytes) -> bool:
        """Have a rank serve a further caller, which has the other end of this socket, by a lane of its own.

        Args:
            rank: The rank.
            caller: The socket.
            first: The message that the caller gets first, before any of the rank.

        Returns:
            Whether this was tried; if not, the rank has died, or has not read what it was sent before, or the caller is
            gone.
        """
        with self.lock:
            if self.is_stopped or rank in self.deaths or self._queues[rank]:
                return False
            try:
                caller.send(first, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except OSError:
                return False
            with suppress(Closed, OSError):  # then the caller finds its end closed
                self._lanes[rank].send_socket(control_message(MessageKind.CALLER), caller)
            return True

    def add(self, rank: int, sock: socket.socket, pid: int) -> None:
        """Reach a rank by a lane from here on, in place of the one that it had before it died; the lock is held.

        Args:
            rank: The rank.
            sock: This end of the lane; it is owned from here on.
            pid: The process of the worker.
        """
        before = self._lanes.pop(rank, None)
        if before is not None:
            self._poller.ignore(before.fileno())
            before.close()
        self._lanes[rank] = Lane(sock, self._writer, rank, self._buffer)
        self.processes[rank] = pid  # in one step: threads that tell of workers do not hold the lock
        self._open[rank], self._requests[rank] = {}, {}
        self._clear(rank)
        self._poller.watch(sock.fileno(), partial(self._take, rank))
        self.deaths.pop(rank, None)
        self.reports.pop(rank, None)

    def close(self, why: str = CLOSED) -> None:
        """Hang up on every worker; threads that wait are told that the workers are gone."""
        with self.lock:
            self._close(why)

    def _close(self, why: str) -> None:
        if self.is_stopped:
            return
        self.is_stopped, self._why_closed = True, why
        self._is_over.set()
        for rank, lane in self._lanes.items():
            if rank not in self.deaths:
                with suppress(OSError):
                    lane.socket.shutdown(socket.SHUT_RD)  # what is sent from here on comes too late
                    self._read_to_the_end(rank)
                self.deaths[rank] = Failure(FailureKind.DIED, why)
                self._hang_up(rank)
            lane.close()
        self.reports.on_change()
        self._poller.close()
        self._writer.close()

    def take_answered(self, rank: int) -> None:
        """Take what a worker, which is about to be ended, has replied; the lock is held."""
        for _ in range(len(self._open[rank]) + len(self._requests[rank])):
            if not self._take(rank, 0):
                return

    def _read_to_the_end(self, rank: int) -> None:
        """Take all that a worker has replied; it gets no more messages."""
        self._clear(rank)
        while self._take(rank, 0):
            pass

    def note_death(self, rank: int, failure: Failure | None = None) -> None:
        """Note the death of a rank, which its lane need not have told of; the lock is held.

        Args:
            rank: The rank.
            failure: How it died, or is about to be killed; by default this asks for it.
        """
        if rank not in self.deaths:
            self.deaths[rank] = failure or self._how_it_died(rank)
            if rank in self._lanes:
                self._poller.ignore(self._lanes[rank].fileno())
                self._hang_up(rank)
            self.reports.on_change()

    def _clear(self, rank: int) -> None:
        for _, _, tickets in self._queues.get(rank, ()):
            for ticket in tickets:
                ticket.is_dropped = True
        self._queues[rank], self._n_beside[rank] = deque(), 0

    def _hang_up(self, rank: int) -> None:
        self._writer.forget_reader(rank)
        self._clear(rank)
        self._lanes[rank].reader.close()  # rows that nobody has any more; leases keep those that somebody has
        self._fail_open(rank, self.deaths[rank])


def _is_call(outgoing: _Outgoing) -> bool:
    tickets = outgoing[2]
    return len(tickets) == 1 and not isinstance(tickets[0], RequestTicket)


def _present_in(call: WorkerCall) -> Any:
    """The part of the numbers of the rows that are present."""
    return inline(encode(dict(call.present))) if call.present else None


def _named(part: Any, segments: list[Segment]) -> Any:
    """The part as a message names it; its segment, if it has one, is added to the list."""
    if not isinstance(part, SharedPayload):
        return part
    segments.append(part.segment)
    return part.segment.id
