"""Runs in a Ray actor: holds the worker and runs calls that come as actor tasks or, on the controller's host, by lane.

Ray runs one task of an actor at a time. While the lane is served, that task is `WorkerActor.bandmaster_serve`, and
calls arrive over the lane. Before the controller submits another actor task, it sends ``pause`` over the lane, which
frees the actor. All calls therefore run in submission order, on either channel, in the actor's main thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import inspect
import math
import os
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import CoroutineType
from typing import Any, ClassVar, NamedTuple

import ray

from bandmaster.codec import Payload, decode
from bandmaster.contract import TIMES, Reply, Rows
from bandmaster.debugging.breakpoints import install_breakpoints
from bandmaster.errors.failure import Failure
from bandmaster.plan.binding import signature_without_self
from bandmaster.platform.hardware import count_gpus
from bandmaster.platform.limits import start_thread
from bandmaster.platform.proc import peer_of
from bandmaster.platform.processes import end_descendants, is_readable
from bandmaster.single_controller.ray.listener import connect, host_identity
from bandmaster.single_controller.ray.output import redirect, tame_bars
from bandmaster.wire.lane import LENGTH_NBYTES, Lane
from bandmaster.wire.segment_reader import RowReader, RowReaders, kept_name
from bandmaster.wire.segments import SegmentWriter
from bandmaster.wire.stacks import COLLECTIVES, TASKS
from bandmaster.wire.status_page import SPARE, StatusPage, WorkerIdentity, opened
from bandmaster.worker import WorkerContext
from bandmaster.worker_process.collectives import told_of_collectives
from bandmaster.worker_process.executor import Executor
from bandmaster.worker_process.loop import Loop
from bandmaster.worker_process.rendezvous import Rendezvous, rendezvous_sockets

__all__ = [
    "FIRST_NUMBER",
    "LONG_S",
    "OTHERS",
    "SHARED_S",
    "ActorInfo",
    "OverlappingActor",
    "WorkerActor",
    "actor_class",
    "has_async_methods",
]

FIRST_NUMBER = 1 << 62  # of the group's calls by actor task; calls over the lane are numbered from 1
OTHERS = FIRST_NUMBER - 1  # announced for all calls that do not come from the group
SHORT_S, LONG_S = 0.05, 5.0  # how long a lane is served before other actor tasks get a turn
SHARED_S = 0.25  # the longest of these if the user has handles of the actor
Labels = Sequence[tuple[int, Any]]
REFERRED = 8  # in place of a `Reply`: the user reads the value by `ray.get`, which raises the method's exception
How = tuple[int, bool]  # a `Reply` or `REFERRED`, and whether the outcome is to come as a `Timed`
A_TICK_S = 1e-5  # the kernel rounds it up to one clock tick


class Timed(NamedTuple):
    """The outcome of a call that is timed.

    Attributes:
        outcome: The outcome.
        times: The times, packed as `bandmaster.contract.TIMES`.
    """

    outcome: Any
    times: bytes


@dataclass(frozen=True)
class ActorInfo:
    """The facts that an actor reports about itself once its process runs.

    Attributes:
        address: IP address of its node.
        host_name: Name of its host, as failures show it.
        host: Identity of its machine, see `host_identity`.
        pid: Its process id.
        device: Its device as torch names it; ``"cpu"`` also if the GPUs that Ray counts do not exist.
        rendezvous_port: Port of the group's rendezvous on rank 0; 0 on other ranks.
        node: Ray's id of its node.
        stderr: Path of the file that its standard error goes to.
        overlaps: Whether its async methods overlap.
    """

    address: str
    host_name: str
    host: str
    pid: int
    device: str
    rendezvous_port: int
    node: str
    stderr: str
    overlaps: bool


class ActorPage(StatusPage):
    """The status page of an actor. Replies over a lane show by their order which call runs; those of tasks do not."""

    @contextlib.contextmanager
    def announce(self, number: int) -> Iterator[None]:
        """Show other processes, until the block is left, that this call is running."""
        self.words[SPARE] = number
        try:
            yield
        finally:
            self.words[SPARE] = 0


def announced(pid: int) -> int:
    """Number of the call that an actor has announced that it runs; 0 if it has announced none, or is not there."""
    with contextlib.suppress(OSError), opened(pid, "rb") as page:
        return int.from_bytes(os.pread(page, 8, SPARE * 8), "little")
    return 0


class WorkerActor:
    """Base of the actor classes: holds the worker and runs the calls of its group.

    `actor_class` derives a class from it that also has the public methods of the worker class, for direct Ray calls.

    Args:
        label: The ``repr`` of the actor, which Ray puts before each line of its output.
    """

    overlaps: ClassVar[bool] = False

    def __init__(self, label: str) -> None:
        self._label = label
        self._executor = _ActorExecutor()
        self._lane: Lane | None = None
        self._page: ActorPage
        self._patience_s = SHORT_S  # how long the lane is served before other actor tasks get a turn
        self._is_away = False  # whether the lane is to be served again after that
        self._n_left = 0
        self._info: ActorInfo
        self._is_detached = False

    def __repr__(self) -> str:
        return self._label

    def bandmaster_begin(
        self, uses_gpu: bool, identity: WorkerIdentity, controllers_host: str, output: str | None
    ) -> ActorInfo:
        """Open the status page and, on rank 0, the rendezvous.

        Args:
            uses_gpu: Whether the worker's slot has a GPU.
            identity: The worker's identity; its pid and, on another host, its controller are replaced here.
            controllers_host: `host_identity` of the controller.
            output: The file that its output goes to; None for Ray's own file.

        Returns:
            Node, process and device of this actor.
        """
        if output is not None:
            redirect(output)
        tame_bars()
        controller = identity.controller if controllers_host == host_identity() else 0
        identity = replace(identity, pid=os.getpid(), controller=controller)
        self._page = ActorPage(identity)
        install_breakpoints(identity, self._page.hold)
        self._executor.hold, self._executor.activity = self._page.hold, self._page.activity
        self._page.told = {TASKS: self._executor.told_of_tasks, COLLECTIVES: told_of_collectives}
        address = ray.util.get_node_ip_address()
        device = "cuda:0" if uses_gpu and count_gpus() else "cpu"
        port = 0
        if identity.rank == 0:
            rendezvous = Rendezvous(rendezvous_sockets(address), self._executor.after)
            port = rendezvous.port
        node, stderr = ray.get_runtime_context().get_node_id(), os.readlink("/proc/self/fd/2")
        self._is_detached = identity.is_detached
        name, pid = os.uname().nodename, os.getpid()
        self._info = ActorInfo(address, name, host_identity(), pid, device, port, node, stderr, self.overlaps)
        return self._info

    def bandmaster_info(self) -> ActorInfo:
        """Node, process and device of this actor."""
        return self._info

    def bandmaster_prepare(self, context: WorkerContext, environment: Mapping[str, str], paths: Sequence[str]) -> None:
        """Set the worker's context and environment, and add the controller's ``paths`` to ``sys.path``."""
        self._executor.prepare(context)
        os.environ.update(environment)
        sys.path.extend(path for path in paths if path not in sys.path and os.path.isdir(path))

    def bandmaster_call(self, number: int, method: str, how: How, labels: Labels, *parts: Payload) -> Any:
        """Run a call. The controller gets a failure as a value; `ray.get` of an ObjectRef raises it.

        Args:
            number: The number by which the call can be interrupted.
            method: Name of the method.
            how: A `Reply` or `REFERRED`, and whether to tell the times. For `Reply.KEEP` there are two results: the
                facts about the rows, which the controller reads, and the rows.
            labels: The label of each of the kept rows, which are the last parts, and the numbers of the rows that are
                present if not all of them are.
            *parts: The parts of the arguments, and the kept rows.
        """
        self._catch_up()
        return self._called(number, method, how, labels, parts)

    def bandmaster_call_of_others(self, number: int, method: str, how: How, labels: Labels, *parts: Payload) -> Any:
        """Run a call of a group that another controller has attached to this actor; see `bandmaster_call`."""
        self._catch_up_with_what_is_there()
        self._patience_s = SHORT_S
        return self._called(number, method, how, labels, parts)

    def _called(self, number: int, method: str, how: How, labels: Labels, parts: Sequence[Payload]) -> Any:
        return self._as_asked(self._run(number, method, how, *arguments(labels, parts)), how[0])

    @staticmethod
    def _as_asked(outcome: Payload | Rows | Failure | Timed | None, reply: int) -> Any:
        if isinstance(outcome, Timed):
            asked = WorkerActor._as_asked(outcome.outcome, reply)
            if reply == Reply.KEEP:
                return outcome._replace(outcome=asked[0]), asked[1]
            return outcome._replace(outcome=asked)
        if reply == Reply.KEEP:
            return (outcome.facts, outcome.payload) if isinstance(outcome, Rows) else (outcome, None)
        if reply != REFERRED:
            return outcome
        if isinstance(outcome, Failure):
            raise outcome.exception or RuntimeError(outcome.summary)
        return _Encoded(outcome) if isinstance(outcome, Payload) else outcome

    def bandmaster_update_environment(self, environment: Mapping[str, str]) -> None:
        """Update environment variables, after a new rank 0 has opened a new rendezvous."""
        self._catch_up()
        os.environ.update(environment)

    def bandmaster_connect(self, name: str, introduction: bytes) -> bool:
        """Connect to the controller's lane listener. Returns False if that fails, for example in another container."""
        sock = connect(name, introduction)
        if sock is not None:
            self._lane = Lane(sock, SegmentWriter(kept_name(os.getpid())))
            if not self._is_detached:
                _end_with(peer_of(sock)[0])
        return sock is not None

    def bandmaster_serve(self, n_left: int, longest_s: float) -> None:
        """Serve calls from the lane until it is paused or closed.

        Yields to Ray by resubmitting itself, so that calls made through `ray.get_actor` get a turn. Backs off to
        ``longest_s`` while there are no such calls, because a resubmission takes a millisecond.

        Args:
            n_left: Number of this resubmission; 0 if the group submits the task.
            longest_s: Seconds that a lane is served at most before other actor tasks get a turn.
        """
        if not n_left:
            self._catch_up()  # the group submits this at first, and after each pause
        elif not self._is_away or n_left != self._n_left:
            return  # a call of the group ran before this resubmission
        patience_s = min(self._patience_s, longest_s)
        self._serve(patience_s, patience_s)
        if self._is_away:
            self._patience_s = min(2 * self._patience_s, longest_s)
            self._n_left += 1
            ray.get_runtime_context().current_actor.bandmaster_serve.remote(self._n_left, longest_s)

    def _catch_up(self) -> None:
        """Run the calls that were sent over the lane before it was paused. Every actor task of the group begins so."""
        if self._is_away and self._lane is not None:
            self._is_away = Loop(self._lane, self._executor, self._page).run()

    def _catch_up_with_what_is_there(self) -> None:
        """Run the calls that have arrived on the lane so far. A direct Ray call, which pauses no lane, begins so."""
        if self._is_away and self._lane is not None:
            self._serve(A_TICK_S, most_nbytes=_waiting_nbytes(self._lane))

    def _serve(self, patience_s: float, most_s: float = math.inf, most_nbytes: float = math.inf) -> None:
        assert self._lane is not None, "it was connected"
        loop = _LimitedLoop(self._lane, self._executor, self._page)
        loop.patience_s, loop.deadline, loop.most_nbytes = patience_s, time.monotonic() + most_s, most_nbytes
        self._is_away = loop.run()

    def _run(
        self, number: int, method: str, how: How, parts: Sequence[Payload], rows: RowReaders
    ) -> Payload | Rows | Failure | Timed | None:
        """Run a call so that it can be interrupted by its number."""
        with self._page.announce(number):
            try:
                self._page.begin(number)
                outcome = self._executor.call(method, how[0], parts, rows, how[1])
                self._page.end()
                return outcome if self._executor.times is None else Timed(outcome, self._executor.times)
            except KeyboardInterrupt as error:  # interrupted, or raised by the method
                self._page.end()
                self._executor.activity.end()
                return self._executor.failure(error)


