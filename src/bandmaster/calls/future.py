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
    """The result of a group call that may not have come yet; `GroupMethod.submit` returns it.

    There is no reader thread: the thread that waits for a result reads the replies. Any thread may use a future, any
    number of times; its outcome is always the same.
    """

    def __init__(self, call: PendingCall, owner: object = None) -> None:
        self._call = call
        self._owner = owner  # lives as long as this
        self._callbacks: list[Callable[[Future[T]], object]] = []
        self._is_watched = False

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result.

        Args:
            timeout: Seconds to wait; None uses the timeout of the call, the group or the library, in this order (see
                `GroupMethod.options`), and waits without limit if none is set.

        Raises:
            RemoteError: The method raised; the original exception is its cause.
            CollectError: A rank returned a value that cannot be pickled, unpickled or combined.
            WorkerDied: A worker process ended, or the group was closed or restarted.
            CallTimeout: A rank did not reply in time. The call still runs: wait for it again, or cancel it.
            CallCancelled: The call was cancelled.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        outcome: T = self._call.outcome
        return outcome

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the call, and return its exception; None if it succeeded.

        Args:
            timeout: Seconds to wait, as for `result`.

        Raises:
            CallTimeout: A rank did not reply in time.
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
        """Whether the call has a result or an error. Reads the replies that have arrived; does not block."""
        return self._call.wait(0)

    def running(self) -> bool:
        """Whether the call is not done. A call counts as running from the moment it is submitted."""
        return not self.done()

    def cancel(self) -> bool:
        """Cancel the call: ranks that run it are interrupted, and ranks that have not begun it skip it.

        An interrupted method gets a `KeyboardInterrupt` in its Python code; C code cannot be interrupted. A rank that
        still runs the call after the grace (see `GroupMethod.options`) is ended once a thread waits for any call of
        the group.

        Returns:
            True if the call was cancelled, False if it had already ended.

        Raises:
            UsageError: A signal handler called this during an operation of the group.
        """
        self._call.drive()  # what has been answered counts
        if self._call.is_done or self._call.is_over:
            return False
        self._call.cancel()
        return True

    def cancelled(self) -> bool:
        """Whether the call was cancelled before it ended."""
        return self._call.is_cancelled

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        """Call ``fn(self)`` once the call is done: now, in this thread, if it is; else in the thread of all callbacks.

        A slow callback delays all others. An exception that ``fn`` raises is logged.

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
        """Wait in an event loop, and return or raise as `result`. Cancelling the task that waits cancels the call."""
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
                    _log.exception("a callback added to a future of %s raised an exception", self._call.site.method)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Future cannot be pickled: it belongs to its controller; pass the value of future.result() instead"
        )

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
