"""The loop in a worker's process: it reads a message, runs the call and replies. It blocks and never spins.

What runs requests beside each other reads calls and replies to them by the functions of this module, too.
"""

from __future__ import annotations

import logging
import os
import pickle
import select
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from bandmaster.codec import Payload, decode, encode
from bandmaster.contract import Report, Rows
from bandmaster.errors.failure import Failure
from bandmaster.wire.lane import TELL_S, Lane
from bandmaster.wire.messages import (
    APART,
    INLINE_NBYTES,
    CallContent,
    Closed,
    MessageKind,
    ReplyKind,
    header_of,
    inline,
    read_content,
    read_small_call,
    reply_message,
)
from bandmaster.wire.segment_reader import NO_ROWS, RowReader, RowReaders
from bandmaster.wire.segments import SharedPayload
from bandmaster.wire.status_page import StatusPage
from bandmaster.worker_process.executor import Executor

FENCE_LOOK_S, FENCE_MOST_S = 0.001, 0.05  # between two looks whether the worker may go on, at first and at most
_log = logging.getLogger(__name__)


class AnswersRequests(Protocol):
    """The requests of callers that run beside each other, from when there was one; they say which message is next."""

    def take(self, message: memoryview) -> None:
        """Take the first message with requests or a caller."""

    def next_message(self) -> tuple[Lane, memoryview]:
        """Wait for the next message that is for no request, and may begin; and its lane."""


class Loop:
    """Reads messages, runs their calls and replies to each, although signal handlers may raise at any moment.

    The exception of a handler fails the call that is running or being replied to; between calls it is logged.
    ``lane.body`` is the body of the message that has no reply yet, None between calls.

    Attributes:
        lane: The lane that the last message came by: that of the controller, or of a worker that calls this one.

    Args:
        lane: The lane to the controller.
        executor: Runs the calls.
        page: The status page of this worker.
        answers: Makes what answers requests, if this worker may get any.
    """

    def __init__(
        self,
        lane: Lane,
        executor: Executor,
        page: StatusPage,
        answers: Callable[[Executor, Lane], AnswersRequests] | None = None,
    ) -> None:
        self.lane, self._executor, self._page = lane, executor, page
        self._controller = lane
        self._error: BaseException | None = None  # raised outside of a method, and not handled yet
        self._failed = 0  # number of a failed call that other ranks may still run
        self._answers = answers
        self._requests: AnswersRequests | None = None  # once there was one

    def run(self) -> bool:
        """Serve the lane until the controller closes or pauses it.

        Returns:
            True if `next_message` ended it, so that more messages may arrive; False if the lane was closed or paused.
        """
        self.lane.body = None
        return self._guarded(2)

    def _guarded(self, depth: int) -> bool:
        """Serve the lane, also if a signal handler raises, and if others do while the error of the first is noted."""
        while True:
            try:
                return self._guarded(depth - 1) if depth else self._run()
            except Closed:
                if self.lane is self._controller:
                    return False
                self.lane = self._controller  # the requests hang up on the other caller
            except (Exception, KeyboardInterrupt) as error:
                self._page.running = 0  # a plain assignment: a call could be interrupted by another exception
                self._error = error

    def next_message(self) -> memoryview | None:
        """Wait for the next message; None ends `run`."""
        if self._requests is not None:
            self.lane = self._controller  # at whose end this ends
            self.lane, handed = self._requests.next_message()
            return handed
        lane = self.lane
        while True:
            lane.wait_at_most(TELL_S if lane.has_leases else None)
            message = lane.receive()
            if message is not None:
                return message
            lane.tell()

    def _run(self) -> bool:
        executor = self._executor
        if self._error is not None:
            self._reply_with_the_error()
        if self._failed:
            self._wait_at_the_fence()
        while (message := self.next_message()) is not None:
            lane = self.lane
            kind, number = header_of(message)
            if kind == MessageKind.PAUSE:
                return False
            if kind in (MessageKind.REQUESTS, MessageKind.CALLER):
                assert self._answers is not None, "nobody sends requests to verl's workers"
                self._requests = self._answers(executor, lane)
                self._requests.take(message)
                continue
            if kind == MessageKind.ENVIRONMENT:
                os.environ.update(read_content(message))
                lane.body = None
                continue
            outcome = self._called(kind, number, message)
            times = executor.times
            if (reports := new_reports(executor, lane)) is not None:
                lane.send(reply_message(0, ReplyKind.REPORT, reports))
            if type(outcome) is Payload and not outcome.buffers and len(outcome.head) <= INLINE_NBYTES:
                lane.send(reply_message(number, ReplyKind.VALUE, outcome.head, times))  # the common case
            else:
                if kind >= MessageKind.FENCED and type(outcome) is Failure and executor.worker is not None:
                    self._failed = number  # else nobody may know that this worker, not that before it, got the call
                outcomes = [outcome]
                del outcome  # so that the leases on its segments end with the reply
                reply(lane, number, outcomes, times)
                if self._failed:
                    lane.body = None
                    self._wait_at_the_fence()
            lane.body = None
        return True

    def _called(self, kind: int, number: int, message: memoryview) -> Payload | Rows | Failure | None:
        """Run a call. It can be interrupted once its parts are claimed, so that no lease on a segment is lost."""
        parts: Sequence[Payload] | memoryview
        readers = NO_ROWS
        if kind & MessageKind.CALL:
            method, reply, parts, readers = claimed(self.lane, read_content(message), {})
        else:
            method, reply, parts = read_small_call(message)
        self._page.begin(number)
        outcomes = [self._executor.call(method, reply, parts, readers, kind & MessageKind.TIMED != 0)]
        self._page.end()
        return outcomes.pop()  # the error of a failure refers to this frame

    def _reply_with_the_error(self) -> None:
        """Fail the call, or all requests of the message, during which an error was raised.

        For example, it was interrupted, memory ran out, or there is no descriptor for the event loop of requests.
        """
        error, self._error = self._error, None
        self._executor.activity.end()
        assert error is not None, "the caller has looked"
        if self.lane.body is None:
            _log.warning("ignored an exception that a signal handler raised while no call was running", exc_info=error)
        else:
            kind, number = header_of(self.lane.body)
            if kind >= MessageKind.FENCED:
                self._failed = number
            if kind == MessageKind.CALLER and (caller := self.lane.new_caller()) is not None:
                caller.hang_up()
            failure = self._executor.failure(error)
            is_unserved = kind == MessageKind.REQUESTS and self._requests is None
            numbers = [one[0] for one in read_content(self.lane.body)] if is_unserved else [number]
            for failed in numbers:
                reply(self.lane, failed, [failure])
            self.lane.body = None

    def _wait_at_the_fence(self) -> None:
        """Wait until all ranks have ended a call that has failed here, lest the collectives of two calls meet.

        This looks again and again: it happens after failures only, and a signal that comes between a look and a wait
        would be missed.
        """
        hung_up = select.poll()
        hung_up.register(self.lane.fileno(), 0)
        look_s = FENCE_LOOK_S
        while not self._page.is_resumed(self._failed):
            if hung_up.poll(look_s * 1000):
                raise Closed
            look_s = min(2 * look_s, FENCE_MOST_S)
        self._failed = 0


