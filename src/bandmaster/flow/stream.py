"""Streams: the results of a call one by one, as they arrive."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from bandmaster.calls.future import Future
from bandmaster.calls.progress import progress
from bandmaster.calls.result import WaitedFor, note_calls
from bandmaster.errors import CallTimeout
from bandmaster.flow.feed import Feed
from bandmaster.platform.deadline import Deadline

if TYPE_CHECKING:
    from typing_extensions import Self

Arrival: TypeAlias = "Future[Any] | None"


class Arrivals:
    """The queue of a stream: futures, and None where the feed has news.

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

    def drained(self) -> list[Future[Any]]:
        """Remove and return all futures."""
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._queue.get_nowait())
        return [future for future in found if future is not None]

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


class Stream:
    """Iterates over the results of a call as they arrive; `GroupMethod.stream` returns it.

    Each result is a `Future` that is done. Its ``rank`` is the rank that made it, and its ``numbers`` are the numbers
    of its rows in the batch that was passed; None if no batch was split. Rows stay where they were made until
    ``result()`` is called, so that futures can be passed on to other calls.

    The stream ends after the last result, or with the error of the first that failed. `close`, the end of a ``with``
    block or the end of its last reference cancels the results that are not made yet. Several threads or tasks may
    iterate over one stream: each result goes to one of them.
    """

    _is_open = False  # before it is constructed

    def __init__(self, feed: Feed, arrivals: Arrivals) -> None:
        self._feed, self._arrivals = feed, arrivals
        self._is_open = True

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Future[Any]:
        """Wait for the next result.

        Raises:
            StopIteration: There are no more results, or the stream was closed, perhaps by another thread.
            CallTimeout: No result has arrived within the timeout (see `GroupMethod.options`). The stream stays open:
                go on iterating over ``error.stream``, or close it.
            RemoteError, WorkerDied, CallCancelled: The call failed, see `Future.result`; the stream is closed.
        """
        timeout_s = self._feed.site.limits().timeout
        with self._closing_after_errors():
            while self._is_open:
                try:
                    future = self._arrivals.get(timeout_s)
                except queue.Empty:
                    self._check_debugged(timeout_s)
                    continue
                if self._is_item(future):
                    return future
        raise StopIteration

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Future[Any]:
        """Wait for the next result in an event loop; see `__next__`. Cancelling the waiting task closes the stream."""
        import asyncio  # here, as it takes a third of the import time of the whole library

        timeout_s = self._feed.site.limits().timeout
        with self._closing_after_errors():
            while self._is_open:
                try:
                    future = await asyncio.wait_for(self._arrivals.get_async(), timeout_s)
                except asyncio.TimeoutError:
                    self._check_debugged(timeout_s)
                    continue
                if self._is_item(future):
                    return future
        raise StopAsyncIteration

    def _is_item(self, arrival: Arrival) -> TypeGuard[Future[Any]]:
        """Whether an arrival is a result. Raises the error of the call if it has ended with one."""
        if arrival is not None:
            self._feed.taken(arrival)
            return True
        if (done := self._feed.done) is None:
            self._feed.send()  # what could not be sent before, for example as it was not the group's turn
        else:
            self._arrivals.put(None)  # for another thread that waits
            was_open, self._is_open = self._is_open, False
            if done.error is not None and was_open:
                raise done.error
        return False

    @contextlib.contextmanager
    def _closing_after_errors(self) -> Iterator[None]:
        """Close the stream after an error of the call, or Ctrl-C, but not after a `CallTimeout`."""
        try:
            yield
        except CallTimeout:
            raise
        except BaseException as error:
            try:
                if isinstance(error, KeyboardInterrupt):
                    missing = {rank for call in self._feed.sent_calls() for rank in call.missing}
                    note_calls(error, [WaitedFor(self._feed.site.method, tuple(sorted(missing)), self._late)])
            finally:
                self._close()
            raise

    def _check_debugged(self, timeout_s: float | None) -> None:
        """Raise `CallTimeout`, unless a rank is in a debugger: then the deadline begins anew."""
        assert timeout_s is not None, "only a deadline ends the wait early"
        late = self._late(timeout_s)
        if not (timeout_s and late.is_debugged):
            raise late from None

    def _late(self, timeout_s: float) -> CallTimeout:
        error = self._feed.late(
            timeout_s, "go on iterating over error.stream to wait again, or end it with error.stream.close()"
        )
        error.stream = self
        return error

    def close(self) -> None:
        """Cancel the results that are not made yet; generators run their ``finally`` blocks. Closing twice is fine."""
        if self._is_open:
            self._close()

    def _close(self) -> None:
        self._is_open = False
        self._feed.look()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self._is_open:  # not by `__dict__`, which is made then, and keeps all of a cycle for the next collection
            with contextlib.suppress(Exception):  # at exit, no thread can be started
                progress.add(self._feed)  # the thread closes it, as garbage may be collected under any lock

    def __repr__(self) -> str:
        return f"<Stream of {self._feed.site.method}, {'open' if self._is_open else 'ended'}>"
