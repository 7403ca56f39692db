"""The future of a group call: the words of `concurrent.futures`, and ``await``."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Mapping
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

from bandmaster.backends import Crew
from bandmaster.errors import CallCancelled, CallTimeout, CollectError, RemoteError, WorkerDied
from bandmaster.failure import Failure, FailureKind
from bandmaster.mesh import Mesh
from bandmaster.options import CallOptions, default_options
from bandmaster.release import Release, Step

__all__ = ["CallInfo", "Future", "OpenCalls"]

T = TypeVar("T")
_log = logging.getLogger(__name__)

LOOK_AROUND_S = 5.0  # a call that is waited for may be given up by another thread meanwhile


class CallInfo(NamedTuple):
    """What a future says of its call, and how long it may take.

    Attributes:
        method: ``"Class.method"``.
        mesh: The group's.
        group: The group's name.
        options: How long it may take; None where nobody said so for this call.
        defaults: What the group says about its calls.
    """

    method: str
    mesh: Mesh
    group: str = ""
    options: CallOptions | None = None
    defaults: Mapping[str, float | None] = MappingProxyType({})

    def limits(self) -> CallOptions:
        """How long it may take, by the closest word."""
        return self.options or default_options().but(self.defaults)


class Future(Generic[T]):
    """A call that was sent to the workers and may not have answered yet.

    Nothing runs in the background: whoever waits reads the answers. It may be asked from any thread, and any
    number of times; it answers the same each time.
    """

    def __init__(
        self,
        crew: Crew,
        tickets: dict[int, Any],
        finish: Callable[[dict[int, Any]], T],
        call: CallInfo,
        others: OpenCalls | None = None,
    ) -> None:
        self._crew = crew
        self._pending = tickets
        self._finish = finish
        self._call = call
        self._others = others
        self._release: Release | None = None
        self._values: dict[int, Any] = {}
        self._failures: dict[int, Failure] = {}
        self._outcome: T | None = None
        self._error: BaseException | None = None
        self._is_done = self._is_cancelled = self._has_to_stop = False
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[Future[T]], object]] = []

    @classmethod
    def failed(cls, crew: Crew, failures: Mapping[int, Failure], call: CallInfo) -> Future[T]:
        """A call that was not even sent, because of what is known of some ranks."""
        future: Future[T] = cls(crew, {}, lambda _: None, call)  # type: ignore[arg-type,return-value]
        future._failures.update(failures)
        return future

    def while_sent(self) -> threading.Lock:
        """A context in which the call is sent: nobody else looks at it before that is done."""
        return self._lock

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result.

        Args:
            timeout: Seconds to wait; None waits as long as the call's own timeout says (see
                `GroupMethod.options`), which is as long as it takes if nobody said anything.

        Raises:
            RemoteError: The method raised; the original exception is its cause.
            CollectError: A rank returned what cannot be sent or joined.
            WorkerDied: A worker's process ended.
            CallTimeout: No answer in time; the call still runs and can be waited for again, or given up.
            CallCancelled: It was given up.
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
        timeout_s = self._call.limits().timeout if timeout is None else timeout
        if not self._settle(timeout_s):
            assert timeout_s is not None, "only a deadline ends the wait early"
            raise self._late(timeout_s)
        return self._error

    def _late(self, timeout_s: float) -> CallTimeout:
        missing = tuple(self._pending)
        error = CallTimeout(self._call.method, missing, timeout_s, self._crew.stacks(missing))
        error.future = self
        return error

    def done(self) -> bool:
        """Whether the result or the error is there."""
        return self._settle(0)

    def running(self) -> bool:
        """Whether it is not: a call is on its way from the start."""
        return not self.done()

    def cancel(self) -> bool:
        """Give the call up: ranks that run it are interrupted, those that have not begun pass over it.

        An interruption is an exception, a `KeyboardInterrupt`, in the method. One that is stuck in C code cannot be
        interrupted; a rank that has not stopped when the grace is over is ended as soon as anybody waits for a call
        of the group.

        Returns:
            Whether it was given up; False when it was done already.
        """
        if self.done():
            return False
        self._is_cancelled = True
        self._release = self._release or Release(self._call.limits().grace)
        now = time.monotonic()
        self._release.begin(now, patience_s=0.0)
        self._release.due(now)
        self._crew.give_up(self._pending)
        if self._others is not None:
            self._others.keep(self)
        return True

    def cancelled(self) -> bool:
        """Whether it was given up before it was done."""
        return self._is_cancelled

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
        timeout_s = self._call.limits().timeout
        try:
            yield from asyncio.wait_for(arrived.wait(), timeout_s).__await__()
        except asyncio.TimeoutError:
            assert timeout_s is not None, "only a deadline ends the wait early"
            raise self._late(timeout_s) from None
        return self.result()

    def _run_callbacks(self) -> None:
        self._settle(None)
        while self._callbacks:
            self._run_callback(self._callbacks.pop(0))

    def _run_callback(self, fn: Callable[[Future[T]], object]) -> None:
        try:
            fn(self)
        except Exception:
            _log.exception("a callback of %s raised", self._call.method)

    def _settle(self, timeout: float | None) -> bool:
        """Read answers until all are there; False when the time is over before."""
        if self._is_done:
            return True
        timeout = None if timeout is None or timeout > threading.TIMEOUT_MAX else max(0.0, timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self._lock.acquire(timeout=-1 if timeout is None else timeout):
            return False
        try:
            return self._is_done or self._read(deadline)
        finally:
            self._lock.release()

    def _read(self, deadline: float | None) -> bool:
        """Read until all answers are there; once a rank has failed, the others are let go of, which ends them too."""
        if self._crew.deaths:
            self._take(self._crew.wait(list(self._pending.values()), 0.0))  # what was answered before counts
        while self._pending:
            until = self._do_what_is_due(deadline)
            if self._has_to_stop:
                break
            left = LOOK_AROUND_S if until is None else min(max(0.0, until - time.monotonic()), LOOK_AROUND_S)
            self._take(self._crew.wait(list(self._pending.values()), left))
            if deadline is not None and self._pending and time.monotonic() >= deadline:
                return False
        self._conclude()
        return True

    def _do_what_is_due(self, deadline: float | None) -> float | None:
        """About this call and those before it; the moment at which there is more to do, the deadline at the latest."""
        ours = self._let_go()
        earlier = self._others.tend(self) if self._others is not None else None
        if ours is None and earlier is None:
            return deadline
        return min(moment for moment in (deadline, ours, earlier) if moment is not None)

    def _tend(self) -> float | None:
        """Take what has arrived and let go of who is to be let go, unless somebody waits and does so himself; the
        moment at which there is more to do."""
        if self._is_done or not self._lock.acquire(blocking=False):
            return None
        try:
            self._take(self._crew.wait(list(self._pending.values()), 0.0))
            moment = self._let_go()
            if not self._pending or self._has_to_stop:
                self._conclude()
            return moment
        finally:
            self._lock.release()

    def _let_go(self) -> float | None:
        """Do what is due about ranks that go on with a call that failed; the moment at which more is due."""
        deaths = self._crew.deaths
        if not (deaths or self._failures or self._release):
            return None
        now = time.monotonic()
        self._release = self._release or Release(self._call.limits().grace)
        if deaths:
            self._failures.update({rank: death for rank, death in deaths.items() if rank not in self._failures})
            self._release.after_a_death(now)
        elif self._failures:
            self._release.begin(now)
        while (step := self._release.due(now)) is not None:
            if step is Step.INTERRUPT:
                self._crew.give_up(self._pending)
            elif step is Step.END:
                self._end_the_stuck()
            else:
                self._has_to_stop = True
        return self._release.next

    def _end_the_stuck(self) -> None:
        """End ranks that are at this call still; those that have stopped have answered, others have not come to it."""
        assert self._release is not None, "it says that this is due"
        self._take(self._crew.wait(list(self._pending.values()), 0.0))
        if self._pending:
            why = f"ended by the controller, as it had not stopped in time after {self._reason()}"
            self._crew.end(self._pending, why)
            self._release.put_off_the_end(time.monotonic())

    def _reason(self) -> str:
        if self._failures:
            return f"{self._call.method} failed on rank {min(self._failures)}"
        return f"{self._call.method} was given up"

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
            if self._is_cancelled:
                self._error = CallCancelled(f"{self._call.method} was given up; make the call again")
            elif self._failures:
                self._error = self._first_cause()
            else:
                self._outcome = self._finish(self._values)
        except BaseException as error:  # collecting may run the user's code
            self._error = error
        self._is_done = True
        self._pending, self._values = {}, {}
        if self._others is not None:
            self._others.done(self)

    def _first_cause(self) -> BaseException:
        kinds = {failure.kind for failure in self._failures.values()}
        where = {rank: self._call.mesh.coordinates(rank) for rank in self._failures}
        if FailureKind.DIED in kinds or kinds == {FailureKind.CANCELLED}:
            kind: Callable[..., BaseException] = WorkerDied
        elif kinds <= {FailureKind.RESULT, FailureKind.CANCELLED}:
            kind = CollectError
        else:
            kind = RemoteError
        return kind(self._call.method, self._failures, where, self._call.group)

    def __repr__(self) -> str:
        state = "done" if self._is_done else f"waiting for rank {', '.join(map(str, self._pending))}"
        return f"<Future of {self._call.method}, {state}>"


class OpenCalls:
    """The calls of a group that may not be done, in the order they were sent.

    A rank can only begin with a call when it has ended those before. So who waits for one also looks after the ones
    before it: one that failed, and that nobody waits for, must not hold up the others for ever.
    """

    def __init__(self) -> None:
        self._calls: deque[weakref.ref[Future[Any]]] = deque()
        self._newest: Future[Any] | None = None  # if it is not done
        self._kept: set[Future[Any]] = set()  # given up, so that their users may have forgotten them

    def add(self, call: Future[Any]) -> None:
        """A call was sent."""
        self._forget_done()
        self._calls.append(weakref.ref(call))
        self._newest = call

    @property
    def newest(self) -> Future[Any] | None:
        """The call that was sent last, if it is not done."""
        return self._newest

    def give_up_newest(self, but: Future[Any] | None) -> None:
        """Ctrl-C came while the newest call was waited for, or before anybody had its future.

        Args:
            but: The newest when that call began, which it was not about.
        """
        if self._newest is not None and self._newest is not but:
            self._newest.cancel()

    def done(self, call: Future[Any]) -> None:
        """A call is done."""
        if self._newest is call:
            self._newest = None

    def keep(self, call: Future[Any]) -> None:
        """A call is to be looked after though nobody may know it any more."""
        self._kept.add(call)

    def tend(self, before: Future[Any]) -> float | None:
        """Look after the calls that were sent before one; the moment at which there is more to do."""
        self._forget_done()
        if self._calls and self._calls[0]() is before:
            return None
        moments = []
        for reference in list(self._calls):
            call = reference()
            if call is before:
                break
            if call is not None:
                moments.append(call._tend())
        self._kept = {call for call in list(self._kept) if not call._is_done}
        return min((moment for moment in moments if moment is not None), default=None)

    def _forget_done(self) -> None:
        calls = self._calls
        while calls and ((first := calls[0]()) is None or first._is_done):
            calls.popleft()
