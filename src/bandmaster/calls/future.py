"""The future of a group call, with the methods of `concurrent.futures.Future` and ``await``."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, cast
from weakref import ref

from bandmaster.calls.derived import Derived
from bandmaster.calls.progress import progress
from bandmaster.calls.request import encode_argument
from bandmaster.calls.result import Result, note_calls
from bandmaster.codec import decode
from bandmaster.errors import ArgumentError, BandmasterError, CallTimeout, ResourceError, UsageError
from bandmaster.errors.failure import reraise_if_from_signal
from bandmaster.plan.batch import required_batch
from bandmaster.plan.batch_types import KNOWN_BY_NAME, BatchType, Index
from bandmaster.platform.deadline import Deadline
from bandmaster.rows import table as handles
from bandmaster.rows.handle import Handle
from bandmaster.rows.kept import released_rows
from bandmaster.rows.table import Table

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")
_log = logging.getLogger(__name__)


class Claim:
    """Held by a call that has not yet read the rows of a future. `Future.release` frees them when no claim is left.

    Attributes:
        end: Called when it is collected. It is no `weakref.finalize`, whose registry would keep the call for ever if
            its error has a traceback with the holder of the claim.
    """

    __slots__ = ("__weakref__", "end")

    def __init__(self) -> None:
        self.end: Callable[[], object] = bool

    def __del__(self) -> None:
        getattr(self, "end", bool)()  # there is none if Ctrl-C has come before it was constructed


RELEASED = Claim()  # that of a future whose rows were released: to release them again does nothing


class Future(Handle, Generic[T]):
    """The result of a group call, which may be pending; `GroupMethod.submit` returns it.

    There is no reader thread: the thread that waits for a result reads the replies. Any thread may use a future, any
    number of times; its outcome is always the same.

    If the protocol concatenates rows, they stay on the ranks that made them until `result` brings them here. Pass the
    future itself as an argument of another call: each rank reads only its own rows, from where they lie.

    Attributes:
        rank: The rank that made it, if it comes from a stream; else None.
        numbers: The numbers of its rows in the batch that was passed, if it comes from a stream and the call has split
            a batch; else None.
    """

    _claim: Claim | None = None
    _claims_on_parents: Sequence[ref[Claim]] = ()
    _was_released = False  # by the user; calls with claims may still take the rows

    def __init__(self, call: Result, owner: object = None) -> None:
        self._call = call
        self._owner = owner  # lives as long as this
        self.rank: int | None = None
        self.numbers: Index | None = None

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result.

        Args:
            timeout: Seconds to wait; None uses the timeout of the call, the group or the library, in this order (see
                `GroupMethod.options`), and waits without limit if none is set.

        Raises:
            RemoteError: The method raised; the original exception is its cause.
            CollectError: A rank returned a value that cannot be pickled, unpickled or combined.
            WorkerDied: A worker process ended, or the group was closed or restarted.
            RowsLost: Rows that were left on the ranks, or that the call takes, were released, or lost with a host.
            CallTimeout: A rank did not reply in time, or its rows did not come from its host. The call still runs: wait
                for it again, or cancel it.
            CallCancelled: The call was cancelled.
        """
        deadline = self._wait(timeout)
        call = self._call
        if self._was_released and call.keeps_rows and not call.is_released:  # other calls have yet to take them
            if (done := call.done) is not None and done.error is not None:
                raise done.error
            raise released_rows(call.site.method)
        try:
            value: T = call.value(deadline)
        except CallTimeout as late:
            late.future = self
            raise
        return value

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the call, and return its exception; None if it succeeded.

        Args:
            timeout: Seconds to wait, as for `result`.

        Raises:
            CallTimeout: A rank did not reply in time.
        """
        self._wait(timeout)
        self._call.check_small_rows()  # it costs little to know whether they can be joined
        return _error_of(self._call)

    def _wait(self, timeout: float | None) -> Deadline:
        """Wait for the call. Returns the deadline, by which its rows have to arrive as well."""
        deadline = Deadline(self._call.site.limits().timeout if timeout is None else timeout)
        try:
            while not self._has_come(deadline.timeout_s):
                self._check_debugged(deadline.timeout_s)
                deadline = Deadline(deadline.timeout_s)
        except KeyboardInterrupt as error:
            note_calls(error, [self._call])
            raise
        return deadline

    def _has_come(self, timeout_s: float | None) -> bool:
        """Wait for what this is the future of; False if the time is over before."""
        return self._call.wait(timeout_s)

    def _late(self, timeout_s: float) -> CallTimeout:
        """The `CallTimeout` to raise after a wait of ``timeout_s``."""
        return self._call.late(timeout_s)

    def _check_debugged(self, timeout_s: float | None) -> None:
        """Raise `CallTimeout`, unless a rank is in a debugger: then the deadline begins anew."""
        assert timeout_s is not None, "only a deadline ends the wait early"
        late = self._late(timeout_s)
        late.future = self
        if not (timeout_s and late.is_debugged):
            raise late from None

    def done(self) -> bool:
        """Whether the call has a result or an error. Reads the replies that have arrived; does not block."""
        return self._call.wait(0)

    def running(self) -> bool:
        """Whether the call is not done. A call counts as running from the moment it is submitted."""
        return not self.done()

    def result_or_cancel(self, timeout: float | None = None) -> T:
        """Wait for the result as `result` does, for a caller that alone has the future: Ctrl-C cancels the call."""
        try:
            return self.result(timeout)
        except CallTimeout:
            raise  # it can still be waited for
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> bool:
        """Cancel the call: ranks that run it are interrupted, and ranks that have not begun it skip it.

        An interrupted method gets a `KeyboardInterrupt` in its Python code; C code cannot be interrupted. A rank that
        still runs the call after the grace (see `GroupMethod.options`) is ended once a thread waits for any call of
        the group.

        Returns:
            True if the call was cancelled; False if it had already ended, or if this future is an operation on the
            rows of other futures, which other code may use.

        Raises:
            UsageError: A signal handler called this during an operation of the group.
        """
        return not self.done() and self._call.cancel()

    def cancelled(self) -> bool:
        """Whether the call was cancelled before it ended."""
        return self._call.is_cancelled

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        """Call ``fn(self)`` once the call is done: now, in this thread, if it is; else in the thread of all callbacks.

        A slow callback delays all others, and the items of streams and the requests of maps, which the same thread
        handles: it must not wait for those. It may wait for calls by `result`; `wait`, `as_completed` and ``await``
        raise `UsageError` there if a call is not done. An exception that ``fn`` raises is logged.

        Raises:
            ResourceError: The system allows no more threads or descriptors.
        """
        self._call.watch(partial(self._call_back, fn))

    def _call_back(self, fn: Callable[[Future[T]], object]) -> None:
        try:
            fn(self)
        except BaseException as error:  # such as SystemExit: others' callbacks run in this thread as well
            reraise_if_from_signal(error)
            _log.exception("a callback added to a future of %s raised an exception", self._call.site.method)

    def __await__(self) -> Generator[Any, None, T]:
        """Wait in an event loop, and return or raise as `result`. Cancelling the task that waits cancels the call."""
        import asyncio  # here, as it takes a third of the import time of the whole library

        loop = asyncio.get_running_loop()
        arrived = loop.create_future()

        def tell(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop was closed
                loop.call_soon_threadsafe(arrived.set_result, None)

        self.add_done_callback(tell)
        if self._call.done is None:
            progress.check_may_wait()
        timeout_s = self._call.site.limits().timeout
        try:
            while not arrived.done():
                yield from asyncio.wait([arrived], timeout=timeout_s).__await__()  # `wait_for` may lose a cancellation
                if not arrived.done():
                    self._check_debugged(timeout_s)
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self.result()

    def release(self) -> None:
        """Release the rows that the call has left on its ranks, as `with` does. Later uses of them raise `RowsLost`.

        If the call is not done, its rows are freed as soon as they are there. Calls that were submitted before still
        get them. Without `release` they are freed when no future refers to them any more, and no rank reads them.
        """
        self._was_released = True
        claim, self._claim = self._claim, RELEASED
        if claim is None:
            self._call.release()
        elif claim is not RELEASED:
            claim.end = self._call.release
        with contextlib.suppress(ResourceError):  # then they are freed when a thread waits for a call of the group
            self.add_done_callback(lambda _: None)  # so that the replies are read

    def _claims(self) -> list[Claim]:
        """The claims whose holder keeps `release` from freeing the rows, and the rows from which they are derived."""
        own: Claim = self.__dict__.setdefault("_claim", Claim())  # one, also if two threads make the first at a time
        return [own, *(claim for one in self._claims_on_parents if (claim := one()) is not None)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _table(self) -> Table:
        """The rows; waits for the call.

        Raises:
            ArgumentError: The future has no rows.
            Exception: The exceptions of `Future.result`.
        """
        if not self._call.keeps_rows:
            raise ArgumentError(
                f"the call of {self._call.site.method} leaves no rows on the ranks, since its protocol does not "
                "concatenate any; pass the value of future.result()"
            )
        self._wait(None)
        error = _error_of(self._call)
        if error is not None:
            raise error
        return self._call.table()

    def _derived(self, what: str, others: Sequence[Handle], make: Callable[[Sequence[Table]], Table]) -> Self:
        return cast("Self", derived([self, *others], what, make))

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Future cannot be pickled: it belongs to its controller; pass it as an argument of its own, not inside "
            "of another value, or pass the value of future.result()"
        )

    def _repr_svg_(self) -> str | None:
        """A drawing of the places of its rows, for a notebook; None if there are none yet."""
        if not (self.done() and self._call.keeps_rows and _error_of(self._call) is None):
            return None
        try:
            return self._drawing()
        except BandmasterError:  # they were released, or cannot be one batch
            return None

    def __repr__(self) -> str:
        return f"<Future of {self._call.site.method}, {self._call.state}>"


def _error_of(call: Result) -> BaseException | None:
    """The error of a result that is done."""
    return None if call.done is None else call.done.error


def derived(given: Sequence[Handle], what: str, make: Callable[[Sequence[Table]], Table]) -> Future[Any]:
    """A future of the table that ``make`` returns for the tables of some futures."""
    futures = [one for one in given if isinstance(one, Future)]
    if len(futures) < len(given):
        wrong = next(type(one).__name__ for one in given if not isinstance(one, Future))
        raise UsageError(f"{what} takes futures of calls, got {wrong}")
    first = futures[0]._call.site
    site = first if what == "rows" else first._replace(method=f"{first.method}.{what}")
    call = Derived(futures, site, lambda: make([future._table() for future in futures]))
    made: Future[Any] = Future(call, tuple([future._owner for future in futures]))
    made._claims_on_parents = [ref(claim) for future in futures for claim in future._claims()]
    return made


def claims_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Claim]:
    """The claims of a call on the rows of the futures among its arguments."""
    return [claim for value in (*args, *kwargs.values()) if type(value) is Future for claim in value._claims()]


def as_it_is(value: Any, name: str, method: str) -> Any:
    """A copy of an argument of a method, which later changes by the caller do not affect; a future itself.

    Raises:
        ArgumentError: It cannot be pickled.
    """
    if value is None or isinstance(value, Future | str | int | float | bytes):
        return value
    return decode(encode_argument(value, name, method).private())


def concat(futures: Sequence[Future[Any]]) -> Future[Any]:
    """A future of the rows of some futures with the same columns, one after the other. No row moves.

    Raises:
        UsageError: The list is empty, or contains something else than futures.
    """
    if not futures:
        raise UsageError("there is nothing to concatenate; pass at least one future")
    return derived(
        futures, "concat", lambda tables: handles.concat(tables, [f"future {n}" for n in range(len(tables))])
    )


def _column(rows: Future[Any], name: str) -> Any:
    return required_batch(rows.select(name).result()).column(name) if name in rows.schema else None


KNOWN_BY_NAME[Future.__module__, Future.__qualname__] = BatchType(
    rows=len,
    split=lambda rows, start, stop: rows[start:stop],
    concat=concat,
    take=lambda rows, numbers: rows[numbers],
    column=_column,
    is_elsewhere=True,
)
