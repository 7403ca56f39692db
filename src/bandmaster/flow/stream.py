"""Streams: the results of a call one by one, as they arrive.

::

    submission ── a future for each share, item or chunk ──► Feed ── arrived ──► Stream ──► for, async for
                              ▲                                │
                              └── requests more, as items are made and taken
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from bandmaster.calls.future import Future
from bandmaster.calls.interruption import WaitedFor, note_calls
from bandmaster.calls.progress import progress
from bandmaster.calls.result import Result
from bandmaster.errors import CallTimeout
from bandmaster.flow.feeds import Feed

if TYPE_CHECKING:
    from typing_extensions import Self


class Stream:
    """Iterates over the results of a call as they arrive; `GroupMethod.stream` returns it.

    Each result is a `Future` that is done. Its ``rank`` is the rank that made it, and its ``numbers`` are the numbers
    of its rows in the batch that was passed; None if no batch was split. Rows stay where they were made until
    ``result()`` is called, so that futures can be passed on to other calls.

    The stream ends after the last result, or with the error of the first that failed. `close`, the end of a ``with``
    block or the end of its last reference cancels the results that are not made yet. Several threads or tasks may
    iterate over one stream: each result goes to one of them.
    """

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

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
            while self._feed.is_open:
                try:
                    arrival = self._feed.arrived.get(timeout_s)
                except queue.Empty:
                    self._check_debugged(timeout_s)
                    continue
                found = self._feed.received(arrival)
                if found is not None:
                    return found
        raise StopIteration

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Future[Any]:
        """Wait for the next result in an event loop; see `__next__`. Cancelling the waiting task closes the stream."""
        import asyncio  # here, as it takes a third of the import time of the whole library

        timeout_s = self._feed.site.limits().timeout
        with self._closing_after_errors():
            while self._feed.is_open:
                try:
                    arrival = await asyncio.wait_for(self._feed.arrived.get_async(), timeout_s)
                except asyncio.TimeoutError:
                    self._check_debugged(timeout_s)
                    continue
                found = self._feed.received(arrival)
                if found is not None:
                    return found
        raise StopAsyncIteration

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
                    missing = {rank for call in self._feed.pending() for rank in call.missing}
                    note_calls(error, [WaitedFor(self._feed.site.method, tuple(sorted(missing)), self._late)])
            finally:
                self.close()
            raise

    def _check_debugged(self, timeout_s: float | None) -> None:
        """Raise `CallTimeout`, unless a rank is in a debugger: then the deadline begins anew."""
        assert timeout_s is not None, "only a deadline ends the wait early"
        late = self._late(timeout_s)
        if not (timeout_s and late.is_debugged):
            raise late from None

    def close(self) -> None:
        """Cancel the results that are not made yet; generators run their ``finally`` blocks. Closing twice is fine."""
        if self._feed.is_open:
            self._feed.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        feed = self.__dict__.get("_feed")
        if feed is not None and feed.is_open:
            with contextlib.suppress(Exception):  # at exit, no thread can be started
                progress.add(feed)  # the thread closes it, as garbage may be collected under any lock

    def __repr__(self) -> str:
        return f"<Stream of {self._feed.site.method}, {'open' if self._feed.is_open else 'ended'}>"

    def _late(self, timeout_s: float) -> CallTimeout:
        method, awaited = self._feed.site.method, self._feed.awaited
        calls: Sequence[Result] = self._feed.pending()
        what_next = "go on iterating over error.stream to wait again, or end it with error.stream.close()"
        if not calls and awaited is not None:
            what_next = f"{method} takes its rows, or was submitted behind it, and so was not sent: {what_next}"
            method, calls = awaited.site.method, [awaited]
        stacks: dict[int, str] = {}
        missing: dict[int, None] = {}
        for call in calls:
            missing.update(dict.fromkeys(call.missing))
            stacks.update(call.stacks())
        behind = next(filter(None, (call.behind for call in calls)), "")
        error = CallTimeout(method, tuple(sorted(missing)), timeout_s, stacks, what_next, behind=behind)
        error.stream = self
        return error
