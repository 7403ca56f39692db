"""Constructs one worker and runs its calls in the worker's process. Every backend uses this code.

::

    call ── begun: decode the arguments, rows of other calls included ── a method of the worker, or one of `own_methods`
         ── wait for a coroutine on the worker's event loop ── encode the value, or describe the failure
"""

from __future__ import annotations

import importlib
import os
import pickle
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping, Sequence
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
    NOT_CONSTRUCTED,
    OPEN_STREAM,
    PRELOAD,
    RUN,
    STREAM,
    TIMES,
    Reply,
    Rows,
)
from bandmaster.errors.failure import Failure, FailureKind, reraise_if_from_signal, summary_of
from bandmaster.plan.columns import facts_of
from bandmaster.platform.forks import end_if_forked, n_forks
from bandmaster.platform.locks import SigintSafeLock
from bandmaster.roles import Roles
from bandmaster.wire.segment_reader import NO_ROWS, RowReaders
from bandmaster.wire.status_page import RUNNING, SINCE, ActivityWords, Interrupted
from bandmaster.worker import Report, Worker, WorkerContext, load_class, make_worker
from bandmaster.worker_process.call_path import PATH, RunningCall, earlier, here, running
from bandmaster.worker_process.event_loop import EventLoopThread, ended
from bandmaster.worker_process.kept_rows import with_rows

END = object()  # in place of an item: the generator has none any more
Arguments = Sequence[Payload] | memoryview  # encoded; a memoryview if they are a single pickle stream without buffers
Hook = Callable[[Any, str, Sequence[Any], dict[Any, Any]], object]  # worker, name of the method, its arguments


