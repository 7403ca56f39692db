"""The loop in a worker's process: read a message, do what it says, reply. It blocks in the kernel and never spins."""

from __future__ import annotations

import logging
import math
import os
import pickle
import time
from typing import Any

from bandmaster.codec import Payload, encode
from bandmaster.failure import Failure
from bandmaster.transport.channel import INLINE_NBYTES, Closed
from bandmaster.transport.lane import LENGTH_NBYTES, Lane
from bandmaster.transport.messages import HEADER_NBYTES, Kind, ReplyKind, header_of, read_call, reply_message
from bandmaster.transport.segments import OWNER, Segment
from bandmaster.worker_process.control_page import ControlPage
from bandmaster.worker_process.executor import Executor

__all__ = ["serve"]

_log = logging.getLogger(__name__)


def serve(
    lane: Lane,
    executor: Executor,
    page: ControlPage,
    patience_s: float | None = None,
    most_s: float = math.inf,
    most_nbytes: float = math.inf,
) -> bool:
    """Reply to messages until the controller is gone or pauses the lane, or one of the limits is reached.

    Args:
        lane: The lane to the controller.
        executor: Runs the calls.
        page: The control page of this worker.
        patience_s: How long to wait for a message; for ever by default.
        most_s: For how long to begin with new messages; for ever by default.
        most_nbytes: After how many bytes of messages to begin with no new one; never by default.

    Returns:
        Whether there may be more messages: a limit was reached.
    """
    deadline = math.inf if most_s == math.inf else time.monotonic() + most_s
    lane.wait_at_most(patience_s)
    return _Loop(lane, executor, page, deadline, most_nbytes).run()


class _Loop:
    """Reads messages, has them done, and replies to each exactly once, though signal handlers may raise at any moment.

    An exception of a handler fails the call that is being run or replied to; between calls it is logged. The body of
    the lane is that of the message that has not been replied to, None between calls.
    """

    def __init__(self, lane: Lane, executor: Executor, page: ControlPage, deadline: float, most_nbytes: float) -> None:
        self._lane, self._executor, self._page = lane, executor, page
        self._deadline, self._most_nbytes = deadline, most_nbytes
        self._error: BaseException | None = None  # raised outside of a method, and not dealt with yet

    def run(self) -> bool:
        """As `serve`."""
        self._lane.body = None
        while True:
            try:
                while True:  # twice, as an exception can also come where a loop goes back to its beginning
                    try:
                        return self._run()
                    except Closed:
                        return False
                    except (Exception, KeyboardInterrupt) as error:
                        self._page.running = 0  # and no call, in which another exception might come
                        self._error = error
            except (Exception, KeyboardInterrupt) as error:
                self._error = error

    def _run(self) -> bool:
        lane, executor, page, deadline = self._lane, self._executor, self._page, self._deadline
        if self._error is not None:
            self._reply_with_the_error()
        while self._most_nbytes > 0 and (deadline == math.inf or time.monotonic() < deadline):
            message = lane.receive()
            if message is None:
                break
            kind, number = header_of(message)
            self._most_nbytes -= LENGTH_NBYTES + len(message)
            if kind == Kind.PAUSE:
                return False
            if kind == Kind.ENVIRONMENT:
                os.environ.update(pickle.loads(message[HEADER_NBYTES:]))
                lane.body = None
                continue
            page.begin(number)
            outcome = executor.call(*read_call(kind, message, lane))
            page.end()
            if type(outcome) is Payload and not outcome.buffers and len(outcome.head) <= INLINE_NBYTES:
                lane.send(reply_message(number, ReplyKind.VALUE, outcome.head))  # as most are
            else:
                outcomes = [outcome]
                del outcome  # so that the segments in which it lies are given back with the reply
                _reply(lane, number, outcomes)
            lane.body = None
        return True

    def _reply_with_the_error(self) -> None:
        """Fail the call that an error concerns: it was cancelled, or there is no room for what came with it, say."""
        error, self._error = self._error, None
        assert error is not None, "the caller has looked"
        if self._lane.body is None:
            _log.warning("a signal handler raised while no call was running, which is ignored", exc_info=error)
        else:
            number = header_of(self._lane.body)[1]
            _reply(self._lane, number, [self._executor.failure(error)])
            self._lane.body = None


def _reply(lane: Lane, number: int, outcomes: list[Payload | Failure | None]) -> None:
    """Send the one outcome, and take it out of the list.

    If a signal handler raises as it has been sent, its call is replied to again. The controller takes the first reply.
    """
    kind, content, segments = _packed(lane, outcomes.pop())
    lane.lease(segments)
    try:
        lane.send(reply_message(number, kind, content), segments)
    except OSError as error:  # too many descriptors are on their way, say
        lane.end_leases(segments)
        kind, content, _ = _packed(lane, Failure.of(error))
        lane.send(reply_message(number, kind, content))
    for segment in segments:
        lane.writer.end_leases([segment.id], OWNER)


def _packed(lane: Lane, outcome: Payload | Failure | None) -> tuple[int, Any, list[Segment]]:
    """Kind and content of a reply, and the segments that it names. Arguments and outcome are gone when it is sent, so
    that segments in which they lay are given back with it."""
    if outcome is None:
        return ReplyKind.NOTHING, None, []
    if isinstance(outcome, Payload):
        try:
            return ReplyKind.PART, *lane.pack(outcome)
        except OSError as error:
            outcome = Failure.of(error)
    return ReplyKind.FAILURE, *lane.pack(encode(outcome))