def claimed(lane: Lane, content: CallContent, leases: dict[int, Any]) -> tuple[str, int, list[Payload], RowReaders]:
    """Read a call: method, reply, the parts in memory of this process, and what reads the kept rows.

    Args:
        lane: The lane that the call has come by.
        content: The call.
        leases: Those on kept segments that calls of the same message have read before, to which its own are added.

    Raises:
        OSError: A segment cannot be opened here.
    """
    method, reply, parts, rows, present = content
    if rows and rows[0][0] == APART:
        more, small, present = pickle.loads(lane.unpack(rows[0][1]).head)
        parts, rows = [*parts, *more], [*rows[1:], *small]
    known = {} if present is None else decode(lane.unpack(present))
    readers: dict[int, RowReader] = {}
    for label, part in rows:
        if type(part) is tuple:
            readers[label] = RowReader(Payload(*part).private, present=known.get(label))
            continue
        if part not in leases:
            leases[part] = lane.claim(part)
        lease = leases[part]
        readers[label] = RowReader(lease.payload, lease.file, known.get(label))
    return method, reply, list(map(lane.unpack, parts)), readers or NO_ROWS


def new_reports(executor: Executor, lane: Lane) -> Mapping[str, Report] | None:
    """The reports of the worker; None if the other end of a lane has them already."""
    reports = executor.reports
    if reports == lane.reported:
        return None
    lane.reported = reports
    return reports


def reply(
    lane: Lane, number: int, outcomes: list[Payload | Rows | Failure | None], times: bytes | None = None, flags: int = 0
) -> None:
    """Remove the only outcome from the list and send it; as an item, if the flags are `ReplyKind.ITEM`.

    If a signal handler raises just after the reply was sent, the call is replied to again. The controller uses the
    first reply.
    """
    kind, content, shared = _packed(lane, outcomes.pop())
    segments = [one.segment for one in shared if one is not None]
    lane.lease(segments)
    try:
        lane.send(reply_message(number, kind | flags, content, times), segments)
    except OSError as error:  # for example, too many descriptors are in flight
        lane.end_leases(segments)
        kind, content, _ = _packed(lane, Failure.of(error))
        lane.send(reply_message(number, kind | flags, content))
    del shared
    lane.writer.release()


def _packed(lane: Lane, outcome: Payload | Rows | Failure | None) -> tuple[int, Any, Sequence[SharedPayload | None]]:
    """Kind and content of the reply with an outcome, and the owners of the segments that it names.

    The caller keeps no reference to the arguments or the outcome, so that leases on their segments end with the reply.
    """
    if outcome is None:
        return ReplyKind.NOTHING, None, ()
    try:
        if isinstance(outcome, Rows):
            part, shared = lane.pack(outcome.payload, is_kept=True)
            facts, facts_shared = lane.pack(encode(outcome.facts.plain))
            return ReplyKind.ROWS, (part, facts), (shared, facts_shared)
        if isinstance(outcome, Payload):
            part, shared = lane.pack(outcome)
            return ReplyKind.PART, part, (shared,)
        part, shared = lane.pack(encode(outcome))
        return ReplyKind.FAILURE, part, (shared,)
    except OSError as error:  # there is no memory or no descriptor for a segment
        failure = outcome.shortened(error) if isinstance(outcome, Failure) else Failure.of(error)
    return ReplyKind.FAILURE, inline(encode(failure)), ()
