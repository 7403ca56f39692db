"""The requests that a worker runs beside each other, on its event loop.

::

    event loop                                                     main thread
    message of requests ──► a task for each
    message to cancel   ──► cancels that task
    any other message   ──► waits until no request runs ─────────► runs it and replies; then the event loop reads on
    replies and items, small ones many in one message ──► the caller

One thread has the lanes at a time: the event loop, while it reads; the main thread, while it runs a call that is no
request, and so runs alone. Messages behind such a call wait with it, those of other callers too, but for those that
cancel, and those that requests which run wait for: the call waits until they have ended. Each caller has a lane of its
own: the controller from the start, and workers that were given the group.
"""

from __future__ import annotations

import math
import select
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from queue import SimpleQueue
from typing import Any

from bandmaster.answering.request_tasks import Outcome, ReceivedRequest, RequestTasks
from bandmaster.codec import Payload
from bandmaster.contract import CALLS_BACK, MORE_ITEMS, Rows
from bandmaster.wire.lane import TELL_S, Lane
from bandmaster.wire.messages import (
    Closed,
    MessageKind,
    ReplyKind,
    SmallReply,
    as_fit,
    header_of,
    read_content,
    reply_message,
    small_reply,
)
from bandmaster.worker_process.executor import Executor
from bandmaster.worker_process.loop import claimed, new_reports, reply

REPLY_NBYTES = 96  # of a small reply among several, without its content
REPORT_NBYTES = 16 * 1024  # of a report, also of many roles
_Handed = tuple[Lane, memoryview | Closed]


