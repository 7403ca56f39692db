"""`Feed`: sends the parts of one call to shares of its ranks, and hands on their futures as they are done.

::

    start ── the rows are there, and the calls before it were sent ──► Source: values, items or requests
                                                                          │ send, to a free share, if there is room
            Stream ◄── tell ── a part is done, its share is free ◄── running ◄┘
               └── taken: there is room for one more ─────────────► send
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from bandmaster.calls.future import Future
from bandmaster.calls.options import FlowOptions
from bandmaster.calls.request import CallSite
from bandmaster.calls.result import Done, Result, awaited, wait_for_all
from bandmaster.calls.submission import Submitter
from bandmaster.errors import CallCancelled, CallTimeout
from bandmaster.plan.arguments import Share
from bandmaster.platform.deadline import Deadline
from bandmaster.platform.locks import SigintSafeLock

Tell: TypeAlias = "Callable[[Future[Any] | None], object]"


class Source:
    """The parts of a call. This one has a part for each share of the ranks, and all were sent as one.

    Attributes:
        sent: The futures of the parts that were sent as one, by share.
        free: The shares that have no part yet.
        is_per_share: Whether each share makes parts of its own, and no more after an error; else any share makes any.
    """

    is_per_share = True

    def __init__(self, sent: Mapping[Share, Future[Any]], free: Sequence[Share] = ()) -> None:
        self.sent, self.free = sent, free

    def has_more(self, share: Share) -> bool:
        """Whether there is a part that a share may make next."""
        return False

    def send(self, share: Share) -> Future[Any]:
        """Send the next part to a share. After an error it can be sent again."""
        raise AssertionError("there are no more parts")

    def is_end(self, share: Share, future: Future[Any]) -> bool:
        """Whether a reply without an error is the end of a share, and no part."""
        return False

    def flush(self) -> None:
        """Send the parts that are about to be sent."""

    def watch(self, future: Future[Any], when_done: Callable[[Future[Any]], object]) -> None:
        """Call a function when a part is done."""
        future.add_done_callback(when_done)

    def close(self) -> None:
        """Free the resources of the parts that are not made."""


NO_PARTS = Source({})


class Feed:
    """Sends the parts of one call.

    Attributes:
        site: Its `CallSite`: names for messages, and limits.
        work: The calls of the same workers.
        workers: The workers that run it.
        parents: The futures of the rows that it takes, until it has begun.
        done: Its end, with the error if there is one: no more parts are sent. It is set by one assignment.
        lock: Held while parts are sent, and while the end is made.
        ended: Set when it is done.
        on_end: Called when it is done.
        is_cancelled: Whether it was cancelled.
        is_sent_in_background: Whether it begins when its rows are there, though no thread waits for it.
        due: Always None; see `bandmaster.calls.progress.Watch`.

    Args:
        site: Its `CallSite`.
        submitter: Sends the calls of the group.
        how: The user's options.
        tell: Called with the future of each part that is done, and with None if `done` or `send` has news.
    """

    is_sent_in_background = is_cancelled = False
    is_sent = False  # for `bandmaster.calls.result.awaited`: its calls are
    due: float | None = None

    def __init__(self, site: CallSite, submitter: Submitter, how: FlowOptions, tell: Tell) -> None:
        self.site, self.work, self.workers = site, submitter.work, submitter.workers
        self.parents: Sequence[Future[Any]] = ()
        self.done: Done | None = None
        self.ended = threading.Event()
        self.lock = threading.RLock()
        self._tell, self._returns_errors = tell, how.on_error == "return"
        self._maxsize = how.maxsize
        self.on_end: Callable[[], object] = bool
        self._begin: Callable[[], Source] | None = None
        self._source = NO_PARTS
        self._free: list[Share] = []
        self._running: dict[Future[Any], Share] = {}
        self._ahead: Counter[int | None] = Counter()  # parts that were not taken, by rank if these have their own
        self._sent = threading.Event()  # later calls need not wait any more
        self._is_sending = False

    # --- in the queue of calls that are not sent yet ---

    def start(self, begin: Callable[[], Source], parents: Sequence[Future[Any]]) -> None:
        """Begin now, or when the rows that it takes are there and the calls before it were sent.

        Args:
            begin: Sends the first parts, and returns the source of the others.
            parents: The futures of the rows that it takes.
        """
        self._begin, self.parents = begin, tuple(parents)
        self.work.add_in_parts(self)
        try:
            if parents or self.work.waiting:
                self.work.enqueue(self, is_waited_for=False)
                self.work.advance()
            else:
                self._begin_now()
        except BaseException:  # Ctrl-C
            self.cancel()
            raise

    def advance(self) -> bool:
        """Begin if the rows that it takes are there. Returns whether later calls may be sent."""
        if self._begin is not None and wait_for_all(self.parents, Deadline(0.0)):
            try:
                self._begin_now()
            except Exception as error:
                self.give_up(error)
        return self._sent.is_set()

    def _begin_now(self) -> None:
        try:
            with self.lock:  # so that a thread that closes the stream closes all of it
                if self._begin is None:
                    return
                source = self._source = self._begin()
                self._free = list(source.free)
                self._running = {future: share for share, future in source.sent.items()}
                self._begin, self.parents = None, ()
            for future, share in list(self._running.items()):
                self._ahead[self._place(share.rank)] += 1
                source.watch(future, self._part_done)
            self.send()
        except Exception:
            raise
        except BaseException:  # Ctrl-C
            self.give_up(CallCancelled(f"{self.site.method} was interrupted as it was sent; make the call again"))
            raise

    def wait_until_sent(self, timeout_s: float | None) -> bool:
        """Wait until later calls may be sent; False if the time is over before."""
        deadline = Deadline(timeout_s)
        if not wait_for_all(self.parents, deadline):
            return False
        self.work.advance()
        return self._sent.wait(deadline.left())

    def tell(self) -> None:
        """Tell of the end. A stream is told by its queue."""
        if self.done is not None:
            self.on_end()

    # --- parts ---

    def send(self) -> None:
        """Send parts to free shares as far as there is room, and end if there are no more. An error is raised.

        A part that was not sent is sent by the next call; after Ctrl-C the caller ends the feed.
        """
        with self.lock:
            if self._is_sending:  # by this thread: a part was done as soon as it was sent
                return
            self._is_sending = True
            try:
                while (share := self._next()) is not None:
                    future = self._source.send(share)
                    self._free.remove(share)
                    self._running[future] = share
                    self._ahead[self._place(share.rank)] += 1
                    self._source.watch(future, self._part_done)
            finally:
                self._source.flush()
                self._is_sending = False
            is_over = not self._running and not any(map(self._source.has_more, self._free))
        if is_over:
            self.give_up(None)
        elif not self._sent.is_set():
            self._sent.set()
            self.work.advance()

    def _next(self) -> Share | None:
        """A free share that may make a part now."""
        for share in self._free if self.done is None else ():
            has_room = self._maxsize is None or self._ahead[self._place(share.rank)] < self._maxsize
            if has_room and self._source.has_more(share):
                return share
        return None

    def _place(self, rank: int | None) -> int | None:
        return rank if self._source.is_per_share else None

    def _part_done(self, future: Future[Any]) -> None:
        self.parts_done([future])

    def parts_done(self, futures: Sequence[Future[Any]]) -> None:
        """Tell of parts that are done, and send others."""
        for future in futures:
            self._take(future)
        self._go_on()

    def _take(self, future: Future[Any]) -> None:
        source, share, error = self._source, self._running[future], _error_of(future)
        if error is not None and not self._returns_errors:
            self.give_up(error)
        elif self.done is None and (error is not None or not source.is_end(share, future)):
            self._tell(future)
        with self.lock:
            del self._running[future]
            if error is None or not source.is_per_share:
                self._free.append(share)

    def taken(self, future: Future[Any]) -> None:
        """Make room for one more part, because the user has taken one."""
        with self.lock:
            self._ahead[self._place(future.rank)] -= 1
        self._go_on()

    def _go_on(self) -> None:
        """Send the next parts. After an error, such as that it is not the group's turn, a stream tries it again."""
        try:
            self.send()
        except Exception as error:
            if self._maxsize is None:
                self.give_up(error)
            else:
                self._tell(None)

    # --- its end ---

    def give_up(self, why: BaseException | None) -> None:
        """Send no more parts, and cancel those that run; ``why`` is the error, if there is one."""
        with SigintSafeLock(), self.lock:
            if self.done is not None:
                return
            self.done = Done(why, is_here=why is not None)
            self._begin, self.parents = None, ()
            self._sent.set()
            self.ended.set()
            self._tell(None)
        try:
            for future in list(self._running):
                future.cancel()
        finally:
            self.work.advance()
            self.tell()

    def cancel(self) -> bool:
        """Stop it with `CallCancelled`. Returns whether it was not done."""
        if self.done is not None:
            return False
        self.is_cancelled = True
        self.give_up(CallCancelled(f"{self.site.method} was cancelled; make the call again"))
        return True

    def look(self) -> bool:
        """Stop it without an error, and free the resources of the parts that are not made; see `Watch`."""
        self.give_up(None)
        self._source.close()
        return True

    @property
    def is_over(self) -> bool:
        """Whether it sends no more parts."""
        return self.done is not None

    is_ended = is_over

    # --- for messages ---

    def sent_calls(self) -> list[Result]:
        """The calls of the parts that run."""
        return [future._call for future in list(self._running) if future._call.is_sent and future._call.done is None]

    @property
    def waits_for(self) -> list[Result]:
        """The first call to the same workers that was not sent, the parts that run, and the calls of its rows."""
        return [*self.work.first_before(self), *self.sent_calls(), *(parent._call for parent in self.parents)]

    def late(self, timeout_s: float, what_next: str = "") -> CallTimeout:
        """The `CallTimeout` to raise after a wait of ``timeout_s``; ``what_next`` says what the user can do."""
        method, calls = self.site.method, self.sent_calls()
        if not calls and (first := awaited(self.waits_for)) is not None:
            what_next = f"{method} takes its rows, or was submitted behind it, and so was not sent: {what_next}"
            method, calls = first.site.method, [first]
        missing = sorted({rank for call in calls for rank in call.missing})
        stacks = {rank: stack for call in calls for rank, stack in call.stacks().items()}
        behind = next(filter(None, (call.behind for call in calls)), "")
        return CallTimeout(method, tuple(missing), timeout_s, stacks, what_next, behind=behind)


def _error_of(future: Future[Any]) -> BaseException | None:
    """The error of a future that is done, or the error of reading the rows that came with its reply."""
    try:
        return future.exception()
    except Exception as error:
        return error
