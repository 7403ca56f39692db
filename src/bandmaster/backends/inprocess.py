"""Runs every rank as an object in the controller's process, in rank order. This is the reference for other backends.

The debugger `pdb` works in the methods of workers. Values go through the same codec as on every other backend, so they
are isolated in the same way.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from bandmaster.backends.machine import MachineBackend
from bandmaster.codec import Payload
from bandmaster.contract import (
    CLOSED,
    MORE_ITEMS,
    Kept,
    KeptCopy,
    Launch,
    Reports,
    Rows,
    Signs,
    Ticket,
    WorkerCall,
    WorkerRecord,
)
from bandmaster.errors import UsageError
from bandmaster.errors.failure import REPLACED, Failure, FailureKind
from bandmaster.platform.locks import SigintSafeLock, check_not_held, run_if_free
from bandmaster.wire.segment_reader import RowReader, RowReaders
from bandmaster.wire.status_page import Interrupted
from bandmaster.worker_process.executor import Executor


class InProcessBackend(MachineBackend):
    """Backend whose ranks are objects in the controller's process."""

    def __init__(self) -> None:
        super().__init__()
        self._environment = _SharedEnvironment()
        self._had_process_group = False  # before the first group of one rank was made

    def start(self, launch: Launch) -> InProcessWorkers:
        """Return the workers of a group. No process is started: the `CONSTRUCT` call makes the users' objects.

        Raises:
            UsageError: The output is to go to files.
        """
        if launch.output is not None:
            raise UsageError(
                "output= needs workers with processes of their own, but the pool is on backend 'inprocess', where all "
                "output is that of the controller; leave output= out, or use backend 'local'"
            )
        held = self._environment.has("RANK")
        if len(launch.slots) > 1 or ("RANK" in os.environ and not held):  # this process is a rank of something else
            return InProcessWorkers(launch, release=self._environment.hold(launch.group, launch.env))
        if not held:
            self._had_process_group = _has_process_group()
        release = self._environment.hold(launch.group, {**launch.env, **_ONE_RANK})
        return InProcessWorkers(launch, release=partial(self._release_alone, release))

    def _release_alone(self, release: Callable[[], object]) -> None:
        """Put back the environment; the last group of one rank takes the process group along that they have made."""
        release()
        if not self._environment.has("RANK") and not self._had_process_group and _has_process_group():
            sys.modules["torch.distributed"].destroy_process_group()


_ONE_RANK = {  # with which init_process_group() makes a group of this process alone, on a port that the kernel chooses
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}


def _has_process_group() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


