"""Streams: the results of a call one by one, as they come.

::

    submission ── a future for each share, item or chunk ──► Feed ── arrived ──► Stream ──► for, async for
                              ▲                                │
                              └── asks for more, as they are taken
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from bandmaster.calls.future import Future
from bandmaster.calls.outcome import Outcome
from bandmaster.calls.pending import CallSite, PendingCall
from bandmaster.calls.progress import progress
from bandmaster.contract import Workers
from bandmaster.errors import CallTimeout
from bandmaster.plan.shares import Share

if TYPE_CHECKING:
    from typing_extensions import Self

A = TypeVar("A")

__all__ = ["Arrivals", "Feed", "ItemCall", "ItemFeed", "ShareFeed", "Stream"]


class Stream:
    """Iterates over the results of a call as they come; `GroupMethod.stream` returns it.

    Each result is a `Future` that is done. Its ``rank`` is the rank that made it, and its ``numbers`` are the numbers
    of the rows that it belongs to, in the batch that was passed; None if no batch was split. Rows stay where they were
    made until ``result()`` is called, so that futures can be passed on to other calls.

    The stream ends after the last result, or with the error of the first that failed. `close`, the end of a ``with``
    block or the end of its last reference cancels what has not been made.
    """

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Future[Any]:
        """Wait for the next result.

        Raises:
            StopIteration: There is none any more, or the stream was closed.
            CallTimeout: It has not come within the timeout (see `GroupMethod.options`); go on, or close the stream.
            RemoteError, WorkerDied, CallCancelled: As `Future.result`; the stream is closed.
        """
        timeout_s = self._feed.site.limits().timeout
        try:
            while self._feed.is_open:
                try:
                    arrived = self._feed.arrived.get(timeout_s)
                except queue.Empty:
                    assert timeout_s is not None, "only a deadline ends the wait early"
                    raise self._late(timeout_s) from None
                found = self._feed.received(arrived)
                if found is not None:
                    return found
        except CallTimeout:
            raise
        except BaseException:  # the error of the call, or Ctrl-C
            self.close()
            raise
        raise StopIteration

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Future[Any]:
        """As `__next__`, in an event loop. Cancelling the task that waits closes the stream."""
        import asyncio  # here, as it takes a third of the time that the import of everything takes

        timeout_s = self._feed.site.limits().timeout
        try:
            while self._feed.is_open:
                try:
                    arrived = await asyncio.wait_for(self._feed.arrived.get_async(), timeout_s)
                except asyncio.TimeoutError:
                    assert timeout_s is not None, "only a deadline ends the wait early"
                    raise self._late(timeout_s) from None
                found = self._feed.received(arrived)
                if found is not None:
                    return found
        except CallTimeout:
            raise
        except BaseException:
            self.close()
            raise
        raise StopAsyncIteration

    def close(self) -> None:
        """Cancel what has not been made; generators run their ``finally`` blocks. Closing twice does nothing."""
        if self._feed.is_open:
            self._feed.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        feed = self.__dict__.get("_feed")
        if feed is not None and feed.is_open:
            with contextlib.suppress(Exception):  # there may be no threads any more
                progress.add(_Closing(feed))  # garbage may be collected under any lock

    def __repr__(self) -> str:
        return f"<Stream of {self._feed.site.method}, {'open' if self._feed.is_open else 'ended'}>"

    def _late(self, timeout_s: float) -> CallTimeout:
        stacks: dict[int, str] = {}
        missing: dict[int, None] = {}
        for call in self._feed.pending():
            missing.update(dict.fromkeys(call.missing))
            stacks.update(call.stacks())
        what_next = "go on iterating to wait again, or close the stream"
        return CallTimeout(self._feed.site.method, tuple(sorted(missing)), timeout_s, stacks, what_next)


class _Closing:
    """Has a feed closed by the background thread."""

    def __init__(self, feed: Feed) -> None:
        self.due: float | None = None
        self.workers: Workers = feed.workers
        self._feed = feed

    def look(self) -> bool:
        """Close it."""
        if self._feed.is_open:
            self._feed.close()
        return True


class Arrivals(Generic[A]):
    """What has arrived, and nobody has taken; any thread may put something in."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[A] = queue.SimpleQueue()
        self._wake: Callable[[], object] | None = None

    def put(self, arrival: A) -> None:
        """Add one; it does not block."""
        self._queue.put(arrival)
        wake = self._wake
        if wake is not None:
            with contextlib.suppress(RuntimeError):  # the event loop was closed
                wake()

    def get(self, timeout_s: float | None) -> A:
        """Wait for the next one. Raises queue.Empty if there is none in time."""
        return self._queue.get(timeout=None if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX))

    async def get_async(self) -> A:
        """Wait for the next one in an event loop."""
        import asyncio  # as above

        loop, arrived = asyncio.get_running_loop(), asyncio.Event()
        self._wake = lambda: loop.call_soon_threadsafe(arrived.set)
        while True:
            try:
                return self._queue.get_nowait()
            except queue.Empty:
                await arrived.wait()
                arrived.clear()


