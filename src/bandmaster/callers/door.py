"""`Door`: the way to groups that were given to workers of this host: it hands out lanes, and relays calls."""

from __future__ import annotations

import asyncio
import os
import pickle
import secrets
import socket
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, NamedTuple

from bandmaster.answering.requests import Requests
from bandmaster.callers.circles import Circles, Wait
from bandmaster.callers.passed import FIND, FarCalls, PassedCalls
from bandmaster.callers.reached import DIED, ELSEWHERE, FAR, MOVED, READY, SHUT, WAIT, Asked, FarPlace
from bandmaster.calls.future import Future
from bandmaster.calls.open_work import OpenWork
from bandmaster.contract import METHOD, Workers
from bandmaster.errors import BandmasterError, CallTimeout, ClosedError, UsageError, WorkerDied
from bandmaster.errors.failure import Failure, FailureKind
from bandmaster.hosts.links import AgentLinks
from bandmaster.hosts.workers import AgentWorkers
from bandmaster.platform.deadline import Deadline
from bandmaster.platform.forks import n_forks
from bandmaster.platform.limits import run_in_thread
from bandmaster.platform.locks import SigintSafeLock
from bandmaster.platform.proc import peer_of
from bandmaster.platform.settings import host_timeout_s
from bandmaster.requests.method import RequestMethod
from bandmaster.requests.stream import RequestStream
from bandmaster.wire.lane import Lane, set_buffer
from bandmaster.wire.lanes import LaneClient
from bandmaster.wire.segment_reader import RowReaders
from bandmaster.wire.segments import SegmentWriter
from bandmaster.worker_process.call_path import PATH, Process, conflict, earlier, refusal
from bandmaster.worker_process.executor import Arguments, Executor

OPTIONS = "bandmaster.options"  # the keyword with the options of a relayed call
ALL = "bandmaster.all"  # of them: whether it is for all replicas
CONTROLLER, WAITS = "bandmaster.", Circles.closed_by.__name__  # prefix and name of the controller's own method
QUESTION_NBYTES = 4096
RENEWED = "it is being replaced"
ACCEPT_AGAIN_S = 0.5
LOOK_AGAIN_S, LOOK_LATER_S = 0.01, 0.5  # for a rank that is dead, or does not read
BEAT_S = 5.0  # after which a worker is told that the rank which it asks for is busy


class GivenGroup(NamedTuple):
    """A group that was given to workers.

    Attributes:
        name: Its name.
        method: Returns a registered method by its name, as the group has it.
        workers: Returns its workers; raises ClosedError if it was closed.
        work: Its open calls.
    """

    name: str
    method: Callable[[str], Any]
    workers: Callable[[], Workers]
    work: OpenWork


