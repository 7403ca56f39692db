"""The controller's side of a group whose workers are reached by channels, such as lanes.

::

    call ── the same body for all ranks that get the same ──► channel of each rank ──► loop in the worker
    wait ◄── the waiting thread reads the channels that have something, also replies for others ◄── replies, in order
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from time import monotonic_ns
from typing import Any

from bandmaster.codec import Payload, encode
from bandmaster.contract import CLOSED, QUEUED, Call, Kept
from bandmaster.errors import ClosedError, ResourceError
from bandmaster.errors.failure import Failure, FailureKind
from bandmaster.platform.limits import start_thread
from bandmaster.wire import control_page
from bandmaster.wire.channel import (
    INLINE_NBYTES,
    MAX_MESSAGE_NBYTES,
    MAX_PARTS_NBYTES,
    TELL_S,
    Buffer,
    Channel,
    Closed,
    inline,
)
from bandmaster.wire.kept import KeptSegment
from bandmaster.wire.messages import (
    HEADER_NBYTES,
    TIMES_NBYTES,
    Kind,
    ReplyKind,
    call_message,
    control_message,
    header_of,
    read_reply,
)
from bandmaster.wire.poller import HAS_ROOM, Event, Poller
from bandmaster.wire.receiver import ChannelTicket, Receiver
from bandmaster.wire.segments import Segment, SegmentWriter
from bandmaster.wire.shared_payloads import SegmentPayload, SharedPayload, SharedPayloads

__all__ = ["WorkerClient"]


MAX_UNANSWERED = min(256, control_page.N_SLOTS // 2)  # messages to one worker: each needs a slot on its control page
MAX_NUMBERS_NBYTES = MAX_MESSAGE_NBYTES - MAX_PARTS_NBYTES - 8 * 1024  # of rows, in a message
_VALUE, _TIMED = ReplyKind.VALUE, ReplyKind.TIMED
_Outgoing = tuple[
    bytes, Sequence[Segment], ChannelTicket | None
]  # a message, and the ticket of its reply if it has one


class WorkerClient(Receiver):
    """Sends messages to the ranks of a group and hands out their replies. Any thread may call it.

    Attributes:
        deaths: The ranks whose processes have ended, and how.
        is_stopped: Whether `close_channels` was called.
        processes: The process of each rank that has a channel.
        writer: The shared segments that large payloads are written to.
        lock: Guards all state. The messages of one call are sent while it is held, so that all ranks get the calls of
            several threads in one order.

    Args:
        how_it_died: Says how a rank ended whose channel broke.
    """

    def __init__(self, how_it_died: Callable[[int], Failure]) -> None:
        super().__init__(Poller())
        self.processes: dict[int, int] = {}
        self.writer = SegmentWriter()
        self.is_stopped, self._why_closed = False, CLOSED
        self._how_it_died = how_it_died
        self._killed_because: dict[int, str] = {}
        self._payloads = SharedPayloads(self.writer)
        self._buffer = Buffer()
        self._channels: dict[int, Channel] = {}
        self._by_fd: dict[int, int] = {}
        self._pending: dict[int, dict[int, ChannelTicket]] = {}  # by rank and number, in the order they were sent
        self._n_messages = 0
        self._queues: dict[int, deque[_Outgoing]] = {}  # what a worker that is busy has not taken yet
        self._sender: threading.Thread | None = None
        self._teller: threading.Thread | None = None  # as long as there are leases
        self._is_over = threading.Event()  # set with `is_stopped`

    # --- sending ---

    def put(self, payloads: Sequence[Payload | Kept]) -> list[Any]:
        """As `contract.Workers.put`: small payloads as they are, and a shared segment for each large one."""
        parts: list[Any] = []
        for payload in payloads:
            if type(payload) is not Payload:
                parts.append(None)
            elif not payload.buffers and len(payload.head) <= INLINE_NBYTES:  # as most are
                parts.append((payload.head, ()))
            else:
                parts.append(inline(payload) if payload.nbytes <= INLINE_NBYTES else None)
        if None in parts:
            with self.lock:
                parts = [part or self.place(payload) for part, payload in zip(parts, payloads, strict=True)]
        return parts

    def place(self, payload: Payload | Kept) -> Any:
        """What `put` returns for one payload, or for kept rows; the lock is held.

        Raises:
            ClosedError: The channels were closed.
            ResourceError: There is no memory or no descriptor for it.
        """
        if isinstance(payload, KeptSegment):
            return self._payloads.adopt(payload)
        if isinstance(payload, SegmentPayload):
            is_ours = payload.owner is self._payloads
            return payload.placed if is_ours else self._payloads.put(payload, payload.is_kept)
        is_kept = not isinstance(payload, Payload)
        if not isinstance(payload, Payload):
            payload = payload.payload()
        if payload.nbytes <= INLINE_NBYTES:
            return inline(payload)
        if self.is_stopped:
            raise ClosedError(self._why_closed)
        return self._payloads.put(payload, is_kept)

    def reserve(self, sizes: Sequence[int], is_kept: bool = False) -> SegmentPayload:
        """A payload in a segment, whose head and buffers of these sizes the caller writes before it is put.

        Args:
            sizes: Bytes of the head and of each buffer.
            is_kept: Whether calls are to name it as kept rows.

        Raises:
            ClosedError: The channels were closed.
            ResourceError: There is no memory or no descriptor for it.
        """
        with self.lock:
            if self.is_stopped:
                raise ClosedError(self._why_closed)
            self._have_leases_ended()
            return self._payloads.reserve(sizes, is_kept)

    def call(self, calls: Sequence[Call], tickets: dict[int, Any]) -> None:
        """As `contract.Workers.call`."""
        with self.lock:
            self.send_calls(calls, tickets)

    def send_calls(self, calls: Sequence[Call], tickets: dict[int, Any]) -> None:
        """As `call`; the lock is held."""
        if self._payloads.released:
            self._payloads.let_go()
        messages = [call if len(call.parts) < 2 and not call.rows else self._that_fits(call) for call in calls]
        for call in messages:
            self._send_call(call, tickets)

    def change_environment(self, rank: int, variables: Mapping[str, str]) -> None:
        """Set variables in a worker's environment, once it has done what was sent before."""
        with self.lock:
            self._send_control(rank, control_message(Kind.ENVIRONMENT, variables))

    def pause(self, rank: int) -> None:
        """Have a worker leave its channel, once it has done what was sent before; the lock is held."""
        self._send_control(rank, control_message(Kind.PAUSE))

    def _send_control(self, rank: int, message: bytes) -> None:
        if rank not in self.deaths:
            self._send_in_order(rank, (message, (), None))

    def _send_call(self, call: Call, tickets: dict[int, Any]) -> None:
        """Send one call to its ranks; where the worker is gone, the ticket says so. The lock is held."""
        self._n_messages = number = self._n_messages + 1
        ranks = call.ranks
        if self.deaths:
            ranks = [rank for rank in ranks if rank not in self.deaths]
            for rank in set(call.ranks).difference(ranks):
                tickets[rank] = ChannelTicket(number)
                self._finish(tickets[rank], self.deaths[rank])
            if not ranks:
                return  # nor is there a segment any more, if the channels were closed
        segments: list[Segment] = []
        named = [_named(part, segments) if type(part) is SharedPayload else part for part in call.parts]
        rows = [(label, _named(part, segments)) for label, part in call.rows] if call.rows else ()
        there = _named(self._numbers(call.there), segments) if call.there else None
        if segments:
            self._have_leases_ended()
        message = call_message(number, call.method, call.reply_code, named, rows, there, call.is_fenced)
        for rank in ranks:
            tickets[rank] = ticket = ChannelTicket(number)
            for segment in segments:
                self.writer.lease(segment, rank)
            self._pending[rank][number] = ticket
            self._send_in_order(rank, (message, segments, ticket))

    def _numbers(self, there: Mapping[int, Any]) -> Any:
        """What a message says of numbers of rows, which may take more than it has room for."""
        payload = encode(dict(there))
        return inline(payload) if payload.nbytes <= MAX_NUMBERS_NBYTES else self._payloads.put(payload)

    def _that_fits(self, call: Call) -> Call:
        """A call that fits into one message: parts that are too large together have gone into segments."""
        n, labels = len(call.parts), [label for label, _ in call.rows]
        parts = self._that_fit([*call.parts, *(part for _, part in call.rows)], n)
        return call._replace(parts=tuple(parts[:n]), rows=tuple(zip(labels, parts[n:], strict=True)))

    def _that_fit(self, parts: Sequence[Any], n_arguments: int) -> Sequence[Any]:
        """The parts of one message; those that are too large together have gone into segments, the largest first.

        Args:
            parts: The parts.
            n_arguments: How many of them, the first ones, are not kept rows.
        """
        sizes = [0 if isinstance(part, SharedPayload) else Payload(*part).nbytes for part in parts]
        fitting = list(parts)
        while sum(sizes) > MAX_PARTS_NBYTES:
            largest = sizes.index(max(sizes))
            fitting[largest] = self._payloads.put(Payload(*parts[largest]), is_kept=largest >= n_arguments)
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
            self._channels[rank].send(message, segments)
        except BlockingIOError:
            self._poller.ask_for_room(self._channels[rank].fileno(), True)
            return False
        except Closed:
            self._read_to_the_end(rank)
        except OSError as error:
            self._drop(rank, outgoing, Failure.of(error))
        return True

    def _drop(self, rank: int, outgoing: _Outgoing, why: Failure) -> None:
        """Fail a message that was not sent and will not be: replies come in order, and none comes for this one."""
        _, segments, ticket = outgoing
        self.writer.end_leases([segment.id for segment in segments], rank)
        if ticket is not None:
            del self._pending[rank][ticket.number]
            ticket.is_dropped = True
            self._finish(ticket, why)
            self._poller.wake_if_blocked()

    def _send_queued(self) -> None:
        """Send queued messages from a thread, though no other thread may wait for anything.

        It goes on until all is replied to: a worker whose replies nobody reads stops as well.
        """
        with self.lock:
            while any(self._pending.values()) and not self._poller.is_closed:
                self._receive(self._poller.wait(None))
            self._sender = None

    def _flush(self, rank: int) -> None:
        """Send what is queued for a rank as far as it reads and replies."""
        queue = self._queues[rank]
        while queue and len(self._pending[rank]) - len(queue) < MAX_UNANSWERED:
            outgoing = queue.popleft()
            if not self._send(rank, outgoing):
                queue.appendleft(outgoing)
                break

    # --- receiving ---

    def check(self, is_thorough: bool = True) -> bool:
        """As `contract.Workers.check`: read what has arrived; a channel that was hung up tells of a death."""
        with self.lock:
            self._receive_all()
        return not self.is_stopped

    def _receive(self, ready: Sequence[Event]) -> None:
        """Take a reply from each channel that has one, and send what waits for it; they may be other threads' calls."""
        if not ready:
            return
        try:
            for fd, events in ready:
                rank = self._by_fd.get(fd)
                if rank is None or rank in self.deaths:
                    continue
                if events & HAS_ROOM:
                    self._poller.ask_for_room(fd, False)
                if events != HAS_ROOM:
                    self._receive_from(rank)
                if self._queues[rank] and rank not in self.deaths:
                    self._flush(rank)
        finally:
            self._poller.wake_if_blocked()

    def _receive_from(self, rank: int) -> None:
        """Take one reply, if there is one."""
        channel, error = self._channels[rank], None
        try:
            body = channel.receive(block=False, buffer=self._buffer)
        except Closed:
            self._note_death(rank)
            return
        except OSError as why:  # the reply came, but there was no descriptor left for what it is in
            body, error = channel.body, why
        if body is None:
            return
        kind, number = header_of(body)
        ticket = self._pending[rank].pop(number, None)
        if ticket is None:  # a worker that was interrupted as it replied has replied twice
            control_page.resume(self.processes[rank], number)
            return
        if error is not None:
            self._finish(ticket, Failure.of(error, FailureKind.UNRECEIVED))
            return
        if kind >= _TIMED:
            kind -= _TIMED
            ticket.times, body = (bytes(body[-TIMES_NBYTES:]), monotonic_ns()), body[:-TIMES_NBYTES]
        if kind == _VALUE:  # as most are
            ticket.outcome, ticket.is_done = Payload(bytes(body[HEADER_NBYTES:])), True
            if ticket.on_done is not None:
                ticket.on_done()
        else:
            self._finish_with(ticket, kind, body, channel)

    def _finish_with(self, ticket: ChannelTicket, kind: int, body: memoryview, channel: Channel) -> None:
        try:
            self._finish(ticket, read_reply(kind, body, channel))
        except BaseException as error:  # the user's exceptions may do anything when they are unpickled
            self._finish(ticket, Failure.of(error))
        if channel.has_leases:
            self._have_leases_ended()

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
                if ready := self._poller.now():
                    self._receive(ready)
                    self._poller.wake()  # a thread that waits for `arrivals` looks at what this one has taken
                self._payloads.let_go()
                has_more = [channel.tell() for rank, channel in self._channels.items() if rank not in self.deaths]
                if not (any(has_more) or self.writer.has_leases):
                    self._teller = None
                    return

    # --- interrupting ---

    def interrupt(self, tickets: Mapping[int, ChannelTicket]) -> None:
        """As `contract.Workers.interrupt`, without killing."""
        with self.lock:
            sent = {rank: ticket for rank, ticket in tickets.items() if not ticket.is_done}
            for rank, ticket in list(sent.items()):
                for outgoing in [queued for queued in self._queues[rank] if queued[2] is ticket]:
                    self._queues[rank].remove(outgoing)
                    self._drop(rank, outgoing, Failure(FailureKind.CANCELLED, "cancelled before it was sent"))
                    del sent[rank]
        for rank, ticket in sent.items():
            control_page.interrupt(self.processes[rank], ticket.number)

    def resume(self, tickets: Mapping[int, ChannelTicket]) -> None:
        """As `contract.Workers.resume`."""
        for rank, ticket in tickets.items():
            if rank not in self.deaths and not ticket.is_dropped:  # it may not have seen the last one's number yet
                control_page.resume(self.processes[rank], ticket.number)

    def stacks(self, tickets: Mapping[int, ChannelTicket]) -> dict[int, str]:
        """As `contract.Workers.stacks`."""
        queued = {rank: "" if self.is_at(rank, ticket) else QUEUED for rank, ticket in tickets.items()}
        texts = control_page.stacks([self.processes[rank] for rank in tickets])
        pids = {rank: self.processes[rank] for rank in tickets}
        return {rank: queued[rank] + texts[pid] for rank, pid in pids.items() if pid in texts}

    def is_at(self, rank: int, ticket: ChannelTicket) -> bool:
        """Whether a worker has come to a call: it replies to them in order."""
        with self.lock:
            return next(iter(self._pending.get(rank, {}).values()), None) is ticket

    # --- workers that come and go ---

    def add(self, rank: int, channel: Channel, pid: int) -> None:
        """Reach a rank by a channel from here on, in place of the one that it may have had before it died."""
        assert channel.shares_memory, "large payloads are named by their segments"
        with self.lock:
            before = self._channels.pop(rank, None)
            if before is not None:
                del self._by_fd[before.fileno()], self.processes[rank]
                before.close()
            self._channels[rank], self.processes[rank] = channel, pid
            self._by_fd[channel.fileno()] = rank
            self._pending[rank], self._queues[rank] = {}, deque()
            self._poller.watch(channel.fileno())
            self._forget_death(rank)

    def forget_death(self, rank: int) -> None:
        """There is a new worker for a rank that has died."""
        with self.lock:
            self._forget_death(rank)

    def _forget_death(self, rank: int) -> None:
        self.deaths.pop(rank, None)
        self._killed_because.pop(rank, None)

    def is_killed(self, rank: int, because: str) -> None:
        """The process of a rank is about to be killed: when its channel breaks, this is the reason."""
        self._killed_because.setdefault(rank, because)

    def note_death(self, rank: int) -> None:
        """Note the death of a rank that its channel has not told of yet, or that has no channel."""
        with self.lock:
            self._note_death(rank)

    def close_channels(self, why: str = CLOSED) -> None:
        """Hang up on every worker; threads that wait are told that the workers are gone."""
        with self.lock:
            if self.is_stopped:
                return
            self.is_stopped, self._why_closed = True, why
            self._is_over.set()
            for rank, channel in self._channels.items():
                if rank not in self.deaths:
                    self.deaths[rank] = Failure(FailureKind.DIED, why)
                    self._fail_pending(rank)
                channel.close()
            self._poller.close()
            self.writer.close()

    def _read_to_the_end(self, rank: int) -> None:
        """Take what a worker replied before it hung up."""
        n_pending = len(self._pending[rank]) + 1
        while rank not in self.deaths and len(self._pending[rank]) < n_pending:
            n_pending = len(self._pending[rank])
            self._receive([(self._channels[rank].fileno(), 0)])
        self._note_death(rank)

    def _note_death(self, rank: int) -> None:
        if rank not in self.deaths:
            failure = self._how_it_died(rank)
            if rank in self._killed_because:
                failure = replace(failure, kind=FailureKind.CANCELLED, summary=self._killed_because[rank])
            self.deaths[rank] = failure
            if rank in self._channels:
                self._poller.ignore(self._channels[rank].fileno())
                self._fail_pending(rank)

    def _fail_pending(self, rank: int) -> None:
        self.writer.forget_reader(rank)
        self._queues[rank].clear()
        while self._pending[rank]:
            _, ticket = self._pending[rank].popitem()
            self._finish(ticket, self.deaths[rank])
        self._poller.wake_if_blocked()


def _named(part: Any, segments: list[Segment]) -> Any:
    """What a message says of a part; its segment, if it has one, is added to the list."""
    if not isinstance(part, SharedPayload):
        return part
    segments.append(part.segment)
    return part.segment.id