class InProcessWorkers:
    """The worker objects of one group. Calls from several threads run one after the other.

    Attributes:
        deaths: The ranks whose objects were discarded, and why.
        reports: What the workers have reported of themselves.
        arrivals: Always None: a call has run by the time it is sent.
        ranks_are_own: True.

    Args:
        launch: The group's launch.
        ranks: The ranks that are here; by default all.
        release: Called when the workers are stopped.
    """

    ranks_are_own = True

    def __init__(
        self, launch: Launch, ranks: Sequence[int] | None = None, release: Callable[[], object] = bool
    ) -> None:
        self._release = release
        self._launch = launch
        here = range(len(launch.slots)) if ranks is None else ranks
        self._executors = {rank: self._executor(rank) for rank in here}
        self.deaths: dict[int, Failure] = {}
        self.reports = Reports()
        self.arrivals: int | None = None
        self._is_stopped = False
        self._running = threading.RLock()  # held while a method or a constructor runs
        self._tasks: dict[int, Any] = {}  # by rank, once there was a request
        self._open: dict[int, dict[int, Ticket]] = {rank: {} for rank in here}  # requests, by number
        self._numbers = itertools.count()
        self._looking = threading.RLock()
        self._news = threading.Condition(self._looking)  # notified when a request has ended

    def _executor(self, rank: int) -> Executor:
        slot = self._launch.slots[rank]
        gpus = slot.reservation.gpus[slot.node][slot.index] if slot.reservation is not None else ()
        device = f"cuda:{gpus[0]}" if gpus else "cpu"
        executor = Executor()
        executor.prepare(self._launch.context(rank, device))
        return executor

    @property
    def records(self) -> Sequence[WorkerRecord]:
        """Host, process and device of each rank. The handles return the worker objects, if there are any."""
        host, pid = socket.gethostname(), os.getpid()
        return [
            WorkerRecord(host, pid, one.device, "in process", partial(getattr, one, "worker"))
            for one in self._executors.values()
        ]

    def put(self, payloads: Sequence[Payload | Kept]) -> Sequence[Payload | Kept]:
        """Return the payloads themselves: each rank copies the payloads that it reads."""
        return payloads

    def call(self, calls: Sequence[WorkerCall], tickets: dict[int, Any]) -> None:
        """Run the calls to completion, in rank order."""
        by_rank = {rank: call for call in calls for rank in call.ranks}
        self._check_free()
        try:
            with self._running:
                for rank in sorted(by_rank):
                    tickets[rank] = self._run(rank, by_rank[rank])
        finally:
            self._drop_the_dead()

    def _run(self, rank: int, call: WorkerCall) -> Ticket:
        with self._news:
            self._news.wait_for(lambda: rank in self.deaths or not self._open[rank])
        if rank in self.deaths:
            return Ticket(self.deaths[rank], is_done=True)
        executor, (parts, rows) = self._executors[rank], _read(call)
        try:
            with _interrupted_by_ctrl_c():
                outcome = executor.call(call.method, call.reply, parts, rows, call.is_timed)
        except Interrupted as error:
            outcome = executor.failure(error)
        self._take_reports(rank)
        ticket = Ticket(_received(outcome), is_done=True)
        if executor.times is not None:
            ticket.times = executor.times, time.monotonic_ns()
        return ticket

    def request(self, rank: int, requests: Sequence[WorkerCall], take: Callable[[Sequence[Ticket]], object]) -> None:
        """Run requests on the event loop of a rank; see `contract.Workers.request`."""
        self._check_free()
        overtakes = requests[0].method == MORE_ITEMS  # also a call that waits, which holds the lock
        try:
            with contextlib.nullcontext() if overtakes else self._running:
                self._begin(rank, requests, take)
        finally:
            self._drop_the_dead()

    def _begin(self, rank: int, requests: Sequence[WorkerCall], take: Callable[[Sequence[Ticket]], object]) -> None:
        from bandmaster.answering.request_tasks import ReceivedRequest, RequestTasks

        numbered = [
            ReceivedRequest(next(self._numbers), one.method, one.reply, *_read(one), one.is_timed) for one in requests
        ]
        tickets = {request.number: Ticket() for request in numbered}
        take(list(tickets.values()))
        self._open[rank].update(tickets)
        if rank in self.deaths:
            for number, ticket in tickets.items():
                ticket.is_dropped = True
                self._end(rank, number, self.deaths[rank])
            return
        if rank not in self._tasks:
            ended, made = partial(self._ended, rank), partial(self._made, rank)
            self._tasks[rank] = RequestTasks(self._executors[rank], ended, made)
        self._tasks[rank].start(numbered)

    def _ended(self, rank: int, request: Any, outcome: Payload | Rows | Failure | None, times: bytes | None) -> None:
        """Take the outcome of a request, on the event loop."""
        if (tasks := self._tasks.get(rank)) is not None:
            tasks.count(1)
            self._take_reports(rank)
        self._end(rank, request.number, _received(outcome), times)

    def _made(self, rank: int, request: Any, item: Payload) -> None:
        """Take an item of a request, on the event loop."""
        ticket = self._open[rank].get(request.number)
        if ticket is not None and ticket.on_item is not None:
            ticket.on_item(item.private())
            with self._news:
                self._news.notify_all()

    def _end(
        self, rank: int, number: int, outcome: Payload | Kept | Failure | None, times: bytes | None = None
    ) -> None:
        """End a request, unless it was ended with its worker."""
        ticket = self._open[rank].pop(number, None)
        if ticket is not None:
            ticket.times = None if times is None else (times, time.monotonic_ns())
            ticket.outcome, ticket.is_done = outcome, True
            if ticket.on_done is not None:
                ticket.on_done()
            with self._news:  # behind that, as threads wait for what it sets
                self._news.notify_all()

    def _take_reports(self, rank: int) -> None:
        """Take what a worker has reported, if that has changed."""
        reports = self._executors[rank].reports
        if reports != self.reports.get(rank, {}):
            self.reports.take(rank, reports)
            with self._news:
                self._news.notify_all()

    def wait(self, tickets: Sequence[Any], timeout_s: float | None) -> list[Any]:
        """Wait for requests: a call has run by the time it is sent."""
        with self._news:
            self._news.wait_for(lambda: all(ticket.is_done for ticket in tickets), timeout_s)
        return [ticket for ticket in tickets if ticket.is_done]

    def fetch(self, ticket: Ticket) -> Payload | Kept | Failure | None:
        """The reply. The exception of a failure is pickled and unpickled, as on every other backend."""
        outcome: Payload | Kept | Failure | None = ticket.outcome
        if isinstance(outcome, Failure):
            outcome = pickle.loads(pickle.dumps(outcome))
        return outcome

    def interrupt(self, tickets: Mapping[int, Any], kill_because: str | None = None) -> None:
        """Discard the workers if ``kill_because`` is given; else cancel requests, as no call is running."""
        if kill_because is not None:
            self._check_idle()
            self._bury(tickets, kill_because)
            return
        for rank, ticket in tickets.items():
            if not ticket.is_done and (tasks := self._tasks.get(rank)) is not None:
                tasks.cancel([number for number, one in list(self._open[rank].items()) if one is ticket])

    def resume(self, tickets: Mapping[int, Any]) -> None:
        """Do nothing: the ranks run their parts of a call one after the other."""

    def replace(self, rank: int) -> None:
        """Discard the object of a rank, once no method runs. The next `CONSTRUCT` call makes a new one."""
        self._check_free()
        with self._running:
            self._bury([rank], REPLACED)
            self._executors[rank] = self._executor(rank)
            self.reports.pop(rank, None)
        del self.deaths[rank]  # last: after Ctrl-C before that, it is dead

    def stacks(self, tickets: Mapping[int, Any]) -> dict[int, str]:
        """Always empty: ranks run on the caller's own stack."""
        return {}

    def signs(self, ranks: Sequence[int]) -> dict[int, Signs]:
        """Always empty: ranks have no processes."""
        return {}

    def check(self, is_thorough: bool = True) -> bool:
        """Have the threads that wait look again; False once `stop` was called. No worker dies by itself."""
        with self._news:
            self._news.notify_all()
        return not self._is_stopped

    def stop(self, why: str = CLOSED) -> None:
        """Discard all workers. A thread that is running a method discards them when the method returns."""
        self._check_idle()
        self._is_stopped = True
        self._bury(list(self._executors), why)
        self._release()

    def _bury(self, ranks: Sequence[int] | Mapping[int, Any], why: str) -> None:
        for rank in ranks:
            self.deaths[rank] = Failure(FailureKind.DIED, why)
        with self._news:
            self._news.notify_all()
        self.reports.on_change()
        self._drop_the_dead()

    def _check_idle(self) -> None:
        """Refuse a request by a worker's method or a signal handler while a method runs in this thread."""
        check_not_held(
            self._running,
            "a worker's method or a signal handler called the group during a call that runs in the same thread; call "
            "the group between steps (a worker cannot call its own group on any backend)",
        )

    def _check_free(self) -> None:
        """Refuse what waits for other threads' methods, which wait for this one if a signal handler calls in `wait`."""
        self._check_idle()
        check_not_held(self._looking)

    def _drop_the_dead(self) -> None:
        """Discard the objects of dead ranks. If another thread is running a method, that thread does so afterwards."""
        if self.deaths:
            run_if_free(self._running, self._close_the_dead)

    def _close_the_dead(self) -> None:
        for rank, why in list(self.deaths.items()):
            self._tasks.pop(rank, None)
            for number in list(self._open[rank]):
                self._end(rank, number, why)
            self._executors[rank].close()


