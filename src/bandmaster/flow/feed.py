"""`Feed`: sends the parts of one call to shares of its ranks, and hands on their futures as they are done.

::

    start ── the rows are there, and the calls before it were sent ──► the parts: values, items or requests
                                                                          │ send, to a free share, if there is room
            Stream ◄── arrivals ── a part is done, its share is free ◄── running ◄┘
               └── taken: there is room for one more ─────────────► send
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import uuid
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from bandmaster.calls.call import Call
from bandmaster.calls.future import Future
from bandmaster.calls.options import FlowOptions
from bandmaster.calls.progress import Once, progress
from bandmaster.calls.request import CallRequest, CallSite, Collection
from bandmaster.calls.result import Done, Result, awaited, wait_for_all, wait_for_step
from bandmaster.calls.spec import MethodSpec
from bandmaster.calls.submission import Submitter
from bandmaster.contract import CLOSE_STREAM, METHOD, NEXT, OPEN_STREAM, STREAM
from bandmaster.errors import CallCancelled, CallTimeout, ResourceError, UsageError
from bandmaster.plan.arguments import ArgumentGroup, CallPlan, Share, of_one_rank, shares
from bandmaster.plan.rows import RealRows
from bandmaster.plan.transfer import Only
from bandmaster.platform.deadline import Deadline
from bandmaster.platform.locks import SigintSafeLock

AGAIN = "wait again with error.future.result(), or cancel it with error.future.cancel()"
Arrival: TypeAlias = "Future[Any] | Done | None"


class Arrivals:
    """The queue of a stream: futures, None where the feed could not send a part, and its end behind all others.

    Any thread may put an arrival in, and any thread or task may take it.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self._wakes: set[Callable[[], object]] = set()  # of the tasks that wait

    def put(self, arrival: Arrival) -> None:
        """Add an arrival; it does not block."""
        self._queue.put(arrival)
        while self._wakes:
            with contextlib.suppress(KeyError, RuntimeError):  # another thread was faster; the event loop was closed
                self._wakes.pop()()

    def end_in_fork(self, done: Done | None) -> None:
        """Add the end, and wake no task, as these are those of the process from which this one was forked."""
        self._wakes.clear()
        self.put(done)

    def drained(self) -> list[Future[Any]]:
        """Remove and return all futures."""
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._queue.get_nowait())
        return [arrival for arrival in found if isinstance(arrival, Future)]

    def get(self, timeout_s: float | None) -> Arrival:
        """Wait for the next arrival. Raises queue.Empty if none comes in time."""
        return self._queue.get(timeout=Deadline(timeout_s).left())

    async def get_async(self, timeout_s: float | None) -> Arrival:
        """Wait for the next arrival in an event loop. Raises queue.Empty if none comes in time."""
        import asyncio  # here, as it takes a third of the import time of the whole library

        loop, deadline = asyncio.get_running_loop(), Deadline(timeout_s)
        while True:
            arrived = loop.create_future()
            wake = functools.partial(loop.call_soon_threadsafe, arrived.set_result, None)
            self._wakes.add(wake)
            try:
                return self._queue.get_nowait()
            except queue.Empty:
                # Not `wait_for`, which before Python 3.12 loses a cancellation that comes with the arrival.
                if not (await asyncio.wait([arrived], timeout=deadline.left()))[0]:
                    raise
            finally:
                self._wakes.discard(wake)


