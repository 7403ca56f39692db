"""Simulated ranks: they read messages, run methods for some time, and reply, fail, hang or die, as their calls say.

What they read and send goes through the true code of a worker: its end of the lane, the arguments, the encoded values.
What they do between two messages are events of the world, so that no thread is needed. The order in which messages are
read, begun and set aside is that of `bandmaster.worker_process.loop` and `bandmaster.answering.requests`.
"""

from __future__ import annotations

import math
import os
from collections import deque
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

import numpy as np

from bandmaster.codec import Payload, encode
from bandmaster.contract import (
    CALLS_BACK,
    CLOSE_STREAM,
    CONSTRUCT,
    MORE_ITEMS,
    NEXT,
    NOT_CONSTRUCTED,
    OPEN_STREAM,
    STREAM,
    Rows,
    Signs,
)
from bandmaster.errors.failure import Failure, FailureKind
from bandmaster.roles import SEPARATOR
from bandmaster.wire.lane import Lane
from bandmaster.wire.messages import (
    INLINE_NBYTES,
    Closed,
    MessageKind,
    ReplyKind,
    header_of,
    inline,
    read_content,
    read_small_call,
    reply_message,
)
from bandmaster.wire.segment_reader import NO_ROWS, kept_name
from bandmaster.wire.segments import SegmentWriter
from bandmaster.wire.status_page import N_SLOTS, Interrupted
from bandmaster.worker import Report
from bandmaster.worker_process.executor import END, Executor
from bandmaster.worker_process.loop import claimed, reply
from simulation import turns
from simulation.columns import made, passed_on, value_of
from simulation.drawn import Raised
from simulation.net import Socket
from simulation.world import World

FENCE_LOOK_S, FENCE_MOST_S = 0.001, 0.05


class Plan(NamedTuple):
    """What a rank does when it runs a call.

    Attributes:
        seconds: How long it takes.
        how: "value", "large", "raise" or "die".
        is_deaf: Whether it cannot be interrupted, as code in C.
        is_busy: Whether it uses the processor meanwhile.
    """

    seconds: float = 0.0
    how: str = "value"
    is_deaf: bool = False
    is_busy: bool = False


class RankSocket(Socket):
    """A rank's end of its lane: what the other end has no room for is sent when it has read."""

    def __init__(self, taken: Socket) -> None:
        super().__init__()
        self.unsent: deque[tuple[bytes, list[int]]] = deque()
        self.other = taken.other
        self.arrived, self.n_bytes = taken.arrived, taken.n_bytes
        taken.other.other = self
        taken.arrived = deque()

    def _send(self, data: bytes, fds: list[int], flags: int) -> int:
        if self.unsent or not self.can_send(len(data)):
            self.unsent.append((data, [os.dup(fd) for fd in fds]))
            return len(data)
        return super()._send(data, fds, flags)

    def send_rest(self) -> bool:
        """Send what was not sent; whether that was all."""
        while self.unsent and self.can_send(len(self.unsent[0][0])):
            data, fds = self.unsent.popleft()
            with suppress(ConnectionError):
                super()._send(data, fds, 0)
            for fd in fds:
                os.close(fd)
        return not self.unsent

    def close(self) -> None:
        for _, fds in self.unsent:
            for fd in fds:
                os.close(fd)
        self.unsent.clear()
        super().close()


class Running:
    """A call or a request that a rank runs."""

    def __init__(self, number: int, method: str, reply: int, is_fenced: bool, is_timed: bool) -> None:
        self.number, self.reply, self.is_fenced, self.is_timed = number, reply, is_fenced, is_timed
        self.name, self.method = method, method.rpartition(SEPARATOR)[2]  # both workers of a rank have the same ones
        self.token: Any = None
        self.plan = Plan()
        self.is_over = False
        self.since = 0.0
        self.ballast: list[Any] = []
        self.stream: str | None = None  # whose item it makes


