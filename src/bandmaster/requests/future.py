"""`RequestFuture`: the future of one request."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any, NoReturn, TypeVar

from bandmaster.calls.future import Future
from bandmaster.errors import CallTimeout, ResourceError
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
        except CallTimeout:
            if timeout is None:
                self._call.cancel()
            raise

    def __await__(self) -> Generator[Any, None, T]:
        """Wait in an event loop. Cancelling the task that waits cancels the request."""
        request = self._call
        if not request.is_done:
            from bandmaster.requests.reader import LoopReader  # with asyncio, a third of the import time of the library

            reader, timeout_s = LoopReader.of(), request.site.limits().timeout
            if request.target.retries or not request.is_sent:
                request.router.advance_in(reader)
            timer = None
            try:
                while not request.has_outcome:
                    waiter = reader.add(request)
                    timer = None if timeout_s is None else reader.loop.call_later(timeout_s, reader.tell, waiter)
                    yield from waiter
                    if not request.has_outcome:
                        assert timeout_s is not None, "only a deadline ends the wait early"
                        late = yield from reader.loop.run_in_executor(None, request.late, timeout_s)
                        if not late.is_debugged:
                            late.future = self
                            raise late
            except GeneratorExit:  # the task is collected, at any point of what this thread does
                with contextlib.suppress(ResourceError):
                    start_thread("bandmaster-cancel", request.cancel)
                raise
            except BaseException:
                request.cancel()
                raise
            finally:
                if timer is not None:
                    timer.cancel()
        request._conclude()
        done = request.done
        assert done is not None, "it was made"
        if done.error is not None:
            raise done.error
        value: T = done.value
        return value

    def __reduce__(self) -> NoReturn:
        raise TypeError("the future of a request cannot be pickled; pass the value that `await` or result() returns")
