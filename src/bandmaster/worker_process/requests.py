"""The requests that a worker runs beside each other, on its event loop.

::

    main thread                                                     event loop
    message of requests ──► RequestTasks.start ──────────────────► a task for each
    message to cancel   ──► RequestTasks.cancel ─────────────────► that task
    other messages wait until no request runs                       small replies, many in one message ──► caller
    large replies ◄────────────────────────────────────────────────

A call that is no request runs alone: the main thread sets its message aside, and those behind it, until the requests
before it have ended. It reads on meanwhile, as one of these may have to be cancelled.
"""

from __future__ import annotations

import os
import select
from collections import deque
from collections.abc import Sequence
from typing import Any

from bandmaster.codec import Payload, encode
from bandmaster.contract import Rows
from bandmaster.errors.failure import Failure
from bandmaster.wire.lane import TELL_S, Lane
from bandmaster.wire.messages import (
    INLINE_NBYTES,
    MAX_PARTS_NBYTES,
    MessageKind,
    ReplyKind,
    header_of,
    inline,
    read_content,
    reply_message,
    several_replies,
)
from bandmaster.wire.segments import SharedPayload
from bandmaster.worker_process.executor import Executor
from bandmaster.worker_process.request_tasks import Outcome, Request, RequestTasks


class Requests:
    """The requests of the caller at the other end of a lane, and the messages that wait for them.

    Args:
        lane: The lane.
        executor: Runs the calls.
    """

    def __init__(self, lane: Lane, executor: Executor) -> None:
        self._lane, self._loop = lane, executor.event_loop()
        self._tasks = RequestTasks(executor, self._ended)
        self._aside: deque[Any] = deque()  # messages that wait until no request runs
        self._given_up: set[int] = set()  # requests that were cancelled, perhaps among these
        self._replies: list[tuple[int, int, Any]] = []  # that have not been sent
        self._large: deque[tuple[int, Outcome]] = deque()  # replies that the main thread sends
        self._unsent: deque[bytes] = deque()  # messages that found the lane full
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        for fd in (lane.fileno(), self._wake):
            self._poll.register(fd, select.POLLIN)

    # --- the main thread ---

    def next_message(self) -> memoryview:
        """Wait for the next message that is for no request, and for the end of the requests before it."""
        lane = self._lane
        while True:
            self._send_rest()
            if self._aside and (self._tasks.is_idle or header_of(self._aside[0][0])[0] == MessageKind.REQUESTS):
                body = lane.take_up(self._aside.popleft())
                if header_of(body)[0] != MessageKind.REQUESTS:
                    return body
                self.take(body)
                lane.body = None
                continue
            if not self._aside:
                self._given_up.clear()
            self._poll.poll(TELL_S * 1000 if lane.has_leases else None)
            message = lane.receive(block=False)
            if message is None:
                if lane.has_leases:
                    lane.tell()
                continue
            kind = header_of(message)[0]
            if kind == MessageKind.CANCEL:
                self._cancel(read_content(message))
            elif self._aside or (kind != MessageKind.REQUESTS and not self._tasks.is_idle):
                self._aside.append(lane.set_aside())
            elif kind == MessageKind.REQUESTS:
                self.take(message)
            else:
                return message
            lane.body = None

    def take(self, message: memoryview) -> None:
        """Start the requests of a message."""
        unpack = self._lane.unpack
        requests = [Request(number, method, how, unpack(part)) for number, method, how, part in read_content(message)]
        self._tasks.start(requests, frozenset(self._given_up))

    def _cancel(self, numbers: Sequence[int]) -> None:
        self._tasks.cancel(numbers)
        if self._aside:  # they may be among these
            self._given_up.update(numbers)

    def _send_rest(self) -> None:
        """Send the replies that the event loop cannot send."""
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return
        while self._unsent:
            self._lane.send(self._unsent.popleft())
        while self._large:
            number, outcome = self._large.popleft()
            reply(self._lane, number, [outcome])
            self._loop.call_soon(self._count, 1)

    # --- the event loop ---

    def _ended(self, number: int, outcome: Outcome) -> None:
        if isinstance(outcome, Payload) and not outcome.buffers and len(outcome.head) <= INLINE_NBYTES:
            self._replies.append((number, ReplyKind.VALUE, outcome.head))
        elif outcome is None:
            self._replies.append((number, ReplyKind.NOTHING, None))
        elif isinstance(outcome, Failure) and (encoded := encode(outcome)).nbytes <= INLINE_NBYTES:
            self._replies.append((number, ReplyKind.FAILURE, inline(encoded)))
        else:
            self._large.append((number, outcome))
            os.eventfd_write(self._wake, 1)
            return
        if len(self._replies) == 1:
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Send the replies of the requests that have ended in this round of the event loop."""
        replies, self._replies = self._replies, []
        start = nbytes = 0
        for at, (_, _, content) in enumerate(replies):
            more = 64 + (0 if content is None else len(content) if isinstance(content, bytes) else INLINE_NBYTES)
            if nbytes and nbytes + more > MAX_PARTS_NBYTES:
                self._send(several_replies(replies[start:at]))
                start, nbytes = at, 0
            nbytes += more
        self._send(several_replies(replies[start:]))
        self._count(len(replies))

    def _count(self, n: int) -> None:
        self._tasks.count(n)
        if self._aside and self._tasks.is_idle:
            os.eventfd_write(self._wake, 1)

    def _send(self, message: bytes) -> None:
        try:
            self._lane.send_beside(message)
        except BlockingIOError:
            self._unsent.append(message)
            os.eventfd_write(self._wake, 1)
        except OSError:  # the caller is gone, which the main thread notices
            pass


def reply(lane: Lane, number: int, outcomes: list[Payload | Rows | Failure | None], times: bytes | None = None) -> None:
    """Remove the only outcome from the list and send it.

    If a signal handler raises just after the reply was sent, the call is replied to again. The controller uses the
    first reply.
    """
    kind, content, shared = _packed(lane, outcomes.pop())
    segments = [] if shared is None else [shared.segment]
    lane.lease(segments)
    try:
        lane.send(reply_message(number, kind, content, times), segments)
    except OSError as error:  # for example, too many descriptors are in flight
        lane.end_leases(segments)
        kind, content, _ = _packed(lane, Failure.of(error))
        lane.send(reply_message(number, kind, content))
    del shared
    lane.writer.release()


def _packed(lane: Lane, outcome: Payload | Rows | Failure | None) -> tuple[int, Any, SharedPayload | None]:
    """Kind and content of the reply with an outcome, and the owner of the segment that it names.

    The caller keeps no reference to the arguments or the outcome, so that leases on their segments end with the reply.
    """
    if outcome is None:
        return ReplyKind.NOTHING, None, None
    if isinstance(outcome, Payload | Rows):
        try:
            if isinstance(outcome, Rows):
                part, shared = lane.pack(outcome.payload, is_kept=True)
                return ReplyKind.ROWS, (part, tuple(outcome.facts)), shared
            return ReplyKind.PART, *lane.pack(outcome)
        except OSError as error:
            outcome = Failure.of(error)
    return ReplyKind.FAILURE, *lane.pack(encode(outcome))
