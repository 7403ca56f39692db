"""Constructs one worker and runs its calls in the worker's process. Every backend uses this code."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from time import monotonic, monotonic_ns
from types import CoroutineType
from typing import Any

from bandmaster.codec import Payload, decode, encode
from bandmaster.contract import (
    CLOSE_STREAM,
    CONSTRUCT,
    KEPT_FROM_NBYTES,
    METHOD,
    NEXT,
    OPEN_STREAM,
    PRELOAD,
    RUN,
    STREAM,
    Reply,
    Rows,
)
from bandmaster.errors import BatchError
from bandmaster.errors.failure import Failure, FailureKind, reraise_if_from_signal, summary_of
from bandmaster.plan.columns import facts_of
from bandmaster.platform.locks import SigintSafeLock
from bandmaster.roles import Roles
from bandmaster.wire.segment_reader import NO_ROWS, RowReaders
from bandmaster.wire.status_page import RUNNING, SINCE, ActivityWords, Interrupted
from bandmaster.worker import ClassLoading, Worker, WorkerContext, make_worker
from bandmaster.worker_process.imports import importing, preload
from bandmaster.worker_process.kept_rows import with_rows
from bandmaster.worker_process.streams import END, Streams
from bandmaster.worker_process.tasks import EventLoopThread

Arguments = Sequence[Payload] | memoryview  # encoded; a memoryview if they are a single pickle stream without buffers
Hook = Callable[[Any, str, Sequence[Any], dict[Any, Any]], object]  # worker, name of the method, its arguments


class Executor:
    """Holds one worker, runs its calls, and owns the event loop of its async methods.

    Attributes:
        activity: Shows which method runs.
        before: Called before each method runs; they may take keyword arguments away that are meant for them.
        after: Called after each method has run, as long as it raised nothing.
        device: The worker's device, to which tensors are decoded that the sender had on a GPU.
        marks: Moments in ns of a call that is timed, until `times` is called; None if none is.
        hold: Returns a context manager that defers interrupts: `StatusPage.hold` if the worker has its own process,
            else a `SigintSafeLock`, which defers Ctrl-C.
        worker: The user's object; None before it is constructed and after `close`.
    """

    def __init__(
        self,
        hold: Callable[[], AbstractContextManager[None]] = SigintSafeLock,
        activity: ActivityWords | None = None,
    ) -> None:
        self.device = "cpu"
        self.hold = hold
        self.activity = activity or ActivityWords()
        self.before: list[Hook] = []
        self.after: list[Hook] = []
        self.marks: list[int] | None = None
        self.worker: Worker | None = None
        self._context: WorkerContext | None = None
        self._loop: EventLoopThread | None = None
        self._awaited: Coroutine[Any, Any, Any] | None = None
        self._streams = Streams()

    def prepare(self, context: WorkerContext) -> None:
        """Set the attributes that the worker has before its constructor runs."""
        self._context, self.device = context, context.device

    def call(
        self, method: str, reply: int, parts: Arguments, rows: RowReaders = NO_ROWS, is_timed: bool = False
    ) -> Payload | Rows | Failure | None:
        """Run one call.

        Args:
            method: Name of the method, or what `bandmaster.contract` names in place of one.
            reply: What happens to the returned value, a `bandmaster.contract.Reply`.
            parts: The encoded arguments, in memory that the worker owns; a memoryview if they are a single pickle
                stream without buffers.
            rows: What reads the kept rows that arguments refer to, by label.
            is_timed: Whether `times` is called afterwards.

        Returns:
            The encoded value, with what is known of its rows if they are kept; None if the value is dropped; or the
            failure.

        Raises:
            KeyboardInterrupt: The call was interrupted, or the method raised it.
            BaseException: A signal handler raised it, to end the process.
        """
        activity = self.activity
        activity.times[SINCE] = monotonic()
        activity.words[RUNNING] = activity.indices[method]
        if is_timed:
            self.marks = [monotonic_ns()]
        try:
            try:
                value = self._value(method, parts, rows)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # the user's code may raise anything, SystemExit included
                reraise_if_from_signal(error)  # e.g. the SystemExit of a SIGTERM handler, which ends the process
                return self.failure(error)
            if self.marks is not None:
                self.marks.append(monotonic_ns())
            return self._encoded(value, reply)
        finally:
            activity.words[RUNNING] = 0

    def times(self) -> tuple[int, int, int, int]:
        """The times as in `bandmaster.contract.TIMES` of the call that has run last and was timed.

        A call that has failed, or is not one of a method of the user's, has no moments in between.
        """
        marks, self.marks = self.marks, None
        assert marks is not None, "the caller has looked"
        end = monotonic_ns()
        begun, decoded, ran = marks if len(marks) == 3 else (marks[0], marks[-1], end)
        return begun, decoded, ran, end

    async def call_beside(
        self, method: str, reply: int, parts: Sequence[Payload], rows: RowReaders
    ) -> Payload | Rows | Failure | None:
        """Run one call on the event loop of the caller, where calls of async methods overlap; see `call`."""
        with self.activity.beside(method):
            return await self._call_beside(method, reply, parts, rows)

    async def _call_beside(
        self, method: str, reply: int, parts: Sequence[Payload], rows: RowReaders
    ) -> Payload | Rows | Failure | None:
        try:
            args, kwargs, value = self._begun(method, parts, rows)
            if type(value) is CoroutineType:
                value = await value
            self._call_hooks(self.after, method, args, kwargs)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            return self.failure(error)
        return self._encoded(value, reply)

    def _value(self, method: str, parts: Arguments, rows: RowReaders) -> Any:
        """The value of a method. An async method is awaited."""
        args, kwargs, value = self._begun(method, parts, rows)
        if type(value) is CoroutineType:
            value = self._await(value)
        if self.after:
            self._call_hooks(self.after, method, args, kwargs)
        return value

    def _begun(self, method: str, parts: Arguments, rows: RowReaders) -> tuple[Sequence[Any], dict[Any, Any], Any]:
        """The arguments of a method, and what it returns: a coroutine if it is async."""
        own = _OWN.get(method)
        if own is not None:
            return (), {}, own(self, parts, rows)
        args, kwargs = self._arguments(parts, rows)
        if self.marks is not None:
            self.marks.append(monotonic_ns())
        if self.before:
            self._call_hooks(self.before, method, args, kwargs)
        return args, kwargs, getattr(self.worker, method)(*args, **kwargs)

    def _call_hooks(self, hooks: Sequence[Hook], method: str, args: Sequence[Any], kwargs: dict[Any, Any]) -> None:
        for hook in tuple(hooks):  # one may remove itself
            hook(self.worker, method, args, kwargs)

    def _arguments(self, parts: Arguments, rows: RowReaders = NO_ROWS) -> tuple[list[Any], dict[Any, Any]]:
        """The arguments of a call, by position and by keyword."""
        args: list[Any] = []
        kwargs: dict[Any, Any] = {}
        is_stream = type(parts) is memoryview and self.device == "cpu"
        items: Any = pickle.loads(parts) if is_stream else self._merge(parts)  # type: ignore[arg-type]
        if rows:
            assert self._context is not None, "it was set before the first call"
            items = with_rows(items, rows, self._context.rank, self._decode, has_views=self.device == "cpu")
        for key, argument in items:
            if type(key) is int:
                args.append(argument)
            else:
                kwargs[key] = argument
        return args, kwargs

    def _encoded(self, value: Any, reply: int) -> Payload | Rows | Failure | None:
        if reply == Reply.DROP or value is END:
            return None
        try:
            payload = encode(value)
            if reply == Reply.KEEP and payload.nbytes > KEPT_FROM_NBYTES:
                with suppress(BatchError):  # the controller says so
                    facts = facts_of(value, payload.nbytes)
                    return payload if facts is None else Rows(payload, facts)
            return payload
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # pickling runs the user's code, too
            reraise_if_from_signal(error)
            what = f"the returned {type(value).__name__} cannot be pickled: {summary_of(error)}"
            return self.failure(TypeError(what).with_traceback(error.__traceback__), FailureKind.RESULT)

    def _preload(self, parts: Arguments, rows: RowReaders) -> None:
        with ClassLoading():
            preload(self._merge(parts))

    def _construct(self, parts: Arguments, rows: RowReaders) -> None:
        assert self._context is not None, "it was set before the first call"
        with ClassLoading(), importing():
            cls, args, kwargs = self._merge(parts)
        self.worker = make_worker(cls, self._context, args, kwargs)

    def _run(self, parts: Arguments, rows: RowReaders) -> None:
        (function, *args), kwargs = self._arguments(parts)
        function(self, *args, **kwargs)

    def _open_stream(self, parts: Arguments, rows: RowReaders) -> Any:
        args, kwargs = self._arguments(parts, rows)
        stream, method = kwargs.pop(STREAM), kwargs.pop(METHOD)
        self.activity.rename(method)
        self._streams.open(stream, getattr(self.worker, method)(*args, **kwargs))
        return self._streams.next(stream)

    def _next(self, parts: Arguments, rows: RowReaders) -> Any:
        (stream,), _ = self._arguments(parts)
        self.activity.rename(self._streams.method_of(stream))
        return self._streams.next(stream)

    def _close_stream(self, parts: Arguments, rows: RowReaders) -> Any:
        (stream,), _ = self._arguments(parts)
        return self._streams.close(stream)

    def _merge(self, parts: Arguments) -> Sequence[Any]:
        """The items of all parts: keyword arguments first, then positional arguments in order, as within each part."""
        if type(parts) is memoryview:
            parts = [Payload(parts)]
        if len(parts) == 1:
            merged: Sequence[Any] = self._decode(parts[0])
            return merged
        items = [item for part in parts for item in self._decode(part)]
        return sorted(items, key=lambda item: item[0] if type(item[0]) is int else -1)

    def _decode(self, payload: Payload) -> Any:
        return decode(payload, self.device)

    def failure(self, error: BaseException, kind: FailureKind = FailureKind.RAISED) -> Failure:
        """Describe an exception that was raised in this worker, as CANCELLED if it follows from an interrupt."""
        failure = Failure.of(error, kind, self.device)
        if _follows_interruption(error):
            return replace(failure, kind=FailureKind.CANCELLED, summary="interrupted by the controller")
        return failure

    def run(self, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a method with plain arguments and return its plain value. An async method is awaited."""
        self.activity.begin(method)
        try:
            self._call_hooks(self.before, method, args, kwargs)
            value = getattr(self.worker, method)(*args, **kwargs)
            if type(value) is CoroutineType:
                value = self._await(value)
            self._call_hooks(self.after, method, args, kwargs)
            return value
        finally:
            self.activity.end()

    def _await(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        future = None
        try:
            with self.hold():
                self._loop = self._loop or EventLoopThread(self.activity)
            with self.hold():  # an interrupt comes either before or after the coroutine is handed over
                self._awaited, future = coroutine, self._loop.start(coroutine)
            error = future.exception()
        except BaseException:  # the call was cancelled
            if future is None:
                coroutine.close()
            else:
                future.cancel()
            raise
        finally:
            self._awaited = None
        if error is not None:
            raise error
        return future.result()

    def told_of_tasks(self) -> str:
        """Tell where the coroutine of the running call waits, and of the other tasks: two texts, as JSON."""
        return '["", ""]' if self._loop is None else self._loop.tasks.told(self._awaited)

    def close(self) -> None:
        """Stop the event loop and drop the worker."""
        if self._loop is not None:
            self._loop.close()
        if isinstance(self.worker, Roles):
            self.worker.drop_workers()
        self.worker = self._loop = None
        self._streams = Streams()


_OWN: dict[str, Callable[[Executor, Arguments, RowReaders], Any]] = {
    PRELOAD: Executor._preload,
    CONSTRUCT: Executor._construct,
    RUN: Executor._run,
    OPEN_STREAM: Executor._open_stream,
    NEXT: Executor._next,
    CLOSE_STREAM: Executor._close_stream,
}


def _follows_interruption(error: BaseException | None) -> bool:
    """Whether an exception is `Interrupted`, or was raised while the method handled `Interrupted`."""
    while error is not None and not isinstance(error, Interrupted):
        error = error.__context__
    return error is not None