class _ActorExecutor(Executor):
    """An `Executor` whose worker is also called by Ray's own tasks."""

    def __init__(self) -> None:
        super().__init__()
        self._beside: dict[object, tuple[str, float]] = {}

    @contextlib.contextmanager
    def shown(self, method: str) -> Iterator[None]:
        """Show, until the block is left, that a method runs, perhaps besides others: the oldest is shown by name."""
        token = object()
        self._beside[token] = method, time.monotonic()
        self.activity.show(self._beside)
        try:
            yield
        finally:
            del self._beside[token]
            self.activity.show(self._beside)

    async def call_beside(
        self, method: str, reply: int, parts: Sequence[Payload], rows: RowReaders
    ) -> Payload | Rows | Failure | None:
        """Run one call on the event loop of the caller, where calls of async methods overlap; see `call`."""
        with self.shown(method):
            try:
                args, kwargs, value = self.begun(method, parts, rows)
                if type(value) is CoroutineType:
                    value = await value
                self.call_hooks(self.after, method, args, kwargs)
            except asyncio.CancelledError:
                raise
            except BaseException as error:
                return self.failure(error)
            return self.encoded(value, reply)

    def run(self, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a method with plain arguments and return its plain value. An async method is awaited."""
        self.activity.show({None: (method, time.monotonic())})
        try:
            self.call_hooks(self.before, method, args, kwargs)
            value = getattr(self.worker, method)(*args, **kwargs)
            if type(value) is CoroutineType:
                value = self.wait_for(value)
            self.call_hooks(self.after, method, args, kwargs)
            return value
        finally:
            self.activity.end()


class _LimitedLoop(Loop):
    """A `Loop` that ends when a limit is reached.

    Attributes:
        patience_s: Seconds to wait for each message.
        deadline: The moment after which no new message is read.
        most_nbytes: Number of bytes of messages after which no new message is read.
    """

    patience_s: float
    deadline: float
    most_nbytes: float

    def next_message(self) -> memoryview | None:
        """Wait for the next message; None ends `run`."""
        if self.most_nbytes <= 0 or time.monotonic() >= self.deadline:
            return None
        self.lane.wait_at_most(self.patience_s)
        message = self.lane.receive()
        if message is None:
            self.lane.tell()
        else:
            self.most_nbytes -= LENGTH_NBYTES + len(message)
        return message


def _waiting_nbytes(lane: Lane) -> int:
    """Bytes that were sent to this end of a lane and that it has not received."""
    return int.from_bytes(fcntl.ioctl(lane.fileno(), termios.FIONREAD, bytes(4)), "little")


def arguments(labels: Labels, parts: Sequence[Payload]) -> tuple[list[Payload], RowReaders]:
    """The parts of a call's arguments, in memory of this process, and the readers of its kept rows."""
    n = len(parts) - len(labels)
    return [part.private() for part in parts[:n]], {
        label: RowReader(part.private, present=present)
        for (label, present), part in zip(labels, parts[n:], strict=True)
    }


def _end_with(controller: int) -> None:
    """End this process when the controller ends. Ray notices late, and a fork of the controller keeps the lane open."""
    with contextlib.suppress(OSError):  # the controller has ended, or is in another pid namespace
        start_thread("bandmaster-controller-watch", _end_after, os.pidfd_open(controller))


def _end_after(controller: int) -> None:
    is_readable(controller)
    sys.setswitchinterval(1e-5)  # else a busy method delays this thread by 5 ms for each process that it reads
    end_descendants(os.getpid())
    os._exit(1)


class OverlappingActor(WorkerActor):
    """A `WorkerActor` that begins other calls while an async method awaits something.

    Calls come as actor tasks alone, and begin in an order that Ray chooses. Ray runs no method of such an actor in the
    main thread, where calls are interrupted; it cancels those of async methods.
    """

    overlaps = True

    async def bandmaster_call(self, number: int, method: str, how: How, labels: Labels, *parts: Payload) -> Any:
        """Run a call on the actor's event loop, where calls overlap; see `WorkerActor.bandmaster_call`."""
        (reply, is_timed), begun = how, time.monotonic_ns()
        outcome: Any = await self._executor.call_beside(method, reply, *arguments(labels, parts))
        if is_timed:
            end = time.monotonic_ns()  # in between, it was mixed with other calls
            outcome = Timed(outcome, TIMES.pack(begun, begun, end, end))
        return self._as_asked(outcome, reply)

    bandmaster_call_of_others = bandmaster_call


def has_async_methods(cls: type) -> bool:
    """Whether a worker class has a public async method, or async generator."""
    methods = [getattr(cls, name) for name in dir(cls) if not name.startswith("_")]
    return any(inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method) for method in methods)