class Requests:
    """The requests of callers, and the messages that wait for them.

    Attributes:
        executor: Runs the calls.
        loop: The event loop.
        is_reading: Whether it has the lanes.

    Args:
        executor: Runs the calls.
        lane: The lane of the controller, from which the main thread gets the messages that are for no request; None
            where there is no such thread, and so no such message.
    """

    def __init__(self, executor: Executor, lane: Lane | None = None) -> None:
        self.executor, self.loop = executor, executor.event_loop().loop
        self._tasks = RequestTasks(executor, self._ended, self._made)
        self.is_reading = lane is None
        self._handed: SimpleQueue[_Handed] = SimpleQueue()  # to the main thread, with the lanes
        self._aside: deque[tuple[_Caller, Any]] = deque()  # messages that wait until no request runs
        self._given_up: set[int] = set()  # requests that were cancelled, perhaps among these
        self._news: Mapping[str, tuple[int | None, bool]] = {}  # that the callers were told of
        self._callers: list[_Caller] = []
        self._n_ended = 0  # requests that have ended, and are not counted as such
        self._controller = None if lane is None else self._added(lane)

    # --- the main thread ---

    def next_message(self) -> tuple[Lane, memoryview]:
        """Let the event loop read, and wait for the next message that is for no request and may begin; and its lane.

        Raises:
            Closed: The controller is gone.
        """
        self.loop.call_soon_threadsafe(self._read_on)
        lane, handed = self._handed.get()
        if isinstance(handed, Closed):
            raise handed
        return lane, handed

    def take(self, message: memoryview) -> None:
        """Take a message with requests or a caller. The main thread takes the first: the event loop reads none."""
        assert self._controller is not None, "the main thread has its lane"
        self._take(self._controller, message)

    def add(self, lane: Lane) -> None:
        """Serve one more caller. The event loop calls this while it has the lanes, and else the main thread."""
        caller = self._added(lane)
        self.loop.call_soon_threadsafe(caller.report)
        if self.is_reading:
            self.loop.add_reader(lane.fileno(), self._read, caller)

    def _added(self, lane: Lane) -> _Caller:
        caller = _Caller(lane, self)
        self._callers.append(caller)
        return caller

    # --- reading, on the event loop ---

    def close(self) -> None:
        """Hang up on all callers."""
        for caller in list(self._callers):
            self._drop(caller)

    def _take(self, caller: _Caller, message: memoryview) -> None:
        lane = caller.lane
        if header_of(message)[0] == MessageKind.CALLER:
            if (new := lane.new_caller()) is not None:
                self.add(new)
        else:
            leases: dict[int, Any] = {}
            requests = []
            for number, content, is_timed in read_content(message):
                try:
                    requests.append(ReceivedRequest(number, *claimed(lane, content, leases), is_timed, caller))
                except OSError as error:  # a segment cannot be opened
                    requests.append(ReceivedRequest(number, content[0], content[1], error, caller=caller))
            self._tasks.start(requests, frozenset(self._given_up))
        lane.body = None

    def _read_on(self) -> None:
        if self.is_reading or not self._handed.empty():  # a signal handler has raised in the main thread
            return
        self.is_reading = True
        for caller in self._callers:
            self.loop.add_reader(caller.lane.fileno(), self._read, caller)
        self._tell_news()  # of the call that the main thread has run
        for caller in list(self._callers) if self._aside else ():  # meanwhile, some of these may have been cancelled
            self._read(caller)
        self.go_on()

    def _read(self, caller: _Caller) -> None:
        lane = caller.lane
        try:
            while self.is_reading and (message := lane.receive(block=False)) is not None:
                kind = header_of(message)[0]
                if kind == MessageKind.CANCEL:
                    self._cancel(caller, read_content(message))
                elif kind == MessageKind.CALLER or (kind == MessageKind.REQUESTS and self._may_begin(message)):
                    self._take(caller, message)
                elif self._aside or not self._may_run_alone(caller):
                    self._aside.append((caller, lane.set_aside()))
                else:
                    self._hand(lane, message)
        except Closed as closed:
            if caller is self._controller:
                self._hand(lane, closed)
            else:
                self._drop(caller)
            return
        caller.tell_of_leases()

    def _may_begin(self, message: memoryview) -> bool:
        """Whether requests may begin, as none waits before them, or as requests that run wait for them."""
        method = "" if not self._aside else read_content(message)[0][1][0]
        return not self._aside or method == MORE_ITEMS or method.startswith(CALLS_BACK)

    def _may_run_alone(self, caller: _Caller) -> bool:
        """Whether no request runs, and the lane of a caller is free for the main thread."""
        return self._tasks.is_idle and caller.has_all_replies

    def _cancel(self, caller: _Caller, numbers: Any) -> None:
        self._tasks.cancel(numbers)
        if self._aside:  # they may be among these
            self._given_up.update(numbers)
        caller.lane.body = None

    def _drop(self, caller: _Caller) -> None:
        """Hang up on a caller that is gone, and cancel its requests."""
        self._callers.remove(caller)
        self._aside = deque([aside for aside in self._aside if aside[0] is not caller])
        caller.close()
        self._tasks.cancel(self._tasks.numbers_of(caller))
        self.go_on()

    def go_on(self) -> None:
        """Count the requests that have ended, and take up what was set aside, as far as it may begin."""
        if self._n_ended:
            n, self._n_ended = self._n_ended, 0
            self._tasks.count(n)
            self._tell_news()
        while self._aside and self.is_reading:
            caller, (body, _) = self._aside[0]
            is_request = header_of(body)[0] == MessageKind.REQUESTS
            if not (is_request or self._may_run_alone(caller)):
                return
            message = caller.lane.take_up(self._aside.popleft()[1])
            if is_request:
                self._take(caller, message)
            else:
                self._hand(caller.lane, message)
        if not self._aside:
            self._given_up.clear()

    def _hand(self, lane: Lane, message: memoryview | Closed) -> None:
        """Give the lanes to the main thread, with the message that it runs."""
        for caller in self._callers:
            self.loop.remove_reader(caller.lane.fileno())
        self.is_reading = False
        self._handed.put((lane, message))

    # --- replies, on the event loop ---

    def _ended(self, request: ReceivedRequest, outcome: Outcome, times: bytes | None) -> None:
        self._n_ended += 1
        request.caller.reply(request.number, outcome, times)

    def _made(self, request: ReceivedRequest, item: Payload) -> None:
        request.caller.reply(request.number, item, None, ReplyKind.ITEM)

    def _tell_news(self) -> None:
        """Tell all callers of a new version, or that the worker answers again: requests that wait may be for it.

        Else the load goes along with replies.
        """
        news = {role: (report.version, report.load == math.inf) for role, report in self.executor.reports.items()}
        if news != self._news:
            self._news = news
            for caller in self._callers:
                caller.report()


