"""`RequestFuture`: the future of one request."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any, NoReturn, TypeVar
from weakref import ref

from bandmaster.calls.future import Future
from bandmaster.errors import CallTimeout, ResourceError
from bandmaster.platform.deadline import Deadline
from bandmaster.platform.limits import start_thread
from bandmaster.requests.request import Request

T = TypeVar("T")


class RequestFuture(Future[T]):
    """The future of a request; see `Future`. If its ``timeout`` is over while it is waited for, it is cancelled."""

    _call: Request

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result; see `Future.result`.

        Args:
            timeout: Seconds to wait; then `CallTimeout` is raised, and the request goes on. None uses the timeout of
                the request, after which it is cancelled.
        """
        try:
            return super().result(timeout)
        except CallTimeout as late:
            if timeout is None:
                self._call.cancel()
                late.has_cancelled()
            raise

    def _until_news(self) -> Generator[Any, None, None]:
        """Wait for an outcome or an item. Cancelling the task that waits cancels the request."""
        request = self._call
        if request.has_news:
            return
        from bandmaster.requests.reader import LoopReader  # with asyncio, a third of the import time of the library

        reader, timeout_s = LoopReader.of(), request.site.limits().timeout
        if request.target.retries or not request.is_sent:
            request.router.advance_in(reader)
        with request.waiting(request):
            try:
                while not request.has_news:
                    waiter = reader.add(request)
                    if timeout_s is None:
                        yield from waiter
                        continue
                    deadline, timer = Deadline(timeout_s), reader.loop.call_later(timeout_s, _end, ref(waiter))
                    try:
                        yield from waiter
                    finally:
                        timer.cancel()
                    if not (deadline.left() or request.has_news):  # else another task has taken the item
                        late = yield from reader.loop.run_in_executor(None, self._late, timeout_s)
                        if not late.is_debugged:
                            late.future = self
                            late.has_cancelled()
                            raise late
            except GeneratorExit:  # the task is collected, at any point of what this thread does
                with contextlib.suppress(ResourceError):
                    start_thread("bandmaster-cancel", request.cancel)
                raise
            except BaseException:
                request.cancel()
                raise

    def __await__(self) -> Generator[Any, None, T]:
        """Wait in an event loop, and return the value."""
        yield from self._until_news()
        value: T = self._call.outcome()
        return value

    def __reduce__(self) -> NoReturn:
        raise TypeError("the future of a request cannot be pickled; pass the value that `await` or result() returns")


def _end(waiter: ref[Any]) -> None:
    """End a wait for news, for which the event loop reads on."""
    if not ((found := waiter()) is None or found.done()):
        found.set_result(None)
