"""Feeds, which supply a stream with futures: of shares of the ranks, or of the items of generators."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from bandmaster.calls.call import Call
from bandmaster.calls.future import Future
from bandmaster.calls.open_work import OpenWork
from bandmaster.calls.request import CallSite
from bandmaster.calls.result import Result, awaited, wait_for_all
from bandmaster.contract import Workers
from bandmaster.errors import CallCancelled
from bandmaster.plan.arguments import Share
from bandmaster.platform.deadline import Deadline

Arrival: TypeAlias = "Future[Any] | BaseException | Callable[[], object] | None"


def pending_calls(futures: Iterable[Future[Any]]) -> list[Call]:
    """The sent calls of some futures that are not done; another thread may change the collection of futures."""
    calls = [future._call for future in list(futures)]
    return [call for call in calls if isinstance(call, Call) and call.is_sent and call.done is None]


class Arrivals:
    """The queue of a stream: futures, an error to raise, a function to call, or None at the end.

    Any thread may put an arrival in, and any thread or task may take it.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self._wakes: dict[object, Callable[[], object]] = {}  # of the tasks that wait

    def put(self, arrival: Arrival) -> None:
        """Add an arrival; it does not block."""
        self._queue.put(arrival)
        for wake in list(self._wakes.values()):
            with contextlib.suppress(RuntimeError):  # the event loop was closed
                wake()

    def get(self, timeout_s: float | None) -> Arrival:
        """Wait for the next arrival. Raises queue.Empty if none comes in time."""
        return self._queue.get(timeout=Deadline(timeout_s).left())

    async def get_async(self) -> Arrival:
        """Wait for the next arrival in an event loop."""
        import asyncio  # here, as it takes a third of the import time of the whole library

        loop, arrived = asyncio.get_running_loop(), asyncio.Event()
        self._wakes[arrived] = lambda: loop.call_soon_threadsafe(arrived.set)
        try:
            while True:
                arrived.clear()
                try:
                    return self._queue.get_nowait()
                except queue.Empty:
                    await arrived.wait()
        finally:
            del self._wakes[arrived]


class Feed:
    """Supplies a stream with the futures of a call.

    Attributes:
        site: The names for messages about the call, and its limits.
        workers: The workers that run it.
        arrived: The queue from which the stream takes arrivals.
        is_open: Whether the stream has not come to its end, and was not closed.
        due: Always None; see `bandmaster.calls.progress.Watch`.

    Args:
        site: The names for messages about the call, and its limits.
        workers: The workers that run it.
        returns_errors: Whether futures of failed calls are items as well.
    """

    due: float | None = None

    def __init__(self, site: CallSite, workers: Workers, returns_errors: bool = False) -> None:
        self.site, self.workers, self._returns_errors = site, workers, returns_errors
        self.is_open, self.is_closed = True, False  # a thread may hold the last item as another one finds the end
        self.arrived = Arrivals()
        self._beginning: _Beginning | None = None
        self._running: Mapping[Any, Future[Any]] = {}
        self.lock = threading.RLock()

    def begin_later(self, begin: Callable[[], object], parents: Sequence[Future[Any]], work: OpenWork) -> None:
        """Begin after the calls before it, when the rows that it takes are there. An error arrives in the stream."""
        self._beginning = _Beginning(self, begin, parents, work)
        work.enqueue(self._beginning, is_waited_for=False)
        work.advance()

    def received(self, arrival: Arrival) -> Future[Any] | None:
        """Process an arrival. Returns the future if it is an item for the user. Raises an error that has arrived."""
        if arrival is None or self.is_closed:
            self.is_open = False
            self.arrived.put(None)  # for another thread that waits
        elif isinstance(arrival, BaseException):
            raise arrival
        elif not isinstance(arrival, Future):
            arrival()
        else:
            error = arrival.exception()
            if error is not None and not self._returns_errors:
                raise error
            self._is_taken(arrival)
            return arrival
        return None

    def pending(self) -> list[Call]:
        """The sent calls that are not done."""
        return pending_calls(self._running.values())

    @property
    def awaited(self) -> Result | None:
        """The call for which this one waits before it is sent."""
        return None if self._beginning is None else self._beginning.awaited

    @property
    def is_ended(self) -> bool:
        """Whether all items were taken, or the stream was closed."""
        return not self.is_open

    def cancel(self) -> bool:
        """Stop making items. The stream then raises `CallCancelled` and is closed."""
        self.arrived.put(CallCancelled(f"{self.site.method} was cancelled; make the call again"))
        self._stop()
        return True

    def close(self) -> None:
        """Stop making items, and end the stream."""
        self.is_open, self.is_closed = False, True
        self.arrived.put(None)
        if self._beginning is not None:
            self._beginning.cancel()
        self._stop()

    def look(self) -> bool:
        """Close it in the background, because the stream was collected."""
        self.close()
        return True

    def _is_taken(self, future: Future[Any]) -> None:
        """Note that the user has taken an item, so that there is room for another one."""

    def _stop(self) -> None:
        """Send no more calls, and cancel the running ones."""
        with self.lock:
            running = list(self._running.values())
        for future in running:
            future.cancel()