class Door:
    """A door of this host: one socket, by which workers reach the groups that they were given.

    The controller has one as long as there is such a group, the agents of other hosts always. It accepts processes of
    the same user alone.

    Attributes:
        address: Its address, an abstract name.

    Args:
        relay: Makes the calls of workers; by default that of the controller.
    """

    _open: ClassVar[Door | None] = None
    _opening = SigintSafeLock()
    _token: ClassVar[str] = secrets.token_hex(8)  # with the pid, in the addresses of all doors of a process

    _far: FarCalls

    def __init__(self, relay: PassedCalls | None = None) -> None:
        self.address = f"{self._prefix()}{secrets.token_hex(8)}"
        self._n_forks = n_forks()
        self._groups: dict[str, GivenGroup] = {}
        self._relay: ControllersRelay | PassedCalls = relay or ControllersRelay(self._groups)
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listening.bind(f"\0{self.address}")
        self._listening.listen(socket.SOMAXCONN)
        self._listening.setblocking(False)
        self._loop = self._relay.event_loop().loop
        self._requests = Requests(self._relay)
        self._waiting: dict[socket.socket, asyncio.Task[None] | None] = {}  # for its question, or for a rank
        self._relay.event_loop().run(self._listen)

    @classmethod
    def _prefix(cls) -> str:
        return f"bandmaster-door-{os.getpid()}-{cls._token}-"

    @classmethod
    def give(cls, key: str, group: GivenGroup) -> str:
        """Let workers reach a group by a key. Returns the address of the door."""
        with cls._opening:
            door = cls._open
            if door is None or door._n_forks != n_forks():
                door = cls._open = cls()
                door._far = FarCalls(door._relay)
                AgentLinks.relays[:] = [door._far.take]
            door._groups[key] = group
            return door.address

    @classmethod
    def here(cls, address: str, key: str) -> GivenGroup | None:
        """The group of this process that was given by a key; None if it is of another one. Raises ClosedError."""
        if not address.startswith(cls._prefix()):
            return None
        door = cls._open
        return _found(key, door._groups if door is not None else {})

    @classmethod
    def take_back(cls, key: str) -> None:
        """Refuse a group from here on, as it was closed; the door of the last group ends."""
        with SigintSafeLock():  # Ctrl-C comes when the door has ended
            with cls._opening:
                door = cls._open
                if door is None or door._groups.pop(key, None) is None or door._groups:
                    return
                cls._open = None
            door._relay.event_loop().run(door._hang_up)
            door._relay.event_loop().run(door._far.close)
            door._relay.close()

    # --- on its event loop ---

    def _hang_up(self) -> None:
        self._loop.remove_reader(self._listening.fileno())
        self._listening.shutdown(socket.SHUT_RDWR)  # a fork of this process may have it
        self._listening.close()
        self._requests.close()
        for sock, task in self._waiting.items():
            if task is None:
                self._loop.remove_reader(sock.fileno())
            else:
                task.cancel()
            sock.close()

    def _listen(self) -> None:
        if self._listening.fileno() >= 0:  # else the door was closed meanwhile
            self._loop.add_reader(self._listening.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            sock, _ = self._listening.accept()
        except OSError:  # there is no descriptor for it
            self._loop.remove_reader(self._listening.fileno())
            self._loop.call_later(ACCEPT_AGAIN_S, self._listen)
            return
        if peer_of(sock)[1] == os.getuid():
            self._waiting[sock] = None
            self._loop.add_reader(sock.fileno(), self._asked, sock)
        else:
            sock.close()

    def _asked(self, sock: socket.socket) -> None:
        self._loop.remove_reader(sock.fileno())
        del self._waiting[sock]
        try:
            set_buffer(sock)
            question: Asked = pickle.loads(sock.recv(QUESTION_NBYTES))
        except (OSError, EOFError):
            sock.close()
            return
        if question.group:
            self._waiting[sock] = self._loop.create_task(self._hand_out(sock, question))
        else:
            _say(sock, READY, os.getpid())
            self._requests.add(Lane(sock, SegmentWriter()))

    async def _hand_out(self, sock: socket.socket, asked: Asked) -> None:
        """Make a socket a lane to a rank, as soon as the rank lives."""
        has_told, wait_s, patience = False, LOOK_AGAIN_S, Deadline(host_timeout_s())
        beat = Deadline(BEAT_S)
        try:
            while _is_there(sock):
                answer, said = await self._relay.find(asked)
                process = said.processes.get(asked.rank) if answer == READY else said
                is_next = process != asked.but or not patience.left()
                if answer == READY and is_next and said.admit(asked.rank, sock, pickle.dumps((READY, process))):
                    break
                if (answer == DIED and not has_told) or (answer not in (READY, DIED) and is_next):
                    _say(sock, answer, process)
                    if answer != DIED:
                        break
                    has_told = True
                if answer == READY and not beat.left():
                    _say(sock, WAIT, None)
                    beat = Deadline(BEAT_S)
                await asyncio.sleep(wait_s)
                wait_s = min(1.5 * wait_s, LOOK_LATER_S)
        finally:
            self._waiting.pop(sock, None)
            sock.close()


class ControllersRelay(Executor):
    """Makes the calls of groups that workers ask the controller for: those that are for several ranks, or other hosts.

    The name of a method has the key of its group before it.

    Args:
        groups: The groups, by key.
    """

    def __init__(self, groups: Mapping[str, GivenGroup]) -> None:
        super().__init__()
        self._groups = groups
        circles = Circles(self._targets)
        self.own_methods = {FIND: ControllersRelay._told, CONTROLLER + WAITS: lambda _, wait: circles.closed_by(wait)}

    def _processes_of(self, key: str) -> dict[int, Process]:
        records = _found(key, self._groups).workers().records
        return {rank: (record.host, record.pid) for rank, record in enumerate(records)}

    def _targets(self, wait: Wait) -> set[Process]:
        """The processes of the ranks that a call waits for, without those that are known here to have replied."""
        processes, ranks = self._processes_of(wait.group), set(wait.ranks)
        if len(ranks) > 1:
            calls = _found(wait.group, self._groups).work.unanswered()
            ranks &= set().union(*[one.unanswered for one in calls if one.site.method == wait.method] or [ranks])
        return {processes[rank] for rank in ranks}

    async def find(self, asked: Asked) -> tuple[str, Any]:
        """The workers on this host that have a rank, its place on another one, or why it has none: see `READY`."""
        try:
            group = _found(asked.group, self._groups)
            workers = group.workers()
        except ClosedError as error:
            return SHUT, str(error)
        workers.check()
        is_renewed = asked.rank in group.work.renewed
        failure = Failure(FailureKind.DIED, RENEWED) if is_renewed else workers.deaths.get(asked.rank)
        if failure is not None:
            return DIED, failure
        if isinstance(workers, AgentWorkers):
            agent, record = workers.agents[asked.rank], workers.records[asked.rank]
            return FAR, FarPlace(agent.address, record.host, workers.name, record.pid, workers.links.secret)
        return (READY, workers) if isinstance(workers, LaneClient) else (MOVED, ELSEWHERE)

    def begun(self, method: str, parts: Arguments, rows: RowReaders) -> tuple[Sequence[Any], dict[Any, Any], Any]:
        """Make a call, and return the coroutine that waits for its value."""
        if method in self.own_methods:
            return super().begun(method, parts, rows)
        args, kwargs = self._arguments(parts, rows)
        earlier.set(kwargs.pop(PATH))
        made, is_for_all, workers = self._method(method, kwargs)
        submit = partial(made.all if is_for_all else made.submit, *args, **kwargs)
        return (), {}, _value_of(submit, workers, made.has_functions)

    async def _told(self, asked: Asked) -> tuple[str, Any]:
        """The answer to an agent, which has the secret."""
        answer, said = await self.find(asked)
        if answer == READY:
            return MOVED, ELSEWHERE
        return answer, said._replace(secret=None) if answer == FAR else said

    def begun_generator(self, args: Sequence[Any], kwargs: dict[str, Any], kind: Any) -> Any:
        """The items of a stream of the group."""
        made, _, _ = self._method(kwargs.pop(METHOD), kwargs)
        return _items_of(made.stream(*args, **kwargs))

    def _method(self, method: str, kwargs: dict[str, Any]) -> tuple[Any, bool, Callable[[], Workers]]:
        """The method of a call, whether it is for all replicas, and what returns the workers."""
        key, _, name = method.rpartition("/")
        options, path = kwargs.pop(OPTIONS), earlier.get()
        group = _found(key, self._groups)
        made = group.method(name)
        is_for_all = options.pop(ALL, False)
        made = made.options(**options) if options else made
        is_alone = not (isinstance(made, RequestMethod) and made.runs_beside)
        processes = set(self._processes_of(key).values()) if path else ()
        for process in processes:
            step = conflict(path, process, is_alone)
            if step is not None:
                raise UsageError(refusal(path, step, name))
        made.beside, made.is_relayed = ((PATH, path),) if path else (), True
        made.calls_back = any(step.process in processes for step in path)
        return made, is_for_all, group.workers

    def failure(self, error: BaseException, kind: FailureKind = FailureKind.RAISED) -> Failure:
        """Describe an exception; the caller gets those of this library as they are."""
        relayed = isinstance(error, BandmasterError)
        return Failure.of(error, FailureKind.RELAYED) if relayed else super().failure(error, kind)


def _found(key: str, groups: Mapping[str, GivenGroup]) -> GivenGroup:
    """The group of a key. Raises ClosedError if it was closed."""
    group = groups.get(key)
    if group is None:
        raise ClosedError(f"group {key.partition(':')[2]!r} was closed; its workers cannot be called any more")
    return group


async def _value_of(submit: Callable[[], Future[Any]], workers: Callable[[], Workers], has_functions: bool) -> Any:
    """The value of a call. A thread submits it if that runs code of the user: functions of its protocol, or methods."""
    submitted: list[Future[Any]] = []
    is_given_up = False

    def send() -> Future[Any]:
        submitted.append(submit())
        if is_given_up:
            submitted[0].cancel()
        return submitted[0]

    try:
        in_thread = has_functions or workers().arrivals is None
        return await (await asyncio.wrap_future(run_in_thread("bandmaster-relay", send)) if in_thread else send())
    except WorkerDied:
        workers()  # if the group was closed, this says so
        raise
    except BaseException as error:
        is_given_up = True  # first: the thread may be about to submit it
        for future in submitted:
            future.cancel()
        if isinstance(error, CallTimeout):
            error.has_cancelled()
        raise


async def _items_of(stream: RequestStream[Any]) -> AsyncGenerator[Any, None]:
    with stream:
        async for item in stream:
            yield item


def _say(sock: socket.socket, answer: str, said: Any) -> None:
    with suppress(OSError):  # the worker is gone
        sock.send(pickle.dumps((answer, said)), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def _is_there(sock: socket.socket) -> bool:
    """Whether the other end of a socket was not closed."""
    try:
        return sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False