class _Caller:
    """One caller of a worker, on its event loop: its lane, and the replies to its requests that were not sent.

    Args:
        lane: The lane.
        requests: The requests of all callers.
    """

    def __init__(self, lane: Lane, requests: Requests) -> None:
        self.lane, self._requests, self._loop = lane, requests, requests.loop
        self._replies: list[SmallReply] = []
        self._unsent: deque[Callable[[], object]] = deque()  # what sends the others, once the caller reads
        self._is_telling = self._is_gone = False

    @property
    def has_all_replies(self) -> bool:
        """Whether all replies were sent."""
        return not (self._replies or self._unsent)

    def report(self) -> None:
        """Tell the caller soon what the worker has reported, unless it knows."""
        if (reports := new_reports(self._requests.executor, self.lane)) is not None:
            self._add(0, ReplyKind.REPORT, reports, None)

    def reply(self, number: int, outcome: Outcome, times: bytes | None, flags: int = 0) -> None:
        """Reply to a request soon: small replies of one round of the event loop go in one message.

        Args:
            number: Number of the request.
            outcome: Its outcome, or an item.
            times: The times of a request that was timed.
            flags: `ReplyKind.ITEM` for an item.
        """
        if (small := small_reply(outcome)) is not None:
            self._add(number, small[0] | flags, small[1], times)
        else:
            self._queue()  # first: items come in their order
            self._unsent.append(partial(self._send_large, number, outcome, times, flags))
            self._send_rest()
            if self._unsent and isinstance(outcome, Payload | Rows):  # it may change until the caller reads
                self._unsent[-1] = partial(self._send_large, number, outcome.private(), times, flags)

    def _add(self, *reply: Any) -> None:
        self._replies.append(reply)
        if len(self._replies) == 1:
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Send the small replies of this round of the event loop."""
        self._queue()
        self._send_rest()

    def _queue(self) -> None:
        """Have the small replies sent behind those before, and before them what the worker has reported."""
        replies, self._replies = self._replies, []
        if (reports := new_reports(self._requests.executor, self.lane)) is not None:
            replies.insert(0, (0, ReplyKind.REPORT, reports, None))
        for some in as_fit(replies, _nbytes_of):
            self._unsent.append(partial(self.lane.send_beside, reply_message(0, ReplyKind.SEVERAL, some)))

    def _send_rest(self) -> None:
        """Send replies, as far as the caller reads."""
        while self._unsent and not self._is_gone:
            try:
                self._unsent[0]()
            except BlockingIOError:
                self._loop.add_writer(self.lane.fileno(), self._send_rest)
                break
            except (OSError, Closed):  # the caller is gone, as the next read tells
                pass
            self._unsent.popleft()
        if not (self._unsent or self._is_gone):
            self._loop.remove_writer(self.lane.fileno())
        self._requests.go_on()

    def _send_large(self, number: int, outcome: Outcome, times: bytes | None, flags: int) -> None:
        room = select.poll()  # `select.select` takes no descriptor from 1,024 on
        room.register(self.lane.fileno(), select.POLLOUT)
        if not room.poll(0):
            raise BlockingIOError
        reply(self.lane, number, [outcome], times, flags)

    def tell_of_leases(self) -> None:
        """Tell of leases that have ended, as long as there are any, and while the event loop has the lane."""
        if self.lane.has_leases and not self._is_telling:
            self._is_telling = True
            self._loop.call_later(TELL_S, self._tell)

    def _tell(self) -> None:
        self._is_telling = False
        if not self._is_gone:
            if self._requests.is_reading:
                self.lane.tell()
            self.tell_of_leases()

    def close(self) -> None:
        """Hang up; replies are dropped."""
        self._loop.remove_reader(self.lane.fileno())
        self._loop.remove_writer(self.lane.fileno())
        self._is_gone = True
        self.lane.hang_up()


def _nbytes_of(small: SmallReply) -> int:
    """The size of a reply among several, at most."""
    content = small[2]
    if small[1] == ReplyKind.REPORT:
        return REPORT_NBYTES
    if isinstance(content, tuple):
        return REPLY_NBYTES + len(content[0]) + sum(map(len, content[1]))
    return REPLY_NBYTES + len(content or b"")