class _Encoded:
    """An encoded value that unpickles, in `ray.get`, as the decoded one."""

    def __init__(self, payload: Payload) -> None:
        self._payload = payload

    def __reduce__(self) -> tuple[object, ...]:
        return _open, (self._payload,)


def _open(payload: Payload) -> Any:
    return decode(payload.private())


def actor_class(cls: type, base: type[WorkerActor] = WorkerActor) -> Any:
    """Make an actor class with the name and the methods of a worker class, except those that `WorkerActor` has itself.

    Methods of one underscore are among them: programs call ``handle._get_node_ip.remote()``.
    """
    names = [name for name in dir(cls) if not name.startswith("__") and inspect.isfunction(getattr(cls, name))]
    names = [name for name in names if not (name.startswith("_") and hasattr(base, name))]
    forwards = {name: _forward(cls, name, base.overlaps) for name in names}
    made = ray.remote(type(cls.__name__, (base,), {**forwards, "__doc__": cls.__doc__}))
    made.__ray_metadata__.modified_class.__ray_call__ = _ray_call
    return made


def _ray_call(self: WorkerActor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call ``fn`` with the user's object; Ray's own ``__ray_call__``, which this replaces, would pass the actor."""
    self._catch_up_with_what_is_there()
    self._patience_s = SHORT_S
    with self._page.announce(OTHERS), self._executor.shown("__ray_call__"):
        return fn(self._executor.worker, *args, **kwargs)


def _forward(cls: type, name: str, overlaps: bool) -> Any:
    def forward(self: WorkerActor, /, *args: Any, **kwargs: Any) -> Any:
        self._catch_up_with_what_is_there()
        self._patience_s = SHORT_S
        with self._page.announce(OTHERS):
            return self._executor.run(name, args, kwargs)

    async def forward_async(self: WorkerActor, /, *args: Any, **kwargs: Any) -> Any:
        return await getattr(self._executor.worker, name)(*args, **kwargs)

    is_async = overlaps and inspect.iscoroutinefunction(getattr(cls, name))
    made: Any = forward_async if is_async else forward
    made.__name__ = made.__qualname__ = name
    made.__doc__ = getattr(cls, name).__doc__
    made.__signature__ = _bare_signature(cls, name)  # Ray checks calls against it
    return made


def _bare_signature(cls: type, name: str) -> inspect.Signature:
    """The signature of a method with only the names and kinds of its parameters.

    Annotations and defaults may need modules that the actor cannot import yet. Ray drops the first parameter, so the
    signature begins with one that stands for ``self``, whatever the method calls it.
    """
    bare = [
        parameter.replace(
            annotation=parameter.empty, default=parameter.empty if parameter.default is parameter.empty else None
        )
        for parameter in signature_without_self(cls, name).parameters.values()
    ]
    return inspect.Signature([inspect.Parameter("bandmaster_self", inspect.Parameter.POSITIONAL_ONLY), *bare])