class Rank:
    """One worker process.

    Attributes:
        pid: Its process, a number that no true process has.
        agent: The process that has started it; "" for the controller.
        failed: The number of the failed call at whose fence it waits; 0 for none.
        is_alive: Whether its process has not ended.
        streams: The token of each generator that has begun, and the number of its next item.
    """

    def __init__(self, world: World, group: Any, rank: int, pid: int, taken: Socket, context: Any) -> None:
        self.world, self.group, self.rank, self.pid = world, group, rank, pid
        self._socket = RankSocket(taken)
        self._socket.process = f"rank {pid}"
        self._socket.on_arrival = self._has_news
        self._lane = Lane(self._socket, SegmentWriter(kept_name(pid)))  # type: ignore[arg-type]
        self._executor = Executor(hold=nullcontext)
        self._executor._context = context
        self.is_alive, self.is_stopped, self.is_resident = True, False, True
        self.stopped_at = 0.0
        self.running: Running | None = None
        self.requests: dict[int, Running] = {}
        self.failed = self.resumed = 0
        self.failed_token: Any = None  # of the call that it has failed last
        self.agent = world.current.process
        self.slots: dict[int, int] = {}
        self.last_number = 0
        self.version = 0
        self.cpu_s = 0.0
        self.died = ""
        self.begun: set[Any] = set()  # the tokens of calls that have begun
        self.places: dict[str, int] = {}  # of the last call of each thread
        self.streams: dict[str, list[int]] = {}
        self._aside: deque[Any] = deque()
        self._given_up: set[int] = set()
        self._replies: list[Any] = []
        self._deferred: list[tuple[Any, tuple[Any, ...]]] = []
        self._is_constructed = False
        self._is_awake = False  # whether it is about to look at what has come
        self._told_of = 0
        self._tells = False
        self._wake()

    def __repr__(self) -> str:
        return f"<rank {self.rank} of {self.group}, {self.pid}>"

    @property
    def is_cut_off(self) -> bool:
        """Whether its host is cut off, or its agent was killed."""
        network = self.world.network  # type: ignore[attr-defined]
        return self.agent in network.cut or self.agent in network.gone

    # --- events ---

    def _soon(self, seconds: float, function: Any, *args: Any) -> None:
        self.world.after(seconds, self._happen, function, args)

    def _happen(self, function: Any, args: Any) -> None:
        if not self.is_alive:
            return
        if self.is_stopped:
            self._deferred.append((function, args))
        else:
            function(*args)

    def _latency(self) -> float:
        draw = self.world.random.random()
        return 2e-5 * draw if draw < 0.95 else 0.05 * self.world.random.random() ** 4

    def _has_news(self) -> None:
        if not self._is_awake and self.is_alive:
            self._wake()

    def _wake(self) -> None:
        self._is_awake = True
        self._soon(self._latency(), self._go_on)

    def stop(self) -> None:
        """Stand still, as after SIGSTOP."""
        self.is_stopped, self.stopped_at = True, self.world.now

    def go_on(self) -> None:
        """Continue after it was stopped."""
        self.is_stopped = False
        deferred, self._deferred = self._deferred, []
        for function, args in deferred:
            self._soon(self._latency(), function, *args)

    def _go_on(self) -> None:
        self._is_awake = False
        if not self._socket.send_rest():
            return
        try:
            while self.is_alive and not (self.running or self.failed or self._socket.unsent):
                if self._aside and not self.requests and not self._replies:
                    self._begin(self._lane.take_up(self._aside.popleft()))
                    continue
                if (body := self._lane.receive(block=False)) is None:
                    break
                self._take(body)
        except Closed:
            self.end("hung up")
            return
        if not self._aside:
            self._given_up.clear()
        self._tell_of_leases()

    def _take(self, body: memoryview) -> None:
        kind = header_of(body)[0]
        if kind == MessageKind.CANCEL:
            numbers = read_content(body)
            for number in numbers:
                if number in self.requests:
                    self._soon(self._latency(), self._interrupt_request, self.requests[number])
            if self._aside:
                self._given_up.update(numbers)
        elif kind == MessageKind.REQUESTS and self._may_begin(body):
            self._begin(body)
        elif self._aside or self.requests or self._replies:
            self._aside.append(self._lane.set_aside())
        else:
            self._begin(body)

    def _may_begin(self, body: memoryview) -> bool:
        method = "" if not self._aside else read_content(body)[0][1][0]
        return not self._aside or method == MORE_ITEMS or method.startswith(CALLS_BACK)

    # --- calls ---

    def _begin(self, body: memoryview) -> None:
        kind, number = header_of(body)
        if kind == MessageKind.REQUESTS:
            leases: dict[int, Any] = {}
            for number, content, is_timed in read_content(body):
                self._begin_request(number, content, is_timed, leases)
        elif kind in (MessageKind.ENVIRONMENT, MessageKind.PAUSE, MessageKind.CALLER):
            self._lane.body = None
        else:
            self._begin_call(kind, number, body)

    def _begin_call(self, kind: int, number: int, body: memoryview) -> None:
        world = self.world
        world.check(number > self.last_number, "calls begin in another order than they were sent", self, number)
        world.check(not self.requests, "a call begins while requests run", self, number)
        self.last_number = number
        self.group.check_fence(self)
        readers = NO_ROWS
        if kind & MessageKind.CALL:
            method, how, parts, readers = claimed(self._lane, read_content(body), {})
        else:
            method, how, parts = read_small_call(body)
        is_fenced, is_timed = kind >= MessageKind.FENCED, bool(kind & MessageKind.TIMED)
        running = self.running = Running(number, method, how, is_fenced, is_timed)
        if self.slots.get(number % N_SLOTS) == number:
            args, _ = ((), ()) if method == CONSTRUCT else self._executor._arguments(parts, readers)
            running.token = args[0] if args else None
            if method in (NEXT, CLOSE_STREAM):  # whose argument is a random name of the stream
                running.token = self.streams.get(running.token, (None,))[0]
            self._end(running, Interrupted("before it began"))
            return
        self._run(running, parts, readers)

    def _run(self, running: Running, parts: Any, readers: Any) -> None:
        running.since = self.world.now
        if running.method == CONSTRUCT:
            self._is_constructed = True
            self._soon(self._latency(), self._end, running, None)
            return
        if not self._is_constructed:
            self.world.check(running.number not in self.requests, "a request comes before the constructor", self)
            self._soon(self._latency(), self._end, running, RuntimeError(NOT_CONSTRUCTED))
            return
        args, kwargs = self._executor._arguments(parts, readers)
        if running.method == "on_replace":
            self._soon(self._latency(), self._end, running, None)
            return
        if running.method in ("on_yield", "on_resume"):
            self._run_hook(running)
            return
        if running.method in (OPEN_STREAM, NEXT, CLOSE_STREAM):
            self._run_items(running, args, kwargs)
            return
        program: Any = self.world.program  # type: ignore[attr-defined]
        running.token = int(args[0][0]) if running.method == "chunk" else args[0]
        running.ballast = [] if running.method == "chunk" else [*args[1:], *kwargs.values()]
        if running.method == "score":
            running.token, running.ballast = program.part_of(args[1], args[0]), [args[0]]
        running.plan = plan = program.plan_of(running.token, self.rank)
        self.world.note("begins", self.group.name, self.rank, running.token)
        self.begun.add(running.token)
        program.check_begun(running.token, self)
        self._check_ballast(running)
        value: Any = (running.token, self.rank)
        if running.method in ("rows", "columns") and plan.how in ("value", "large"):
            value = value_of(made(running.token, self.rank, running.method == "columns"))
        elif running.method in ("pass_on", "score") and plan.how in ("value", "large"):
            value = passed_on(running.ballast[0], running.token)
        elif running.method == "chunk" and plan.how in ("value", "large"):
            value = np.full((len(args[0]), args[1]), running.token)
        elif plan.how == "large":
            value = (*value, np.full(12_000, running.token))
        elif plan.how == "raise":
            value = Raised(running.token, self.rank)
        self._soon(plan.seconds + self._latency(), self._end, running, value)

    def _run_hook(self, running: Running) -> None:
        """Yield its slots to another group, or resume."""
        program: Any = self.world.program  # type: ignore[attr-defined]
        turns.check_hook(program, self, running.method, self.is_resident)
        running.plan = program.plan_of_hook()
        self.world.note(running.method, self.group.name, self.rank)
        value = Raised(turns.HOOK, self.rank) if running.plan.how == "raise" else None
        if value is None:
            self.is_resident = running.method == "on_resume"
        self._soon(running.plan.seconds + self._latency(), self._end, running, value)

    def _run_items(self, running: Running, args: Any, kwargs: Any) -> None:
        """Begin a generator, make its next item, or close it."""
        stream = running.stream = kwargs[STREAM] if running.method == OPEN_STREAM else args[0]
        if running.method == OPEN_STREAM:
            self.streams[stream] = [args[0], 0]
        if running.method == CLOSE_STREAM or stream not in self.streams:
            self.streams.pop(stream, None)
            gone = None if running.method == CLOSE_STREAM else LookupError("no such generator")
            self._soon(self._latency(), self._end, running, gone)
            return
        running.token, number = self.streams[stream]
        self.streams[stream][1] += 1
        plan = self.world.program.plan_of(running.token, self.rank)  # type: ignore[attr-defined]
        is_last = number == running.token % 4
        running.plan = plan if is_last else plan._replace(how="value")
        self.world.note("begins an item", self.group.name, self.rank, running.token, number)
        self.begun.add(running.token)
        value: Any = (running.token, self.rank, number)
        if is_last:
            value = Raised(running.token, self.rank) if plan.how == "raise" else END
        self._soon(plan.seconds + self._latency(), self._end, running, value)

    def _end(self, running: Running, value: Any) -> None:
        """The method has returned, raised, or was interrupted."""
        if running.is_over or not self.is_alive:
            return
        running.is_over = True
        if running.stream is not None and (value is END or isinstance(value, BaseException)):
            self.streams.pop(running.stream, None)
        if running.plan.how == "die":
            self.end("killed by SIGKILL")
            return
        if running.plan.is_busy:
            self.cpu_s += self.world.now - running.since
        if not isinstance(value, Interrupted):
            self.world.program.check_ran_on(running)  # type: ignore[attr-defined]
        self._check_ballast(running, is_over=True)
        running.ballast = []
        if isinstance(value, Raised):
            self.world.failed_at.setdefault(running.token, self.world.now)  # type: ignore[attr-defined]
        outcome = self._outcome(running, value)
        self.world.note("ends", self.group.name, self.rank, running.token, type(value).__name__)
        self.group.ended[running.token] = self.world.now
        self.world.ended.setdefault(running.token, {})[self.rank] = self.world.now  # type: ignore[attr-defined]
        if running.number in self.requests:
            del self.requests[running.number]
            self._reply(running, outcome)
        else:
            self.running = None
            if running.is_fenced and isinstance(outcome, Failure) and self._is_constructed:
                self.failed, self.failed_token = running.number, running.token
                self._soon(FENCE_LOOK_S, self._look_at_the_fence, running.number, FENCE_LOOK_S)
            try:
                reply(self._lane, running.number, [outcome])
            except Closed:
                self.end("hung up")
            self._lane.body = None
        self._wake()

    def _check_ballast(self, running: Running, is_over: bool = False) -> None:
        """What a call takes is what was passed, from its begin to its end."""
        program: Any = self.world.program  # type: ignore[attr-defined]
        program.check_taken(running.token, self.rank, running.ballast, is_over)

    def _outcome(self, running: Running, value: Any) -> Payload | Rows | Failure | None:
        if isinstance(value, BaseException):
            try:
                raise value
            except BaseException as error:
                failure = self._executor.failure(error)
                error.__traceback__ = None  # whose frames refer to those of the thread that has come here
                return failure
        return self._executor.encoded(value, running.reply)

    def _look_at_the_fence(self, number: int, look_s: float) -> None:
        if self.resumed == number:
            self.group.check_fence_passed(self)
            self.failed = 0
            self._go_on()
        elif self._socket.other.closed:
            self.end("hung up")
        else:
            look_s = min(2 * look_s, FENCE_MOST_S)
            self._soon(look_s, self._look_at_the_fence, number, look_s)

    # --- requests ---

    def _begin_request(self, number: int, content: Any, is_timed: bool, leases: dict[int, Any]) -> None:
        method, how, parts, readers = claimed(self._lane, content, leases)
        running = self.requests[number] = Running(number, method, how, False, is_timed)
        self.group.check_room(self)
        if number in self._given_up:
            self._interrupt_request(running)
        else:
            self._run(running, parts, readers)

    def _interrupt_request(self, running: Running) -> None:
        if not (running.is_over or running.plan.is_deaf):
            running.is_over = True
            del self.requests[running.number]
            self._reply(running, Failure(FailureKind.CANCELLED, "interrupted by the controller"))
            self._wake()

    def _reply(self, running: Running, outcome: Any) -> None:
        if isinstance(outcome, Rows) or (isinstance(outcome, Payload) and outcome.nbytes > INLINE_NBYTES):
            try:
                reply(self._lane, running.number, [outcome])
            except Closed:
                self.end("hung up")
            return
        self._replies.append((running.number, outcome))
        if len(self._replies) == 1:
            self._soon(self._latency(), self._flush)

    def _flush(self) -> None:
        said: list[Any] = []
        if self.version != self._told_of:
            self._told_of = self.version
            said.append((0, ReplyKind.REPORT, {"": Report(version=self.version, load=float(len(self.requests)))}, None))
        for number, outcome in self._replies:
            if outcome is None:
                said.append((number, ReplyKind.NOTHING, None, None))
            elif isinstance(outcome, Failure):
                said.append((number, ReplyKind.FAILURE, inline(encode(outcome)), None))
            elif outcome.buffers:
                said.append((number, ReplyKind.PART, inline(outcome), None))
            else:
                said.append((number, ReplyKind.VALUE, bytes(outcome.head), None))
        self._replies = []
        with suppress(Closed, OSError):
            self._lane.send_beside(reply_message(0, ReplyKind.SEVERAL, said))
        self._go_on()

    def report(self, version: int) -> None:
        """Tell of a new version, by itself."""
        self.version = self._told_of = version
        if self.is_alive:
            with suppress(Closed):
                self._lane.send_beside(reply_message(0, ReplyKind.REPORT, {"": Report(version=version)}))

    # --- from outside ---

    def interrupt(self, number: int) -> None:
        """Interrupt a call by its number, as the status page does."""
        self.slots[number % N_SLOTS] = number
        self._soon(self._latency(), self._signalled)

    def resume(self, number: int) -> None:
        """Let it begin the next call that has failed one."""
        self.resumed = number

    def _signalled(self) -> None:
        running = self.running
        if running is None or running.is_over or running.plan.is_deaf or running.method == CONSTRUCT:
            return
        if self.slots.get(running.number % N_SLOTS) == running.number:
            self._soon(self._latency(), self._end, running, Interrupted("the controller cancelled the call"))

    def end(self, how: str) -> None:
        """End the process."""
        if self.is_alive:
            self.is_alive = False
            self.died, self.group.died_at = how, self.world.now
            self.world.note("died", self.group.name, self.rank, how)
            self.running = None
            self.requests = {}
            self._aside.clear()
            self._lane.close()
            self._lane.writer.close()
            self._executor.close()

    def signs(self) -> Signs:
        """Its signs of life."""
        running = self.running
        cpu_s = self.cpu_s
        if running is not None and running.plan.is_busy:
            until = self.stopped_at if self.is_stopped else self.world.now
            cpu_s += max(0.0, until - running.since)
        state = "" if not self.is_alive else "T" if self.is_stopped else "S"
        since = self.world.now - running.since if running is not None else 0.0
        return Signs(state, cpu_s, running.method if running is not None else "", since)

    # --- leases ---

    @property
    def has_leases(self) -> bool:
        """Whether a segment that it has written is not free."""
        return self._lane.writer.has_leases

    def _tell_of_leases(self) -> None:
        if self._lane.has_leases and not self._tells:
            self._tells = True
            self._soon(0.5, self._tell)

    def _tell(self) -> None:
        self._tells = False
        if not self.running and not self._socket.unsent:
            self._lane.tell()
        self._tell_of_leases()


FOREVER = math.inf
