"""Starts and replaces a group's workers: the backend starts processes, and `CONSTRUCT` is the first call on them.

::

    start_workers ── Backend.start ──► PRELOAD ──► CONSTRUCT ──► Workers
         └── Start ──► WATCHERS: features that show its progress
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from bandmaster.calls.call import Call, Failures
from bandmaster.calls.open_work import OpenWork
from bandmaster.calls.request import CallRequest, CallSite
from bandmaster.calls.result import note_calls
from bandmaster.codec import Payload, encode
from bandmaster.contract import (
    CONSTRUCT,
    NOT_STARTED,
    PRELOAD,
    START_ADVICE,
    Backend,
    Launch,
    Reply,
    WorkerCall,
    Workers,
)
from bandmaster.errors import CallTimeout, ConstructorError, RemoteError, WorkerDied
from bandmaster.lifecycle.ownership import Ownership
from bandmaster.plan.arguments import CallPlan
from bandmaster.platform.deadline import Deadline

EVERY_S = 0.5  # interval at which replies of ranks are read, so that `Start.late` is up to date


@dataclass(eq=False)
class Start:
    """The progress of a start, which watchers read in threads of their own.

    Attributes:
        group: Name of the group.
        n_ranks: Number of ranks that are started.
        doing: The step before the constructors, in words such as ``", importing torch"``; "" once constructors run.
        call: The step that runs; None while the processes are started.
        looks: What watchers do every `EVERY_S`, in the thread that waits for the step.
    """

    group: str
    n_ranks: int
    doing: str = ""
    call: Call | None = None
    looks: list[Callable[[], object]] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """The time since it began."""
        return time.monotonic() - self._began

    @property
    def late(self) -> Sequence[int] | None:
        """The ranks that have not ended the present step; None while the processes are started."""
        return None if self.call is None else self.call.missing


WATCHERS: list[Callable[[Start], AbstractContextManager[object]]] = []  # added by features, entered with each start


@contextlib.contextmanager
def _watched(launch: Launch, n_ranks: int) -> Iterator[Start]:
    start = Start(launch.group, n_ranks)
    with contextlib.ExitStack() as watchers:
        for watcher in WATCHERS:
            watchers.enter_context(watcher(start))
        yield start


def start_workers(backend: Backend, launch: Launch, constructor: Payload, ownership: Ownership) -> None:
    """Start a process on every slot and construct all workers concurrently. If one fails, all of them are ended.

    Args:
        backend: The backend that starts the processes.
        launch: The group, its slots and options.
        constructor: The encoded ``(cls, args, kwargs)``.
        ownership: Owns the workers once their processes run, and has them called once they are constructed.

    Raises:
        ClosedError: Another thread has closed the group, and so ended the workers.
        ConstructorError: A constructor raised, or a module of ``launch.preload`` could not be imported.
        WorkerDied: A process ended before its worker was constructed.
        CallTimeout: The processes did not start, or the constructors did not end, in time.
        PlacementError: A process did not start.
    """
    workers: Workers | None = None
    try:
        with _watched(launch, len(launch.slots)) as start:
            workers = backend.start(launch)
            ownership.own(workers)
            _Construction(workers, launch, tuple(range(len(launch.slots))), start).run(constructor)
        ownership.set_workers(workers)
    except BaseException as error:
        if workers is not None:
            workers.stop(NOT_STARTED)
        if isinstance(error, WorkerDied):
            ownership.check()
        raise


def replace_worker(ownership: Ownership, launch: Launch, constructor: Payload, rank: int) -> None:
    """End the worker of one rank, if it still runs, then start and construct a new one on its slot.

    Raises:
        ConstructorError, WorkerDied, CallTimeout, PlacementError: See `start_workers`; the rank stays dead.
        ClosedError: Another thread has closed the group, and so ended the worker.
        UsageError: The backend cannot replace a worker.
    """
    workers = ownership.workers()
    workers.replace(rank)
    try:
        with _watched(launch, 1) as start:
            _Construction(workers, launch, (rank,), start).run(constructor)
    except BaseException as error:
        if isinstance(error, WorkerDied):
            ownership.check()
        workers.interrupt({rank: None}, "ended by the controller, because it could not be constructed")
        raise


class _Construction:
    """Imports modules and runs the constructors on some ranks. If one fails, the others are ended without grace."""

    def __init__(self, workers: Workers, launch: Launch, ranks: Sequence[int], start: Start) -> None:
        self._workers, self._launch, self._ranks, self._start = workers, launch, ranks, start
        self._deadline = Deadline(launch.start_timeout_s)

    def run(self, constructor: Payload) -> None:
        """Run both steps, and wait for them."""
        preload = self._launch.preload
        if preload:
            self._start.doing = f", importing {', '.join(preload)}"
            self._run_step(PRELOAD, encode(preload))
        self._start.doing = ""
        self._run_step(CONSTRUCT, constructor)

    def _run_step(self, step: str, argument: Payload) -> None:
        launch, workers = self._launch, self._workers
        timeout_s = launch.start_timeout_s
        site = CallSite(launch.constructor, launch.mesh, launch.group, {"timeout": timeout_s, "grace": 0.0})
        call = Call(CallRequest(step, CallPlan(()), tuple(self._ranks)), site, None, OpenWork())
        call.is_being_sent(workers, Failures())
        parts = tuple(workers.put([argument]))
        workers.call([WorkerCall(self._ranks, step, parts, Reply.DROP)], call.tickets)
        self._start.call = call
        try:
            while not self._has_ended(call):
                late = CallTimeout(site.method, call.missing, timeout_s or 0.0, call.stacks(), START_ADVICE)
                if not (timeout_s and late.is_debugged):
                    raise late
                self._deadline = Deadline(timeout_s)
        except KeyboardInterrupt as interrupt:
            note_calls(interrupt, [call])
            raise
        error = None if call.done is None else call.done.error
        if type(error) is RemoteError:
            where, axes = error.coordinates, launch.mesh.shown_axes
            raise ConstructorError(error.method, error.failures, where, error.group, axes) from error.__cause__
        if error is not None:
            raise error

    def _has_ended(self, call: Call) -> bool:
        """Wait for a step; False if the time is over before."""
        while (left := self._deadline.left()) is None or left > EVERY_S:
            if call.wait(EVERY_S):
                return True
            for look in self._start.looks:
                look()
        return call.wait(left)