class _Beginning:
    """The place of a stream among the calls that wait for rows.

    Args:
        feed: The stream's feed.
        begin: Sends its first calls.
        parents: The futures of the rows that it takes.
        work: The calls of the same workers.
    """

    is_sent_in_background = False

    def __init__(self, feed: Feed, begin: Callable[[], object], parents: Sequence[Future[Any]], work: OpenWork) -> None:
        self.site, self.parents = feed.site, tuple(parents)
        self._feed, self._work = feed, work
        self._begin: Callable[[], object] | None = begin

    @property
    def awaited(self) -> Result | None:
        """The call for which the stream waits before it begins."""
        return awaited([*self._work.first_before(self), *(parent._call for parent in self.parents)])

    def advance(self) -> bool:
        """Begin if the rows that it takes are there. Returns whether it has begun, or never will."""
        if self._begin is not None:
            if not wait_for_all(self.parents, Deadline(0.0)):
                return False
            begin, self._begin, self.parents = self._begin, None, ()
            try:
                with self._feed.lock:  # so that a thread that closes the stream closes all of it
                    if not self._feed.is_closed:
                        begin()
            except Exception as error:
                self._feed.arrived.put(error)
        return True

    def wait_until_sent(self, timeout_s: float | None) -> bool:
        """Wait until the rows that it takes are there; False if the time is over before."""
        return wait_for_all(self.parents, Deadline(timeout_s))

    def tell(self) -> None:
        """Do nothing: the queue of the stream notifies its readers."""

    def give_up(self, why: BaseException) -> None:
        """Do not begin, for a reason."""
        if self._begin is not None:
            self._begin, self.parents = None, ()
            self._feed.arrived.put(why)
            self._work.advance()

    def cancel(self) -> bool:
        """Cancel the stream."""
        if self._begin is None:
            return False
        self.give_up(CallCancelled(f"{self.site.method} was cancelled before it was sent; make the call again"))
        return True


class ShareFeed(Feed):
    """The values of the ranks, each when it arrives."""

    _running: dict[Share, Future[Any]]

    def begin(self, futures: Mapping[Share, Future[Any]]) -> None:
        """Watch the futures of a sent call, one for each share of the ranks."""
        self._running = dict(futures)
        for share, future in futures.items():
            future.add_done_callback(partial(self._done, share))

    def _done(self, share: Share, future: Future[Any]) -> None:
        with self.lock:
            del self._running[share]
            self.arrived.put(future)
            if not self._running:
                self.arrived.put(None)


class ItemFeed(ShareFeed):
    """The items of generators. Each generator makes one item after the other, at most ``maxsize`` ahead of the user.

    An item is requested when the one before it is there, so that other calls come between two items, and so that a
    generator exists when its next item is requested, whatever the order in which a backend runs calls.

    Args:
        site: The names for messages about the call, and its limits.
        workers: The workers that run it.
        returns_errors: Whether futures of failed items are items as well.
        maxsize: Most items of a share that are made before they are taken.
    """

    def __init__(self, site: CallSite, workers: Workers, returns_errors: bool, maxsize: int) -> None:
        super().__init__(site, workers, returns_errors)
        self._maxsize = maxsize
        self._shares: dict[int | None, Share] = {}  # by the rank that returns the items
        self._room: dict[Share, int] = {}  # how many more items each share that has not ended may make
        self._unclosed: set[Share] = set()
        self._is_asking = False

    def begin_items(
        self,
        first: Mapping[Share, Future[Any]],
        ask: Callable[[Share], Future[Any]],
        close: Callable[[list[Share]], object],
    ) -> None:
        """Watch generators that have begun.

        Args:
            first: The futures of the first item of each share of the ranks.
            ask: Requests the next item of a share.
            close: Closes the generators of some shares.
        """
        self._ask, self._close = ask, close
        self._shares = {share.rank: share for share in first}
        self._room = dict.fromkeys(first, self._maxsize - 1)
        self._unclosed = set(first)
        self.begin(first)

    def close(self) -> None:
        """Stop making items, end the stream, and close the generators, which run their ``finally`` blocks."""
        super().close()
        unclosed, self._unclosed = self._unclosed, set()
        if unclosed:
            with contextlib.suppress(Exception):  # the group was closed
                self._close(sorted(unclosed))

    def _stop(self) -> None:
        with self.lock:
            self._room = {}
        super()._stop()

    def _is_taken(self, future: Future[Any]) -> None:
        share = self._shares[future.rank]
        with self.lock:
            if share in self._room:
                self._room[share] += 1
        self._go_on(share)

    def _done(self, share: Share, future: Future[Any]) -> None:
        call, has_failed = future._call, future.exception() is not None
        assert isinstance(call, Call), "items are requested by calls"
        is_end = not (has_failed or call.has_value_of(share.rank))
        with self.lock:
            del self._running[share]
            if is_end:
                self._unclosed.discard(share)
            else:
                self.arrived.put(future)
            if has_failed or is_end:
                self._room.pop(share, None)
                if not self._room:
                    self.arrived.put(None)
        self._go_on(share)

    def _go_on(self, share: Share) -> None:
        """Request the next item; after an error, the thread that takes the next item requests it again."""
        try:
            self._ask_if_there_is_room(share)
        except Exception:  # for example, it is not the group's turn
            self.arrived.put(partial(self._ask_if_there_is_room, share))

    def _ask_if_there_is_room(self, share: Share) -> None:
        with self.lock:
            if self._is_asking:  # by this thread: an item was done as soon as it was requested
                return
            self._is_asking = True
            try:
                while share not in self._running and (room := self._room).get(share, 0) > 0:
                    future = self._ask(share)
                    room[share] -= 1
                    self._running[share] = future
                    future.add_done_callback(partial(self._done, share))
            finally:
                self._is_asking = False
