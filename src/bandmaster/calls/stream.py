"""Streams: the results of a call one by one, as they come.

::

    submission ── a future for each share, item or chunk ──► Feed ── arrived ──► Stream ──► for, async for
                              ▲                                │
                              └── asks for more, as they are taken
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from bandmaster.calls.deadline import Deadline
from bandmaster.calls.future import Future
from bandmaster.calls.interruption import WaitedFor, note_calls
from bandmaster.calls.pending import CallSite, PendingCall
from bandmaster.calls.progress import progress
from bandmaster.contract import Workers
from bandmaster.errors import CallTimeout

if TYPE_CHECKING:
    from typing_extensions import Self

A = TypeVar("A")

__all__ = ["Arrivals", "Feed", "Stream"]


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
            CallTimeout: It has not come within the timeout (see `GroupMethod.options`). The stream stays open: go on
                iterating over ``error.stream``, or close it.
            RemoteError, WorkerDied, CallCancelled: As `Future.result`; the stream is closed.
        """
        timeout_s = self._feed.site.limits().timeout
        with self._waits(timeout_s):
            while self._feed.is_open:
                found = self._feed.received(self._feed.arrived.get(timeout_s))
                if found is not None:
                    return found
        raise StopIteration

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Future[Any]:
        """As `__next__`, in an event loop. Cancelling the task that waits closes the stream."""
        import asyncio  # here, as it takes a third of the time that the import of everything takes

        timeout_s = self._feed.site.limits().timeout
        with self._waits(timeout_s):
            while self._feed.is_open:
                try:
                    arrived = await asyncio.wait_for(self._feed.arrived.get_async(), timeout_s)
                except asyncio.TimeoutError:
                    raise queue.Empty from None
                found = self._feed.received(arrived)
                if found is not None:
                    return found
        raise StopAsyncIteration

    @contextlib.contextmanager
    def _waits(self, timeout_s: float | None) -> Iterator[None]:
        """An error of the call, or Ctrl-C, closes the stream; queue.Empty is the end of a wait, and does not."""
        try:
            yield
        except queue.Empty:
            assert timeout_s is not None, "only a deadline ends the wait early"
            raise self._late(timeout_s) from None
        except CallTimeout:
            raise
        except BaseException as error:
            try:
                if isinstance(error, KeyboardInterrupt):
                    missing = {rank for call in self._feed.pending() for rank in call.missing}
                    note_calls(error, [WaitedFor(self._feed.site.method, tuple(sorted(missing)), self._late)])
            finally:
                self.close()
            raise

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
        what_next = "go on iterating over error.stream to wait again, or end it with error.stream.close()"
        error = CallTimeout(self._feed.site.method, tuple(sorted(missing)), timeout_s, stacks, what_next)
        error.stream = self
        return error


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
        return self._queue.get(timeout=Deadline(timeout_s).left())

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
