"""The future of a group call: the words of `concurrent.futures`, and ``await``."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Mapping
from typing import Any, Generic, TypeVar

from bandmaster.backends import Crew
from bandmaster.errors import CallTimeout, CollectError, RemoteError, WorkerDied
from bandmaster.failure import Failure, FailureKind
from bandmaster.mesh import Mesh

__all__ = ["Future"]

T = TypeVar("T")
_log = logging.getLogger(__name__)

FAILURE_GRACE_S = 1.0  # once one rank has failed, how long the others may take before the error is raised


class Future(Generic[T]):
    """A call that was sent to the workers and may not have answered yet.

    Nothing runs in the background: whoever waits reads the answers. It may be asked from any thread, and any
    number of times; it answers the same each time.
    """

    def __init__(
        self,
        crew: Crew,
        tickets: Mapping[int, Any],
        finish: Callable[[dict[int, Any]], T],
        method: str,
        mesh: Mesh,
    ) -> None:
        self._crew = crew
        self._pending = dict(tickets)
        self._finish = finish
        self._method = method
        self._mesh = mesh
        self._values: dict[int, Any] = {}
        self._failures: dict[int, Failure] = {}
        self._outcome: T | None = None
        self._error: BaseException | None = None
        self._is_done = False
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[Future[T]], object]] = []

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result.

        Args:
            timeout: Seconds to wait; None waits as long as it takes.

        Raises:
            RemoteError: The method raised; the original exception is its cause.
            CollectError: A rank returned what cannot be sent or joined.
            WorkerDied: A worker's process ended.
            CallTimeout: No answer in time; the call still runs and can be waited for again.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self._outcome  # type: ignore[return-value]

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait, and return what `result` would raise; None if it would return.

        Raises:
            CallTimeout: No answer in time.
        """
        if not self._settle(timeout):
            assert timeout is not None, "only a deadline ends the wait early"
            raise CallTimeout(self._method, tuple(self._pending), timeout)
        return self._error

    def done(self) -> bool:
        """Whether the result or the error is there."""
        return self._settle(0)

    def running(self) -> bool:
        """Whether it is not: a call is on its way from the start."""
        return not self.done()

    def cancel(self) -> bool:
        """Always False: a call that was sent cannot be called back."""
        return False

    def cancelled(self) -> bool:
        """Always False."""
        return False

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        """Call ``fn(self)`` once the future is done, at once if it is; else from a thread that waits for it."""
        if self.done():
            self._run_callback(fn)
            return
        self._callbacks.append(fn)
        if len(self._callbacks) == 1:
            threading.Thread(target=self._run_callbacks, name="bandmaster-future", daemon=True).start()

    def __await__(self) -> Generator[Any, None, T]:
        import asyncio  # here, as it takes a third of the time that the import of everything takes

        loop = asyncio.get_running_loop()
        arrived = asyncio.Event()
        self.add_done_callback(lambda _: loop.call_soon_threadsafe(arrived.set))
        yield from arrived.wait().__await__()
        return self.result()

    def _run_callbacks(self) -> None:
        self._settle(None)
        while self._callbacks:
            self._run_callback(self._callbacks.pop(0))

    def _run_callback(self, fn: Callable[[Future[T]], object]) -> None:
        try:
            fn(self)
        except Exception:
            _log.exception("a callback of %s raised", self._method)

    def _settle(self, timeout: float | None) -> bool:
        """Read answers until all are there; False when the time is over before."""
        if self._is_done:
            return True
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self._lock.acquire(timeout=-1 if timeout is None else timeout):
            return False
        try:
            return self._is_done or self._read(deadline)
        finally:
            self._lock.release()

    def _read(self, deadline: float | None) -> bool:
        """Read until all answers are there, or, once a rank has failed or died, for a little longer at most."""
        give_up: float | None = None
        while self._pending:
            until = min((moment for moment in (deadline, give_up) if moment is not None), default=None)
            left = None if until is None else max(0.0, until - time.monotonic())
            if give_up is None and self._crew.deaths:
                left = 0.0  # what has been answered before counts; then nobody waits for the others as if nothing was
            self._take(self._crew.wait(list(self._pending.values()), left))
            if not self._pending:
                break
            self._failures.update({r: death for r, death in self._crew.deaths.items() if r not in self._failures})
            if self._failures and give_up is None:
                give_up = time.monotonic() + FAILURE_GRACE_S
            now = time.monotonic()
            if give_up is not None and now >= give_up:
                break
            if deadline is not None and now >= deadline:
                return False
        self._conclude()
        return True

    def _take(self, done: list[Any]) -> None:
        finished = None if len(done) == len(self._pending) else set(map(id, done))
        still = {}
        for rank, ticket in self._pending.items():
            if finished is not None and id(ticket) not in finished:
                still[rank] = ticket
                continue
            outcome = self._crew.fetch(ticket)
            if isinstance(outcome, Failure):
                self._failures[rank] = outcome
            else:
                self._values[rank] = outcome
        self._pending = still

    def _conclude(self) -> None:
        try:
            if self._failures:
                self._error = self._first_cause()
            else:
                self._outcome = self._finish(self._values)
        except BaseException as error:  # collecting may run the user's code
            self._error = error
        self._is_done = True
        self._pending, self._values = {}, {}

    def _first_cause(self) -> BaseException:
        kinds = {failure.kind for failure in self._failures.values()}
        where = {rank: self._mesh.coordinates(rank) for rank in self._failures}
        if FailureKind.DIED in kinds:
            return WorkerDied(self._method, self._failures, where)
        if kinds == {FailureKind.RESULT}:
            return CollectError(self._method, self._failures, where)
        return RemoteError(self._method, self._failures, where)

    def __repr__(self) -> str:
        state = "done" if self._is_done else f"waiting for rank {', '.join(map(str, self._pending))}"
        return f"<Future of {self._method}, {state}>"