class Feed(Protocol):
    """Where the futures of a stream come from.

    Attributes:
        site: What messages say about the call.
        workers: The workers that are asked.
        arrived: What tells of futures that are done.
        is_open: Whether more are to come.
    """

    site: CallSite
    workers: Workers
    arrived: Arrivals[Any]

    @property
    def is_open(self) -> bool: ...  # noqa: D102

    def received(self, arrival: Any, /) -> Future[Any] | None:
        """Take a future that has arrived; it, if the user is to have it. Raises its error."""

    def pending(self) -> list[PendingCall]:
        """The calls that are waited for."""

    def close(self) -> None:
        """Cancel what has not been made."""


def pending_calls(futures: Mapping[Future[Any], Any]) -> list[PendingCall]:
    """The calls of some futures that are not done."""
    calls: list[Outcome] = [future._call for future in futures]
    return [call for call in calls if isinstance(call, PendingCall) and not call.is_done]


class ShareFeed:
    """The values of the ranks, each as it comes.

    Args:
        futures: One for each share of the ranks.
        workers: The workers that were asked.
    """

    def __init__(self, futures: Mapping[Future[Any], Share], workers: Workers) -> None:
        self.site = next(iter(futures))._call.site
        self.workers = workers
        self.arrived: Arrivals[Future[Any]] = Arrivals()
        self._left = dict(futures)
        for future in futures:
            future.add_done_callback(self.arrived.put)

    @property
    def is_open(self) -> bool:
        """Whether a rank has not replied."""
        return bool(self._left)

    def received(self, future: Future[Any]) -> Future[Any]:
        """As `Feed.received`."""
        del self._left[future]
        error = future.exception()
        if error is not None:
            raise error
        return future

    def pending(self) -> list[PendingCall]:
        """As `Feed.pending`."""
        return pending_calls(self._left)

    def close(self) -> None:
        """As `Feed.close`."""
        futures, self._left = self._left, {}
        for future in futures:
            future.cancel()


class ItemCall(PendingCall):
    """A call for the next item of a generator.

    Attributes:
        is_end: Whether there is none any more; known once it is done.
    """

    __slots__ = ("is_end",)

    def _conclude(self) -> None:
        self.is_end = self._values.get(self._collection.ranks[0], self) is None
        super()._conclude()


class ItemFeed:
    """The items of generators, of which each is asked for a few more than were taken.

    Args:
        opened: The futures of the calls that have begun with the generators, for each share of the ranks.
        ask: Asks a share for its next item.
        close: Closes the generators of some shares.
        maxsize: How many items of a share may be made before they are taken.
        workers: The workers that are asked.
    """

    def __init__(
        self,
        opened: Mapping[Future[Any], Share],
        ask: Callable[[Share], Future[Any]],
        close: Callable[[list[Share]], object],
        maxsize: int,
        workers: Workers,
    ) -> None:
        self.site = next(iter(opened))._call.site
        self.workers = workers
        self.arrived: Arrivals[Share] = Arrivals()
        self._opened = set(opened)
        self._share_of = dict(opened)
        self._asked = {share: deque([future]) for future, share in opened.items()}  # in the order of the items
        self._ended: set[Share] = set()
        self._ask, self._close = ask, close
        for future, share in opened.items():
            self._tell_when_done(future, share)
        try:
            for _ in range(maxsize):
                for share in opened.values():
                    self._ask_for_one(share)
        except BaseException:
            self.close()
            raise

    @property
    def is_open(self) -> bool:
        """Whether a generator has not ended."""
        return bool(self._share_of)

    def received(self, share: Share) -> Future[Any] | None:
        """As `Feed.received`; has the next item made.

        The items of a rank are done in their order, but may be told of in another.
        """
        future = self._asked[share].popleft()
        del self._share_of[future]
        error = future.exception()
        if error is not None:
            raise error
        if future in self._opened:
            self._opened.remove(future)
            return None
        if isinstance(future._call, ItemCall) and future._call.is_end:
            self._ended.add(share)
            return None
        if share not in self._ended:
            self._ask_for_one(share)
        return future

    def pending(self) -> list[PendingCall]:
        """As `Feed.pending`."""
        return pending_calls(self._share_of)

    def close(self) -> None:
        """As `Feed.close`."""
        asked, self._share_of = self._share_of, {}
        for future in asked:
            future.cancel()
        with contextlib.suppress(Exception):  # the group was closed, or has died
            self._close(sorted(set(self._asked) - self._ended))

    def _ask_for_one(self, share: Share) -> None:
        future = self._ask(share)
        self._share_of[future] = share
        self._asked[share].append(future)
        self._tell_when_done(future, share)

    def _tell_when_done(self, future: Future[Any], share: Share) -> None:
        future.add_done_callback(lambda _: self.arrived.put(share))
