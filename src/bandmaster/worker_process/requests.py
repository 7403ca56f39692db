"""The requests that a worker runs beside each other, on its event loop.

::

    event loop                                                     main thread
    message of requests ──► a task for each
    message to cancel   ──► cancels that task
    any other message   ──► waits until no request runs ─────────► runs it and replies; then the event loop reads on
    replies, small ones many in one message ──► caller

One thread has the lane at a time: the event loop, while it reads; the main thread, while it runs a call that is no
request, and so runs alone. Messages behind such a call wait with it, but for those that cancel, and those for items of
generators that run: the call waits until they have ended.
"""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

from bandmaster.codec import Payload, encode
from bandmaster.contract import MORE_ITEMS, Rows
from bandmaster.errors.failure import Failure
from bandmaster.wire.lane import TELL_S, Lane
from bandmaster.wire.messages import (
    INLINE_NBYTES,
    Closed,
    MessageKind,
    ReplyKind,
    as_fit,
    header_of,
    inline,
    read_content,
    reply_message,
    several_replies,
)
from bandmaster.wire.segments import SharedPayload
from bandmaster.worker_process.executor import Executor
from bandmaster.worker_process.request_tasks import Outcome, ReceivedRequest, RequestTasks

REPLY_NBYTES = 64  # of a small reply among several, without its content
REPORT_NBYTES = 16 * 1024  # of a report, also of many roles
_Reply = tuple[int, int, Any]  # a small one: number, kind, and what the kind says


class Requests:
    """The requests of the caller at the other end of a lane, and the messages that wait for them.

    Args:
        lane: The lane.
        executor: Runs the calls.
    """

    def __init__(self, lane: Lane, executor: Executor) -> None:
        self._lane, self._executor, self._loop = lane, executor, executor.event_loop().loop
        self._tasks = RequestTasks(executor, self._ended)
        self._is_reading = False  # whether the event loop has the lane
        self._handed: SimpleQueue[memoryview | Closed] = SimpleQueue()  # to the main thread, with the lane
        self._aside: deque[Any] = deque()  # messages that wait until no request runs
        self._given_up: set[int] = set()  # requests that were cancelled, perhaps among these
        self._replies: list[_Reply] = []  # that have not been sent
        self._unsent: deque[Callable[[], object]] = deque()  # what sends the others, once the caller reads
        self._is_telling = False

    # --- the main thread ---

    def next_message(self) -> memoryview:
        """Let the event loop read, and wait for the next message that is for no request and may begin.

        Raises:
            Closed: The other end is gone.
        """
        self._loop.call_soon_threadsafe(self._read_on)
        handed = self._handed.get()
        if isinstance(handed, Closed):
            raise handed
        return handed

    # --- reading, on the event loop ---

    def take(self, message: memoryview) -> None:
        """Start the requests of a message. The main thread takes the first message, when the event loop reads none."""
        unpack = self._lane.unpack
        requests = [
            ReceivedRequest(number, method, how, unpack(part)) for number, method, how, part in read_content(message)
        ]
        self._tasks.start(requests, frozenset(self._given_up))
        self._lane.body = None

    def _read_on(self) -> None:
        if self._is_reading or not self._handed.empty():  # a signal handler has raised in the main thread
            return
        self._is_reading = True
        self._loop.add_reader(self._lane.fileno(), self._read)
        self._go_on()

    def _read(self) -> None:
        lane = self._lane
        try:
            while self._is_reading and (message := lane.receive(block=False)) is not None:
                kind = header_of(message)[0]
                if kind == MessageKind.CANCEL:
                    self._cancel(read_content(message))
                elif kind == MessageKind.REQUESTS and not (self._aside and read_content(message)[0][1] != MORE_ITEMS):
                    self.take(message)
                elif self._aside or not self._tasks.is_idle:
                    self._aside.append(lane.set_aside())
                else:
                    self._hand(message)
        except Closed as closed:
            self._hand(closed)
        if lane.has_leases and not self._is_telling:
            self._is_telling = True
            self._loop.call_later(TELL_S, self._tell)

    def _cancel(self, numbers: Any) -> None:
        self._tasks.cancel(numbers)
        if self._aside:  # they may be among these
            self._given_up.update(numbers)
        self._lane.body = None

    def _go_on(self) -> None:
        """Take up what was set aside, as far as it may begin."""
        while self._aside and self._is_reading:
            is_request = header_of(self._aside[0][0])[0] == MessageKind.REQUESTS
            if not (is_request or self._tasks.is_idle):
                return
            message = self._lane.take_up(self._aside.popleft())
            if is_request:
                self.take(message)
            else:
                self._hand(message)
        if not self._aside:
            self._given_up.clear()

    def _hand(self, message: memoryview | Closed) -> None:
        """Give the lane to the main thread, with the message that it runs."""
        self._loop.remove_reader(self._lane.fileno())
        self._is_reading = False
        self._handed.put(message)

    def _tell(self) -> None:
        """Tell of leases that have ended, as long as there are any."""
        self._is_telling = self._lane.has_leases
        if self._is_telling:
            if self._is_reading:
                self._lane.tell()
            self._loop.call_later(TELL_S, self._tell)

    # --- replies, on the event loop ---

    def _ended(self, number: int, outcome: Outcome) -> None:
        n_before = len(self._replies)
        if (reports := self._executor.new_reports()) is not None:
            self._replies.append((0, ReplyKind.REPORT, reports))
        if isinstance(outcome, Payload) and not outcome.buffers and len(outcome.head) <= INLINE_NBYTES:
            self._replies.append((number, ReplyKind.VALUE, outcome.head))
        elif outcome is None:
            self._replies.append((number, ReplyKind.NOTHING, None))
        elif isinstance(outcome, Failure) and (encoded := encode(outcome)).nbytes <= INLINE_NBYTES:
            self._replies.append((number, ReplyKind.FAILURE, inline(encoded)))
        else:
            self._unsent.append(partial(self._send_large, number, outcome))
            self._loop.call_soon(self._send_rest)
        if self._replies and not n_before:
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Send the replies of the requests that have ended in this round of the event loop."""
        replies, self._replies = self._replies, []
        self._unsent.extend(partial(self._send_several, some) for some in as_fit(replies, _nbytes_of))
        self._send_rest()

    def _send_rest(self) -> None:
        """Send replies, as far as the caller reads."""
        fd = self._lane.fileno()
        while self._unsent:
            try:
                self._unsent[0]()
            except BlockingIOError:
                self._loop.add_writer(fd, self._send_rest)
                return
            except (OSError, Closed):  # the caller is gone, as the next read tells
                pass
            self._unsent.popleft()
        self._loop.remove_writer(fd)
        self._go_on()

    def _send_several(self, replies: Sequence[_Reply]) -> None:
        self._lane.send_beside(several_replies(replies))
        self._tasks.count(len([kind for _, kind, _ in replies if kind != ReplyKind.REPORT]))

    def _send_large(self, number: int, outcome: Outcome) -> None:
        if not select.select((), (self._lane.fileno(),), (), 0)[1]:
            raise BlockingIOError
        reply(self._lane, number, [outcome])
        self._tasks.count(1)


def _nbytes_of(small: _Reply) -> int:
    """The size of a reply among several, at most."""
    content = small[2]
    if small[1] == ReplyKind.REPORT:
        return REPORT_NBYTES
    if isinstance(content, bytes):
        return REPLY_NBYTES + len(content)
    return REPLY_NBYTES + (INLINE_NBYTES if content else 0)


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
