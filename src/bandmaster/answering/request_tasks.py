"""The requests that run on the event loop of a worker, beside each other, wherever they come from."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from functools import partial
from time import monotonic, monotonic_ns
from typing import Any, NamedTuple

from bandmaster.answering.item_stream import OWN_METHODS
from bandmaster.codec import Payload
from bandmaster.contract import CALLS_BACK, MORE_ITEMS, OPEN_ITEMS, TIMES, Reply, Rows
from bandmaster.errors.failure import Failure, FailureKind
from bandmaster.wire.segment_reader import NO_ROWS, RowReaders
from bandmaster.wire.status_page import N_TASKS
from bandmaster.worker_process.call_path import RunningCall, running
from bandmaster.worker_process.executor import Executor

Outcome = Payload | Rows | Failure | None
_CANCELLED = Failure(FailureKind.CANCELLED, "cancelled by the caller")


class ReceivedRequest(NamedTuple):
    """A request as it has arrived.

    Attributes:
        number: Its number.
        method: Name of the method.
        reply: What happens to its value, a `Reply`.
        parts: Its arguments; or the error that it ends with, as they cannot be read.
        rows: What reads the kept rows that these refer to.
        is_timed: Whether the times are to be told with its outcome.
        caller: Whoever it came from.
    """

    number: int
    method: str
    reply: int
    parts: Sequence[Payload] | OSError
    rows: RowReaders = NO_ROWS
    is_timed: bool = False
    caller: Any = None


class RequestTasks:
    """The tasks of requests on the event loop of a worker.

    Args:
        executor: Has the worker.
        ended: Called on the event loop with each request that has ended, its outcome, and its times or None.
        made: Called there with each request that has made an item, and the item.
    """

    def __init__(
        self,
        executor: Executor,
        ended: Callable[[ReceivedRequest, Outcome, bytes | None], object],
        made: Callable[[ReceivedRequest, Payload], object],
    ) -> None:
        self._executor, self._ended, self._made = executor, ended, made
        executor.own_methods.update(OWN_METHODS)
        self._loop = executor.event_loop()
        self._n_started = self._n_ended = 0  # each is counted by one thread
        self._tasks: dict[int, tuple[asyncio.Task[None], ReceivedRequest]] = {}
        self._running: dict[int, tuple[str, float]] = {}  # the methods that are shown, and since when
        self._cancelled: set[int] = set()

    @property
    def is_idle(self) -> bool:
        """Whether no request runs, or is about to."""
        return self._n_started == self._n_ended

    def start(self, requests: Sequence[ReceivedRequest], given_up: Collection[int] = ()) -> None:
        """Run requests, but for those that were cancelled meanwhile. One thread calls this."""
        self._n_started += len(requests)
        self._loop.run(self._start, requests, given_up)

    def cancel(self, numbers: Sequence[int]) -> None:
        """Cancel those of some requests that have not ended. Any thread may call this."""
        self._loop.run(self._cancel, numbers)

    def _start(self, requests: Sequence[ReceivedRequest], given_up: Collection[int]) -> None:
        loop = self._loop.loop
        self._executor.activity.words[N_TASKS] += len(requests)
        for request in requests:
            if request.number in given_up:
                self._ended(request, _CANCELLED, None)
                continue
            if request.method.startswith(CALLS_BACK):
                request = request._replace(method=request.method.removeprefix(CALLS_BACK))
            if request.method != MORE_ITEMS:
                self._running[request.number] = request.method, monotonic()
            # Were it made by `create_task`, the loop would count it, and look how it ends: as much work as the rest.
            self._tasks[request.number] = asyncio.Task(self._run(request), loop=loop), request
        self._show()

    def _cancel(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            task, _ = self._tasks.get(number, (None, None))
            if task is not None and number not in self._cancelled:
                self._cancelled.add(number)
                task.cancel()
                task.add_done_callback(partial(self._has_ended, number))

    async def _run(self, request: ReceivedRequest) -> None:
        executor, method = self._executor, request.method
        call = RunningCall(method)
        running.set(call)
        begun = decoded = ran = monotonic_ns() if request.is_timed else 0
        try:
            if isinstance(request.parts, OSError):
                raise request.parts
            args, kwargs, value = executor.begun(method, request.parts, request.rows)
            decoded = ran = monotonic_ns() if begun else 0
            if method == OPEN_ITEMS:
                call.request = value.method
                self._running[request.number] = value.method, monotonic()
                self._show()
                give = None if request.reply == Reply.DROP else partial(self._made, request)
                value = value.run(partial(executor.encoded, reply=Reply.RETURN), give)
            if hasattr(value, "__await__"):
                value = await value
            if executor.after:
                executor.call_hooks(executor.after, method, args, kwargs)
            ran = monotonic_ns() if begun else 0
            outcome = value if isinstance(value, Failure) else executor.encoded(value, request.reply)
        except BaseException as error:  # the user's code may raise anything
            outcome = executor.failure(error)
        call.is_over = True
        self._end(request.number, outcome, TIMES.pack(begun, decoded, ran, monotonic_ns()) if begun else None)
        del outcome  # the error of a failure refers to this frame, which has the arguments

    def _has_ended(self, number: int, _: object) -> None:
        """End a request that was cancelled, perhaps before its task has begun."""
        if number in self._tasks:
            self._end(number, None, None)

    def _end(self, number: int, outcome: Outcome, times: bytes | None) -> None:
        _, request = self._tasks.pop(number)
        self._running.pop(number, None)
        if number in self._cancelled:
            self._cancelled.remove(number)
            outcome = _CANCELLED
        self._ended(request, outcome, times)

    def numbers_of(self, caller: object) -> list[int]:
        """The requests of a caller that run; on the event loop."""
        return [number for number, (_, request) in self._tasks.items() if request.caller is caller]

    def count(self, n: int) -> None:
        """Count requests whose replies were sent, on the event loop."""
        self._show()  # first: a call that waits for this shows itself
        self._executor.activity.words[N_TASKS] -= n
        self._n_ended += n

    def _show(self) -> None:
        self._executor.activity.show(self._running)
