"""Where the futures of a stream come from: shares of the ranks, or the items of generators."""

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
from bandmaster.plan.shares import Share
from bandmaster.platform.deadline import Deadline

__all__ = ["Arrivals", "Feed", "ItemFeed", "ShareFeed", "pending_calls"]

Arrival: TypeAlias = "Future[Any] | BaseException | Callable[[], object] | None"


def pending_calls(futures: Iterable[Future[Any]]) -> list[Call]:
    """The sent calls of some futures that are not done; another thread may change the collection of futures."""
    calls = [future._call for future in list(futures)]
    return [call for call in calls if isinstance(call, Call) and call.is_sent and call.done is None]


class Arrivals:
    """What has arrived for a stream, and nobody has taken: futures, an error to raise, what to call, None at the end.

    Any threads may put something in, and any threads and tasks may take it.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self._wakes: dict[object, Callable[[], object]] = {}  # of the tasks that wait

    def put(self, arrival: Arrival) -> None:
        """Add one; it does not block."""
        self._queue.put(arrival)
        for wake in list(self._wakes.values()):
            with contextlib.suppress(RuntimeError):  # the event loop was closed
                wake()

    def get(self, timeout_s: float | None) -> Arrival:
        """Wait for the next one. Raises queue.Empty if there is none in time."""
        return self._queue.get(timeout=Deadline(timeout_s).left())

    async def get_async(self) -> Arrival:
        """Wait for the next one in an event loop."""
        import asyncio  # here, as it takes a third of the time that the import of everything takes

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
    """Where the futures of a stream come from.

    Attributes:
        site: What messages say about the call.
        workers: The workers that are asked.
        arrived: What the stream takes.
        is_open: Whether the stream has not come to its end, and was not closed.
        due: Always None; see `bandmaster.calls.progress.Watch`.

    Args:
        site: What messages say about the call.
        workers: The workers that are asked.
        returns_errors: Whether futures of calls that have failed are items as well.
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
        """Begin when the rows that it takes, and the calls before it, are there. Errors are items of the stream."""
        self._beginning = _Beginning(self, begin, parents, work)
        work.enqueue(self._beginning, is_waited_for=False)
        work.advance()

    def received(self, arrival: Arrival) -> Future[Any] | None:
        """Take what has arrived; the future, if the user is to have it. Raises its error."""
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
        """The calls that were sent and are waited for."""
        return pending_calls(self._running.values())

    @property
    def awaited(self) -> Result | None:
        """The call that is waited for before this one is sent."""
        return None if self._beginning is None else self._beginning.awaited

    @property
    def is_ended(self) -> bool:
        """Whether all items were taken, or the stream was closed."""
        return not self.is_open

    def cancel(self) -> bool:
        """Have nothing more be made. The stream raises `CallCancelled` and is closed then."""
        self.arrived.put(CallCancelled(f"{self.site.method} was cancelled; make the call again"))
        self._stop()
        return True

    def close(self) -> None:
        """Have nothing more be made, and the stream end."""
        self.is_open, self.is_closed = False, True
        self.arrived.put(None)
        if self._beginning is not None:
            self._beginning.cancel()
        self._stop()

    def look(self) -> bool:
        """Close it in the background, as nobody has the stream any more."""
        self.close()
        return True

    def _is_taken(self, future: Future[Any]) -> None:
        """The user has taken an item, so that there is room for another one."""

    def _stop(self) -> None:
        """Send no more, and cancel what runs."""
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
        """The call that is waited for before it begins."""
        return awaited([*self._work.first_before(self), *(parent._call for parent in self.parents)])

    def advance(self) -> bool:
        """Begin if the rows that it takes are there; whether it has begun, or will not."""
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
        """Wait until nothing is missing for it to begin; False when the time is over before."""
        return wait_for_all(self.parents, Deadline(timeout_s))

    def tell(self) -> None:
        """Do nothing: the stream tells those who take its items."""

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
    """The values of the ranks, each as it comes."""

    _running: dict[Share, Future[Any]]

    def begin(self, futures: Mapping[Share, Future[Any]]) -> None:
        """The call was sent, with a future for each share of the ranks."""
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
    """The items of generators, each of which makes one after the other, and a few more than were taken.

    An item is asked for when the one before it is there, so that other calls come between two items, and so that a
    generator is there when its next item is asked for, in whichever order a backend runs calls.

    Args:
        site: What messages say about the call.
        workers: The workers that are asked.
        returns_errors: Whether futures of items that have failed are items as well.
        maxsize: How many items of a share may be made before they are taken.
    """

    def __init__(self, site: CallSite, workers: Workers, returns_errors: bool, maxsize: int) -> None:
        super().__init__(site, workers, returns_errors)
        self._maxsize = maxsize
        self._shares: dict[int | None, Share] = {}  # by the rank whose items come
        self._room: dict[Share, int] = {}  # how many more items those may make that have not ended
        self._unclosed: set[Share] = set()
        self._is_asking = False

    def begin_items(
        self,
        first: Mapping[Share, Future[Any]],
        ask: Callable[[Share], Future[Any]],
        close: Callable[[list[Share]], object],
    ) -> None:
        """Generators were begun.

        Args:
            first: The futures of the first item of each share of the ranks.
            ask: Asks a share for its next item.
            close: Closes the generators of some shares.
        """
        self._ask, self._close = ask, close
        self._shares = {share.rank: share for share in first}
        self._room = dict.fromkeys(first, self._maxsize - 1)
        self._unclosed = set(first)
        self.begin(first)

    def close(self) -> None:
        """As `Feed.close`; the generators run their ``finally`` blocks."""
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
        assert isinstance(call, Call), "these alone are asked"
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
        """Ask for the next item; if that is refused, have the thread that takes the next one ask again."""
        try:
            self._ask_if_there_is_room(share)
        except Exception:  # it is not the group's turn, say
            self.arrived.put(partial(self._ask_if_there_is_room, share))

    def _ask_if_there_is_room(self, share: Share) -> None:
        with self.lock:
            if self._is_asking:  # by this thread: an item was done as soon as it was asked for
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