@contextlib.contextmanager
def _interrupted_by_ctrl_c() -> Iterator[None]:
    """Have Ctrl-C raise `Interrupted` in the block, and then do what it does, though a lock defers that meanwhile."""
    lock = SigintSafeLock.of_main_thread()
    if lock is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = lock.raises
    try:
        lock.raises = Interrupted
        yield
    finally:
        lock.raises = before


def _read(call: WorkerCall) -> tuple[list[Payload], RowReaders]:
    """The parts of a call, and what reads the rows that it takes, in memory of the rank's own."""
    rows = {label: RowReader(partial(_private, part), present=call.present.get(label)) for label, part in call.rows}
    return [part.private() for part in call.parts], rows


def _received(outcome: Payload | Rows | Failure | None) -> Payload | Kept | Failure | None:
    """An outcome in memory of the caller's own."""
    if isinstance(outcome, Rows):
        return KeptCopy(outcome.payload.private(), outcome.facts)
    return outcome.private() if isinstance(outcome, Payload) else outcome


def _private(part: Payload | Kept) -> Payload:
    return part.private() if isinstance(part, Payload) else part.payload()


class _SharedEnvironment:
    """Sets variables while there are groups that ask for them, and puts back what was there before.

    Any thread may call it, and finalizers at any moment: the lock is held for moments only, and may be taken again.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._asked: dict[object, tuple[str, Mapping[str, str]]] = {}  # group and variables, by what holds them
        self._before: dict[str, str | None] = {}  # values of the variables before; None where there was none

    def hold(self, group: str, variables: Mapping[str, str]) -> Callable[[], object]:
        """Set variables for a group. Returns a function that releases them; calling that again does nothing.

        Raises:
            UsageError: Another group has one of them with another value.
        """
        holder = object()
        with self._lock:
            for other, theirs in list(self._asked.values()):
                for name in variables.keys() & theirs.keys():
                    if variables[name] != theirs[name]:
                        raise UsageError(
                            f"groups {other!r} and {group!r} ask for {name}={theirs[name]!r} and {variables[name]!r}, "
                            "but the ranks of backend 'inprocess' share the variables of this one process; close the "
                            "first group, or use backend 'local'"
                        )
            self._asked[holder] = group, dict(variables)
            for name, value in variables.items():
                self._before.setdefault(name, os.environ.get(name))
                os.environ[name] = value
        return partial(self._release, holder)

    def has(self, name: str) -> bool:
        """Whether a variable is set for a group."""
        return any(name in variables for _, variables in list(self._asked.values()))

    def _release(self, holder: object) -> None:
        with SigintSafeLock(), self._lock:  # so that Ctrl-C does not come between a variable and its value before
            self._asked.pop(holder, None)
            for name in [name for name in list(self._before) if not self.has(name)]:
                with contextlib.suppress(KeyError):  # a finalizer has put it back meanwhile
                    before = self._before.pop(name)
                    if before is None:
                        os.environ.pop(name, None)
                    else:
                        os.environ[name] = before
