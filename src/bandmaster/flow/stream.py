"""Streams: the results of a call one by one, as they arrive."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard

from bandmaster.calls.future import Future
from bandmaster.calls.progress import Once, progress
from bandmaster.calls.result import Done, note_calls
from bandmaster.contract import Workers
from bandmaster.errors import CallTimeout
from bandmaster.flow.feed import Arrival, Feed
from bandmaster.platform.forks import n_forks

if TYPE_CHECKING:
    from typing_extensions import Self


class Closing:
    """An iterator that is closed by `close`, by the end of a ``with`` block, or by the end of its last reference.

    Args:
        method: The method that makes its items, for messages.
        workers: Its workers.
        end: Frees its resources. It may be called again, and does not wait.
    """

    _is_open = False  # before it is constructed

    def __init__(self, method: str, workers: Workers, end: Callable[[], object]) -> None:
        self._method, self._workers, self._end = method, workers, end
        self._is_open, self._n_forks = True, n_forks()

    def __iter__(self) -> Self:
        return self

    def __aiter__(self) -> Self:
        return self

    def close(self) -> None:
        """Cancel what is not made yet; generators run their ``finally`` blocks. Closing twice is fine."""
        self._is_open = False
        try:
            self._end()
        except BaseException:  # Ctrl-C: the end of the last reference closes it
            self._is_open = True
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a stream cannot be copied or pickled: its end cancels its other results; share the stream itself with "
            "other threads and tasks, or pass on its results"
        )

    def __del__(self) -> None:
        # Not by `__dict__`, which is made then, and keeps all of a cycle for the next collection.
        if self._is_open and self._n_forks == n_forks():
            with contextlib.suppress(Exception):  # at exit, no thread can be started
                progress.add(Once(self._workers, self._end))  # there: garbage may be collected under any lock

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._method}, {'open' if self._is_open else 'ended'}>"


class Stream(Closing):
    """Iterates over the results of a call as they arrive; `GroupMethod.stream` returns it.

    Each result is a `Future` that is done. Its ``rank`` is the rank that made it, and its ``numbers`` are the numbers
    of its rows in the batch that was passed; None if no batch was split. Rows stay where they were made until
    ``result()`` is called, so that futures can be passed on to other calls.

    The stream ends after the last result, or with the error of the first that failed. `close`, the end of a ``with``
    block or the end of its last reference cancels the results that are not made yet. Several threads or tasks may
    iterate over one stream: each result goes to one of them.
    """

    def __init__(self, feed: Feed) -> None:
        self._feed, self._arrivals = feed, feed.arrivals
        super().__init__(feed.site.method, feed.workers, feed.close)

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

    async def __anext__(self) -> Future[Any]:
        """Wait for the next result in an event loop; see `__next__`. Cancelling the waiting task closes the stream."""
        timeout_s = self._feed.site.limits().timeout
        with self._closing_after_errors():
            while self._is_open:
                try:
                    future = await self._arrivals.get_async(timeout_s)
                except queue.Empty:
                    self._check_debugged(timeout_s)
                    continue
                if self._is_item(future):
                    return future
        raise StopAsyncIteration

    def _is_item(self, arrival: Arrival) -> TypeGuard[Future[Any]]:
        """Whether an arrival is a result. Raises the error of the call if it has ended with one."""
        if isinstance(arrival, Done):
            self._arrivals.put(arrival)  # for another thread that waits
            was_open, self._is_open = self._is_open, False
            if arrival.error is not None and was_open:
                raise arrival.error
        elif arrival is None:
            self._feed.send()  # what could not be sent before, for example as it was not the group's turn
        else:
            self._feed.taken(arrival)
            return True
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
                    note_calls(error, [self._feed])
            finally:
                Closing.close(self)
            raise

    def _check_debugged(self, timeout_s: float | None) -> None:
        """Raise `CallTimeout`, unless a rank is in a debugger: then the deadline begins anew."""
        assert timeout_s is not None, "only a deadline ends the wait early"
        what_next = "go on iterating over error.stream to wait again, or end it with error.stream.close()"
        late = self._feed.late(timeout_s, what_next)
        late.stream = self
        if not (timeout_s and late.is_debugged):
            raise late from None