class Feed(Result):
    """Sends the parts of one call; the base class for each kind of parts.

    Attributes:
        arrivals: The futures of the parts that are done, None where `send` is to be tried again, and `done`.
        work: The calls of the same workers.
        workers: The workers that run it.
        parents: The futures of the rows that it takes, until it has begun.
        done: Its end, with the error if there is one: no more parts are sent. It is set by one assignment.
        lock: Held while parts are sent, and while the end is made.
        how: The user's options.
        is_sent_in_background: Whether it begins when its rows are there, though no thread waits for it.
        are_requests: Whether its parts are requests, each of which any share makes; else each share makes parts of its
            own, and no more after an error.

    Args:
        site: Its `CallSite`: names for messages, and limits.
        submitter: Sends the calls of the group.
        how: See above.
        keeps_rows: Whether the rows of all parts stay where they are made.
    """

    are_requests = False
    is_sent_in_background = False

    def __init__(self, site: CallSite, submitter: Submitter, how: FlowOptions, keeps_rows: bool = False) -> None:
        super().__init__(site, keeps_rows)
        self.work, self.workers = submitter.work, submitter.workers()
        self.arrivals = Arrivals()
        self._submitter, self.how = submitter, how
        self._plan: Callable[[], Any] | None = None
        self._free: list[Share] = []  # the shares that have no part
        self._running: dict[Future[Any], Share] = {}
        self._ahead: Counter[int | None] = Counter()  # parts that were not taken, by rank if these have their own
        self._ended = threading.Event()
        self._sent = threading.Event()  # later calls need not wait any more
        self._is_sending = False

    # --- the kind of parts ---

    @abstractmethod
    def _first(self, plan: Any) -> Mapping[Share, Future[Any]]:
        """Send the parts that are sent as one, and return their futures by share. `_free` has the other shares."""

    def _has_more(self, share: Share) -> bool:
        """Whether there is a part that a share may make next."""
        return False

    def _send_next(self, share: Share) -> Future[Any]:
        """Send the next part to a share. After an error it can be sent again."""
        raise AssertionError("there are no more parts")

    def _flush(self) -> None:
        """Send the parts that are about to be sent."""

    def _is_end(self, share: Share, future: Future[Any]) -> bool:
        """Whether a reply without an error is the end of a share, and no part."""
        return False

    def _watch_part(self, future: Future[Any]) -> None:
        """Have `parts_done` called when a part is done."""
        future.add_done_callback(lambda part: self.parts_done([part]))

    # --- in the queue of calls that are not sent yet ---

    def start(self, plan: Callable[[], Any], parents: Sequence[Future[Any]], is_at_once: bool = False) -> None:
        """Begin now, or when the rows that it takes are there and the calls before it were sent.

        Args:
            plan: Plans the call when the rows are there. Mistakes are errors now, unless rows are missing.
            parents: The futures of the missing rows.
            is_at_once: See `CallRequest`.
        """
        plan = functools.cache(plan)  # which keeps the claims on the rows that it takes
        if not parents:
            plan()
        with self._submitter.gate.admitted(self.site.method):
            self._plan, self.parents = plan, tuple(parents)
            self.work.add_in_parts(self)
            try:
                if parents or (self.work.waiting and not is_at_once):
                    self.work.enqueue(self, is_waited_for=False)
                else:
                    self._begin()
            except BaseException:  # Ctrl-C, or the next part is refused, as a rival's turn is about to begin
                self.cancel()
                self.close()
                raise

    def advance(self) -> bool:
        """Begin if the rows that it takes are there. Returns whether later calls may be sent."""
        if self._plan is not None and wait_for_all(self.parents, Deadline(0.0)):
            try:
                self._begin()
            except Exception as error:
                self.give_up(error)
            except BaseException:  # Ctrl-C
                self.give_up(CallCancelled(f"{self.site.method} was interrupted as it was sent; make the call again"))
                raise
        return self._sent.is_set()

    def _begin(self) -> None:
        with self.lock:  # so that a thread that closes the stream closes all of it
            if self._plan is None:
                return
            self._running = {future: share for share, future in self._first(self._plan()).items()}
            self._plan, self.parents = None, ()
            first = list(self._running.items())  # here: another thread may send others from now on
        for future, share in first:
            self._ahead[self._place(share.rank)] += 1
            self._watch_part(future)
        self.send()

    def wait_until_sent(self, deadline: Deadline, last: Result) -> bool:
        """Wait until later calls may be sent, or ``last`` is cancelled; False if the time is over before."""
        if not wait_for_all(self.parents, deadline, self, last):
            return False
        self.work.advance()
        return wait_for_step(self._sent.wait, deadline, last)

    # --- parts ---

    def send(self) -> None:
        """Send parts to free shares as far as there is room, and end if there are no more. An error is raised.

        A part that was not sent is sent by the next call; after Ctrl-C the caller ends the feed.
        """
        with self.lock:
            # By this thread: a part was done as soon as it was sent. And once it is over, others may wait for `lock` as
            # they send requests that take its rows.
            if self._is_sending or self.done is not None:
                return
            self._is_sending = True
            try:
                while (share := self._next()) is not None:
                    future = self._send_next(share)
                    self._free.remove(share)
                    self._running[future] = share
                    self._ahead[self._place(share.rank)] += 1
                    self._watch_part(future)
            finally:
                self._flush()
                self._is_sending = False
            is_over = not self._running and not any(map(self._has_more, self._free))
        if is_over:
            self.give_up(None)
        elif not self._sent.is_set():
            self._sent.set()
            self.work.advance()

    def _next(self) -> Share | None:
        """A free share that may make a part now."""
        most = self.how.maxsize
        for share in self._free if self.done is None else ():
            if (most is None or self._ahead[self._place(share.rank)] < most) and self._has_more(share):
                return share
        return None

    def _place(self, rank: int | None) -> int | None:
        return None if self.are_requests else rank

    def parts_done(self, futures: Sequence[Future[Any]]) -> None:
        """Tell of parts that are done, and send others."""
        for future in futures:
            share, error = self._running[future], _error_of(future)
            if error is not None and self.how.on_error == "raise":
                self.give_up(error)
            elif self.done is None and (error is not None or not self._is_end(share, future)):
                self.arrivals.put(future)
            with self.lock:
                del self._running[future]
                if error is None or self.are_requests:
                    self._free.append(share)
        self._go_on()

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
            if self.how.maxsize is None:
                self.give_up(error)
            else:
                self.arrivals.put(None)

    # --- its end ---

    def give_up(self, why: BaseException | None) -> None:
        """Send no more parts, and cancel those that run; ``why`` is the error, if there is one."""
        with SigintSafeLock(), self.lock:
            if self.done is not None:
                return
            self.done = Done(why, is_here=why is not None)
            self._plan, self.parents = None, ()
            self._sent.set()
            self._ended.set()
            self.arrivals.put(self.done)
        try:
            for future in list(self._running):
                future.cancel()
        finally:
            self.work.advance()
            if self._callbacks:
                try:
                    progress.add(Once(self.workers, self.tell))  # there, as `advance` may have come here with its lock
                except ResourceError:
                    self.tell()

    def cancel(self) -> bool:
        """Stop it with `CallCancelled`. Returns whether it was not done."""
        if self.done is not None:
            return False
        self.is_cancelled = True
        self.give_up(CallCancelled(f"{self.site.method} was cancelled; make the call again"))
        return True

    def close(self) -> None:
        """Stop it without an error, and free the resources of the parts that are not made."""
        self.give_up(None)

    def end_in_fork(self) -> None:
        """End with a UsageError in a fork; see `Result.end_in_fork`."""
        super().end_in_fork()
        self.arrivals.end_in_fork(self.done)

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until it sends no more parts; False if the time is over before."""
        return self.done is not None or self._ended.wait(Deadline(timeout_s).left())

    @property
    def is_ended(self) -> bool:
        """Whether it sends no more parts."""
        return self.done is not None

    # --- for messages ---

    @property
    def missing(self) -> tuple[int, ...]:  # type: ignore[override]  # here it is computed
        """The ranks that have not replied to parts that run."""
        return tuple(sorted({rank for call in self.sent_calls() for rank in call.missing}))

    def sent_calls(self) -> list[Result]:
        """The calls of the parts that run."""
        return [future._call for future in list(self._running) if future._call.is_sent and future._call.done is None]

    @property
    def waits_for(self) -> list[Result]:
        """The first call to the same workers that was not sent, the parts that run, and the calls of its rows."""
        return [*self.work.first_before(self), *self.sent_calls(), *super().waits_for]

    def late(self, timeout_s: float, what_next: str = AGAIN) -> CallTimeout:
        """The `CallTimeout` to raise after a wait of ``timeout_s``; ``what_next`` says what the user can do."""
        method, calls = self.site.method, self.sent_calls()
        if not calls and (first := awaited(self.waits_for)) is not None:
            what_next = f"{method} takes its rows, or was submitted behind it, and so was not sent: {what_next}"
            method, calls = first.site.method, [first]
        missing = tuple(sorted({rank for call in calls for rank in call.missing}))
        stacks = {rank: stack for call in calls for rank, stack in call.stacks().items()}
        behind = next(filter(None, (call.behind for call in calls)), "")
        return CallTimeout(method, missing, timeout_s, stacks, what_next, behind=behind)


class Values(Feed):
    """The values of a call, one by one.

    Args:
        group: The group, which lives as long as the futures.
        submitter: Sends the calls.
        spec: The method.
        options: The limits of the calls.
        how: The user's flow options.
    """

    n_ahead: int | None = None  # the usual ``maxsize`` of each rank

    def __init__(
        self, group: object, submitter: Submitter, spec: MethodSpec, options: Mapping[str, Any] | None, how: FlowOptions
    ) -> None:
        how = replace(how, maxsize=how.maxsize or self.n_ahead)
        super().__init__(submitter.site(spec.name, options), submitter, how)
        self._spec = spec
        self._request = CallRequest(spec.name, CallPlan(()), spec.ranks, owner=group, options=options)
        self._rows: RealRows | None = None  # that each rank was sent

    def _first(self, plan: CallPlan) -> Mapping[Share, Future[Any]]:
        incoming, self._rows = self._spec.collection.incoming, plan.real_rows
        found = {share: Collection(of_one_rank(incoming, share.rank), (share.rank,)) for share in self._shares(plan)}
        return self._sent_as_one(replace(self._request, plan=plan), found)

    def _shares(self, plan: CallPlan) -> tuple[Share, ...]:
        """The shares of the ranks that each return a value."""
        return shares(self._spec.ranks, [group.ranks for group in plan.groups], self._spec.collection.ranks)

    def _sent_as_one(self, request: CallRequest, found: Mapping[Share, Collection]) -> dict[Share, Future[Any]]:
        """Send a call. Returns its futures by share, labelled with the rank and the rows of the share."""
        futures = dict(zip(found, self._submitter.submit_shares(request, found), strict=True))
        for share, future in futures.items():
            future.rank, future.numbers = share.rank, None if self._rows is None else self._rows.numbers[share.rank]
        return futures


class Items(Values):
    """The items of generators, one after the other from each share.

    An item is requested when the one before it is there, so that other calls come between two items, and so that a
    generator exists when its next item is requested, whatever the order in which a backend runs calls.
    """

    n_ahead = 2
    _unclosed: frozenset[Share] = frozenset()  # the shares whose generators have begun, and not ended

    def _first(self, plan: CallPlan) -> Mapping[Share, Future[Any]]:
        if plan.real_rows is not None and plan.real_rows.padded_to is not None:
            raise UsageError(
                f"{self._spec.label} yields items, from which padding cannot be removed; split without pad=True"
            )
        self._rows, found, self._stream = plan.real_rows, self._shares(plan), uuid.uuid4().hex
        name = ((STREAM, self._stream), (METHOD, self._submitter.prefix + self._spec.name))
        named = CallPlan((*plan.groups, ArgumentGroup(name, ("stream", "method"), self._spec.ranks)))
        self._unclosed = frozenset(found)  # first, as Ctrl-C may come when they have begun
        return self._call(found, OPEN_STREAM, named)

    def _call(self, found: Sequence[Share], what: str, plan: CallPlan | None = None) -> dict[Share, Future[Any]]:
        if plan is None:
            ranks = tuple([rank for share in found for rank in share.ranks])
            plan = CallPlan((ArgumentGroup(((0, self._stream),), ("stream",), ranks),))
        is_cleanup = what == CLOSE_STREAM
        request = replace(self._request, plan=plan, asks_for=what, is_cleanup=is_cleanup, is_for_all=False)
        return self._sent_as_one(request, {share: Collection(Only(), (share.rank,)) for share in found})

    def _has_more(self, share: Share) -> bool:
        return share in self._unclosed

    def _send_next(self, share: Share) -> Future[Any]:
        with self._submitter.gate.admitted(self._spec.label):
            return self._call([share], NEXT)[share]

    def _is_end(self, share: Share, future: Future[Any]) -> bool:
        call = future._call
        assert isinstance(call, Call), "items are requested by calls"
        if call.has_value_of(share.rank):
            return False
        self._unclosed -= {share}
        return True

    def close(self) -> None:
        """Close the generators that have not ended, also outside of the group's turn, as it frees resources."""
        super().close()
        unclosed, self._unclosed = self._unclosed, frozenset()
        if unclosed:
            with contextlib.suppress(Exception):  # the group was closed
                self._call(sorted(unclosed), CLOSE_STREAM)


def _error_of(future: Future[Any]) -> BaseException | None:
    """The error of a future that is done, or the error of reading the rows that came with its reply."""
    try:
        return future.exception()
    except Exception as error:
        return error