class Executor:
    """Holds one worker, runs its calls, and owns the event loop of its async methods.

    Attributes:
        activity: Shows which method runs.
        before: Called before each method runs; they may take keyword arguments away that are meant for them.
        after: Called after each method has run, as long as it raised nothing.
        device: The worker's device, to which tensors are decoded that the sender had on a GPU.
        times: The times of the call that has run last, packed as `bandmaster.contract.TIMES`; None if it was not timed.
        hold: Returns a context manager that defers interrupts: `StatusPage.hold` if the worker has its own process,
            else a `SigintSafeLock`, which defers Ctrl-C.
        own_methods: What is called in place of a method of the worker, with this, by the name that a call gives.
        generators: Those that have begun and not ended, by the name of their stream.
        early_limits: The numbers of items that streams of requests may make, which have not begun here.
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
        self.times: bytes | None = None
        self.worker: Worker | None = None
        self.own_methods = dict(_OWN_METHODS)
        self._marks: list[int] | None = None  # moments in ns of the call that runs, if it is timed
        self._context: WorkerContext | None = None
        self._loop: EventLoopThread | None = None
        self._awaited: Coroutine[Any, Any, Any] | None = None
        self._has_path = False  # whether a call was one of another worker, so that the path has to be set for each
        self.generators: dict[str, Any] = {}
        self.early_limits: dict[str, int] = {}
        self._n_forks = n_forks()  # a child that a method forks, and that leaves the method, is ended

    def prepare(self, context: WorkerContext) -> None:
        """Set the attributes that the worker has before its constructor runs."""
        self._context, self.device = context, context.device
        here.words = self._words

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
            is_timed: Whether to set `times`.

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
        self.times, self._marks = None, [monotonic_ns()] if is_timed else None
        try:
            try:
                args, kwargs, value = self.begun(method, parts, rows)
                if type(value) is CoroutineType:
                    value = self.wait_for(value)
                if self.after:
                    self.call_hooks(self.after, method, args, kwargs)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # the user's code may raise anything, SystemExit included
                if not isinstance(error, Exception):
                    reraise_if_from_signal(error)  # e.g. the SystemExit of a SIGTERM handler, which ends the process
                outcome: Payload | Rows | Failure | None = self.failure(error)
            else:
                if self._marks is not None:
                    self._marks.append(monotonic_ns())
                outcome = self.encoded(value, reply)
            if (marks := self._marks) is not None:
                end = monotonic_ns()  # a failure, or a call that is no method of the user's, has no moments in between
                self.times = TIMES.pack(*(marks if len(marks) == 3 else (marks[0], marks[-1], end)), end)
            return outcome
        finally:
            activity.words[RUNNING], self._marks = 0, None
            outcome = None  # the error of a failure refers to this frame, and to later ones, which have the arguments

    def begun(self, method: str, parts: Arguments, rows: RowReaders) -> tuple[Sequence[Any], dict[Any, Any], Any]:
        """The arguments of a method, and what it returns: a coroutine if it is async."""
        if method in _BEFORE_CALLS:
            _BEFORE_CALLS[method](self, parts)
            return (), {}, None
        args, kwargs = self._arguments(parts, rows)
        if PATH in kwargs or self._has_path:
            self._has_path = True
            earlier.set(kwargs.pop(PATH, ()))
        own = self.own_methods.get(method)
        if own is not None:
            return (), {}, own(self, *args, **kwargs)
        if self._marks is not None:
            self._marks.append(monotonic_ns())
        if self.before:
            self.call_hooks(self.before, method, args, kwargs)
        if self.worker is None:
            raise RuntimeError(NOT_CONSTRUCTED)
        return args, kwargs, getattr(self.worker, method)(*args, **kwargs)

    def call_hooks(self, hooks: Sequence[Hook], method: str, args: Sequence[Any], kwargs: dict[Any, Any]) -> None:
        """Call hooks for a method."""
        for hook in tuple(hooks):  # one may remove itself
            hook(self.worker, method, args, kwargs)

    def _arguments(self, parts: Arguments, rows: RowReaders) -> tuple[list[Any], dict[Any, Any]]:
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

    def encoded(self, value: Any, reply: int) -> Payload | Rows | Failure | None:
        """The value of a method as the reply has it, or the failure if it cannot be pickled."""
        end_if_forked(self._n_forks)
        if reply == Reply.DROP or value is END:
            return None
        try:
            payload = encode(value)
            if reply == Reply.KEEP and payload.nbytes > KEPT_FROM_NBYTES:
                with suppress(Exception):  # the controller says so
                    facts = facts_of(value, payload.nbytes)
                    return payload if facts is None else Rows(payload, facts)
            return payload
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # pickling runs the user's code, too
            if not isinstance(error, Exception):
                reraise_if_from_signal(error)
            what = f"the returned {type(value).__name__} cannot be pickled: {summary_of(error)}"
            return self.failure(TypeError(what).with_traceback(error.__traceback__), FailureKind.RESULT)

    def failure(self, error: BaseException, kind: FailureKind = FailureKind.RAISED) -> Failure:
        """Describe an exception that was raised in this worker, as CANCELLED if it follows from an interrupt."""
        end_if_forked(self._n_forks, error)
        failure = Failure.of(error, kind, self.device)
        if _follows_interruption(error):
            return replace(failure, kind=FailureKind.CANCELLED, summary="interrupted by the controller")
        return failure

    def _words(self, method: str) -> str:
        """A method of the worker with its rank, or for "" that which runs alone; "" if none does."""
        index = self.activity.words[RUNNING]
        name = method or next((name for name, n in self.activity.indices.items() if index and n == index), "")
        return f"{type(self.worker).__name__}.{name} on rank {getattr(self._context, 'rank', 0)}" if name else ""

    # --- calls that are no methods of the worker ---

    def _preload(self, parts: Arguments) -> None:
        """Import modules, in order. Raises ImportError if one cannot be imported, whatever it has raised."""
        for name in self._merge(parts):
            try:
                load_class(importlib.import_module, name)
            except (Exception, SystemExit) as error:
                raise ImportError(
                    f"cannot import {name!r}, which preload= of the ResourcePool names, on {os.uname().nodename}: "
                    f"{type(error).__name__}: {error}; install it there, or leave it out",
                    name=name,
                ) from error

    def _construct(self, parts: Arguments) -> None:
        assert self._context is not None, "it was set before the first call"
        try:
            cls, args, kwargs = load_class(self._merge, parts)
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"{error}: the worker class or an argument of its constructor needs this module, which the worker on "
                f"{os.uname().nodename} (working directory {os.getcwd()}) cannot import, although the controller can; "
                "install it on that host; or put it into a folder that both hosts have, at the same path, and that is "
                "in the controller's sys.path; or have Ray copy it: ray.init(runtime_env={'working_dir': '.'}) before "
                "the pool is made; see docs/start-up.md",
                name=error.name,
                path=error.path,
            ) from error
        self.worker = make_worker(cls, self._context, args, kwargs)

    def _run(self, function: Callable[..., object], /, *args: Any, **kwargs: Any) -> None:
        function(self, *args, **kwargs)

    def _open_stream(self, /, *args: Any, **kwargs: Any) -> Any:
        """Begin a generator method, and return its first item as `_next_item` does."""
        stream = kwargs.pop(STREAM)
        self.generators[stream] = self.begun_generator(args, kwargs, Generator | AsyncGenerator)
        return self._next_item(stream)

    def begun_generator(self, args: Sequence[Any], kwargs: dict[str, Any], kind: Any) -> Any:
        """The generator that a method returns, whose name is among the keyword arguments; raises if it has no yield."""
        if self.worker is None:
            raise RuntimeError(NOT_CONSTRUCTED)
        generator = getattr(self.worker, kwargs.pop(METHOD))(*args, **kwargs)
        if not isinstance(generator, kind):
            raise TypeError(f"a method with yield returned {type(generator).__name__} instead of a generator")
        return generator

    def _next_item(self, stream: str) -> Any:
        """The next item of a generator, a coroutine that returns it, or `END`.

        Raises:
            LookupError: The generator has ended, was closed, or was never begun here.
        """
        generator = self.generators.get(stream)
        if generator is None:
            raise LookupError(
                "this worker has no open generator of the stream: it was closed, or the worker was replaced or "
                "restarted; make the call again"
            )
        self.activity.rename(str(generator.__name__))
        if isinstance(generator, AsyncGenerator):
            return self._next_of_async(stream, generator)
        item = END
        try:
            item = next(generator, END)
        finally:
            if item is END:  # it has ended, or has raised
                del self.generators[stream]
        return item

    async def _next_of_async(self, stream: str, generator: AsyncGenerator[Any, Any]) -> Any:
        try:
            return await anext(generator)  # with a default, stacks would not show where the generator waits
        except BaseException as error:
            self.generators.pop(stream, None)
            if isinstance(error, StopAsyncIteration):
                return END
            raise

    def _close_stream(self, stream: str) -> Any:
        """Have a generator run its ``finally`` blocks; returns a coroutine that does so if it is async."""
        generator = self.generators.pop(stream, None)
        if isinstance(generator, AsyncGenerator):
            return _closed(generator)
        if generator is not None:
            generator.close()
        return None

    # --- async methods ---

    def wait_for(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the worker's event loop, and wait for its value, or for its end if it is cancelled."""
        future, call, method = None, RunningCall(), coroutine
        coroutine = self._ending_forks(method)
        try:
            running.set(call)  # the coroutine has it, and tasks that it makes
            loop = self.event_loop()
            with self.hold():  # an interrupt comes either before or after the coroutine is handed over
                self._awaited, future = coroutine, loop.start(coroutine)
            error = future.exception()
        except BaseException:  # the call was cancelled
            if future is None:
                method.close()
                coroutine.close()
            else:
                future.cancel()
                loop.start(ended(coroutine)).result()
            raise
        finally:
            call.is_over = True
            self._awaited = None
        try:
            if error is not None:
                raise error
            return future.result()
        finally:
            error = future = None  # the error refers to this frame, and to those that have the arguments

    async def _ending_forks(self, method: Coroutine[Any, Any, Any]) -> Any:
        """Await a method; a child that it has forked ends here, as it must not run the event loop."""
        try:
            value = await method
        except BaseException as error:
            end_if_forked(self._n_forks, error)
            raise
        end_if_forked(self._n_forks)
        return value

    def event_loop(self) -> EventLoopThread:
        """The event loop of async methods, which is made when it is first asked for."""
        with self.hold():
            if self._loop is None:
                self._loop = EventLoopThread(self.activity)
        return self._loop

    def told_of_tasks(self) -> tuple[str, str, str]:
        """Tell where the running call's coroutine waits, of the other tasks, and calls. Any thread may call this."""
        loop = self._loop
        awaited, tasks = ("", "") if loop is None else loop.told(self._awaited)
        return awaited, tasks, here.told_of_calls()

    @property
    def reports(self) -> Mapping[str, Report]:
        """The reports of the worker."""
        return {} if self.worker is None else self.worker.__bandmaster_reports__

    def close(self) -> None:
        """Stop the event loop and drop the worker."""
        if self._loop is not None:
            self._loop.close()
        if isinstance(self.worker, Roles):
            self.worker.drop_workers()
        self.worker = self._loop = None
        self.generators = {}


_BEFORE_CALLS = {PRELOAD: Executor._preload, CONSTRUCT: Executor._construct}
_OWN_METHODS: dict[str, Callable[..., Any]] = {
    RUN: Executor._run,
    OPEN_STREAM: Executor._open_stream,
    NEXT: Executor._next_item,
    CLOSE_STREAM: Executor._close_stream,
}


async def _closed(generator: AsyncGenerator[Any, Any]) -> None:
    await generator.aclose()


def _follows_interruption(error: BaseException | None) -> bool:
    """Whether an exception is `Interrupted`, or was raised while the method handled `Interrupted`."""
    seen = set[int]()  # contexts may go round in a circle
    while error is not None and id(error) not in seen and not isinstance(error, Interrupted):
        seen.add(id(error))
        error = error.__context__
    return isinstance(error, Interrupted)
