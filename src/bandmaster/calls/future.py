"""The future of a group call: the words of `concurrent.futures`, and ``await``."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, Generic, NoReturn, TypeVar

from bandmaster.calls.pending import PendingCall
from bandmaster.calls.progress import progress
from bandmaster.contract import Ticket, Workers
from bandmaster.errors import CallTimeout

__all__ = ["Future"]

PATIENCE_S = 0.02

T = TypeVar("T")
_log = logging.getLogger(__name__)


class Future(Generic[T]):
    """A call that was sent to the workers and may not have answered yet.

    There is no reader thread: the thread that waits for a result reads the replies. A future may be asked from any
    thread and any number of times, and answers the same each time.
    """

    def __init__(self, call: PendingCall, owner: object = None) -> None:
        self._call = call
        self._owner = owner  # lives as long as this
        self._callbacks: list[Callable[[Future[T]], object]] = []
        self._is_watched = False

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result.

        Args:
            timeout: Seconds to wait; None waits as long as the call's own timeout says (see
                `GroupMethod.options`), which is as long as it takes if nobody said anything.

        Raises:
            RemoteError: The method raised; the original exception is its cause.
            CollectError: A rank returned what cannot be sent or joined.
            WorkerDied: A worker's process ended.
            CallTimeout: No answer in time; the call still runs and can be waited for again, or cancelled.
            CallCancelled: It was cancelled.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        outcome: T = self._call.outcome
        return outcome

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait, and return what `result` would raise; None if it would return.

        Raises:
            CallTimeout: No answer in time.
        """
        timeout_s = self._call.site.limits().timeout if timeout is None else timeout
        if not self._call.wait(timeout_s):
            assert timeout_s is not None, "only a deadline ends the wait early"
            raise self._late(timeout_s)
        return self._call.error

    def _late(self, timeout_s: float) -> CallTimeout:
        error = CallTimeout(self._call.site.method, self._call.missing, timeout_s, self._call.stacks())
        error.future = self
        return error

    def done(self) -> bool:
        """Whether the result or the error is there."""
        return self._call.wait(0)

    def running(self) -> bool:
        """Whether it is not: a call is on its way from the start."""
        return not self.done()

    def cancel(self) -> bool:
        """Cancel the call: ranks that run it are interrupted, and those that have not begun skip it.

        An interruption is an exception, a `KeyboardInterrupt`, in the method. One that is stuck in C code cannot be
        interrupted; a rank that has not stopped when the grace is over is ended as soon as anybody waits for a call
        of the group.

        Returns:
            Whether it was cancelled; False when it was done already.
        """
        self._call.drive()  # what has been answered counts
        if self._call.is_done or self._call.is_over:
            return False
        self._call.cancel()
        return True

    def cancelled(self) -> bool:
        """Whether it was cancelled before it was done."""
        return self._call.is_cancelled

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        """Call ``fn(self)`` once the future is done: at once if it is, else from the one thread of all callbacks.

        Callbacks that take long hold up those of other futures.

        Raises:
            ResourceError: The system allows no more threads or descriptors.
        """
        self._callbacks.append(fn)
        if self.done():
            self._run_callbacks()
        elif not self._is_watched:
            self._is_watched = True
            progress.add(_CallWatch(self._call, self._run_callbacks))

    def __await__(self) -> Generator[Any, None, T]:
        """Wait in an event loop. If the task that waits is cancelled, so is the call, as with `asyncio.wrap_future`."""
        import asyncio  # here, as it takes a third of the time that the import of everything takes

        loop = asyncio.get_running_loop()
        arrived = asyncio.Event()
        self.add_done_callback(lambda _: loop.call_soon_threadsafe(arrived.set))
        timeout_s = self._call.site.limits().timeout
        try:
            yield from asyncio.wait_for(arrived.wait(), timeout_s).__await__()
        except asyncio.TimeoutError:
            assert timeout_s is not None, "only a deadline ends the wait early"
            raise self._late(timeout_s) from None
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self.result()

    def _run_callbacks(self) -> None:
        while self._callbacks:
            with contextlib.suppress(IndexError):  # another thread was faster
                fn = self._callbacks.pop(0)
                try:
                    fn(self)
                except Exception:
                    _log.exception("a callback of %s raised", self._call.site.method)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Future stays in the process that made the call; pass future.result() instead")

    def __repr__(self) -> str:
        call = self._call
        if call.is_done or not call.missing:
            state = "done"
        else:
            state = f"{'cancelled, ' if call.is_cancelled else ''}waiting for rank {', '.join(map(str, call.missing))}"
        return f"<Future of {call.site.method}, {state}>"


class _CallWatch:
    """Has a call be done, and then something be called, though no thread waits for it."""

    def __init__(self, call: PendingCall, when_done: Callable[[], object]) -> None:
        self.workers: Workers = call.workers
        self.due: float | None = None
        self._call = call
        self._when_done = when_done
        look = partial(progress.look_at, self)
        call.on_done = look
        for ticket in list(call.tickets.values()):
            if isinstance(ticket, Ticket):
                ticket.on_done = look

    def look(self) -> bool:
        """Read what has arrived for the call."""
        if self._call.wait(0):
            self._when_done()
            return True
        due = self._call.due
        self.due = None if due is None else max(due, time.monotonic() + PATIENCE_S)  # another thread may be at it
        return False
