"""Runs in the zygote, the process that workers are forked from, and in each worker until its loop begins."""

from __future__ import annotations

import array
import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import random
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bandmaster.backends.ray.in_worker import connect_when_used
from bandmaster.platform.math_threads import set_threads
from bandmaster.platform.processes import Ended, MemoryPressure, Orphans, is_readable, prctl
from bandmaster.wire.lane import Lane
from bandmaster.wire.segment_reader import kept_name
from bandmaster.wire.segments import SegmentWriter
from bandmaster.wire.stacks import COLLECTIVES, TASKS
from bandmaster.wire.status_page import StatusPage, WorkerIdentity
from bandmaster.worker import WorkerContext
from bandmaster.worker_process.collectives import told_of_collectives
from bandmaster.worker_process.executor import Executor
from bandmaster.worker_process.loop import AnswersRequests, Loop
from bandmaster.worker_process.rendezvous import Rendezvous

GONE_S = 1.5  # time for killed processes to end
EXIT_S = 2.0  # time for the zygote to end all workers and itself
ALONE_EXIT_S = 60.0  # the same once the controller has ended: large processes on a busy machine take long to die
ORPHANS_S = 0.05  # how often to look for orphans that still run
MESSAGE_NBYTES = 150 * 1024
MAX_DESCRIPTORS = 7  # of a spawn request: lane, standard output and error, log, two sockets of the rendezvous, file
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Spawn:
    """The state that a new worker takes over from the controller, as if it had been forked from the controller itself.

    Attributes:
        identity: The worker's identity, without its pid.
        context: The attributes that the worker has before its constructor runs.
        environment: All environment variables.
        directory: Working directory.
        path: The worker's ``sys.path``.
        argv: The worker's ``sys.argv``.
        log_level: The lowest level of the log records that it sends; None for none.
    """

    identity: WorkerIdentity
    context: WorkerContext
    environment: Mapping[str, str]
    directory: str
    path: Sequence[str]
    argv: Sequence[str]
    log_level: int | None = None


def main() -> None:
    """Run the zygote. ``sys.argv`` holds the descriptor of its socket, and the arguments of `_import_all`."""
    control = socket.socket(fileno=int(sys.argv[1]))
    prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans of a dead worker become children of the zygote, which kills them
    # A process group of its own, so that Ctrl-C in a terminal reaches the controller alone. The same session, because
    # Linux schedules sessions against each other (autogroup), which would make calls slower.
    os.setpgid(0, 0)
    controller = os.pidfd_open(os.getppid())  # unlike the socket, forks of the controller do not keep it open
    skipped = _import_all(control, *sys.argv[2:])
    # Each worker does these two again, and finds in memory what they have read and imported here.
    _seed_random_streams()
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("bandmaster.debugging.breakpoints")
    gc.collect()
    gc.freeze()  # keeps the memory of imported modules shared with the workers
    _Zygote(control, controller, skipped).run()


def _import_all(control: socket.socket, skipped: str, *names: str) -> str:
    """Import modules, but for those that start threads. Those whose import fails are skipped too.

    A fork of a process with several threads can wait for ever, as only one of them exists in the fork, and not those
    that hold locks. A thread that a module has started cannot be ended, so that the zygote begins anew without it.

    Args:
        control: The socket of the zygote.
        skipped: The modules that have started threads when the zygote began before, and the threads; "" for none.
        *names: The modules.

    Returns:
        ``skipped``.
    """
    for number, name in enumerate(names):
        with contextlib.suppress(Exception, SystemExit):  # a worker that needs the module gets the error itself
            importlib.import_module(name)
        threads = _other_threads()
        if threads:
            more = f"{skipped}{'; ' if skipped else ''}{name} starts {', '.join(threads)}"
            rest = [*names[:number], *names[number + 1 :]]
            os.set_inheritable(control.fileno(), True)
            os.execv(sys.executable, [*sys.orig_argv[: -len(names) - 2], str(control.fileno()), more, *rest])
    return skipped


def _other_threads() -> list[str]:
    """The threads of this process but for the main one, by the names that Python knows, else by those of the kernel."""
    found = {thread.native_id: thread.name for thread in threading.enumerate()}
    tasks = set(map(int, os.listdir("/proc/self/task"))) - {os.getpid()}
    names = []
    for task in sorted(tasks):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            names.append(found.get(task) or Path(f"/proc/self/task/{task}/comm").read_text().strip())
    return [f"thread {name!r}" for name in names]


@dataclass
class _Ending:
    """A request that is answered when workers have ended, which are killed at a time limit.

    Attributes:
        number: Number of the request.
        pids: Process ids of the workers.
        until: The time limit, as `time.monotonic`.
        awaits_orphans: Whether the processes that they started have to end as well.
        has_killed: Whether the time limit was reached; there is another one from then on.
    """

    number: int
    pids: Sequence[int]
    until: float
    awaits_orphans: bool
    has_killed: bool = False


class _Zygote:
    """Forks workers, and records how each of them ended. While the controller lives, it blocks only in `run`'s poll."""

    def __init__(self, control: socket.socket, controller: int, skipped: str) -> None:
        self._control = control
        self._skipped = skipped
        self._controller = controller
        self._living: set[int] = set()
        self._ended: dict[int, Ended] = {}
        self._orphans = Orphans(os.getpid())
        self._has_orphans = False
        self._endings: list[_Ending] = []
        self._memory = MemoryPressure()
        self._wake, self._waker = socket.socketpair()  # becomes readable when a child ends
        self._wake.setblocking(False)
        self._waker.setblocking(False)

    def run(self) -> None:
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # sent if the controller ends while this process is stopped
        poll = select.poll()
        for source in (self._control, self._wake, self._controller):
            poll.register(source, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll(self._patience_ms())}
            self._reap()
            if self._controller in ready or (self._control.fileno() in ready and not self._take()):
                self._end_all()
                signal.set_wakeup_fd(-1)
                for end in (self._control, self._wake, self._waker):
                    end.close()  # -X dev and -W error of the controller complain of sockets that are left
                return
            self._answer_endings()

    def _patience_ms(self) -> float | None:
        """Milliseconds until the next time limit or look for orphans; None if there is neither."""
        moments = [ending.until for ending in self._endings]
        if self._has_orphans:
            moments.append(time.monotonic() + ORPHANS_S)
        return max(0.0, min(moments) - time.monotonic()) * 1000 if moments else None

    def _take(self) -> bool:
        """Read a request of the controller; False if the controller has closed the connection."""
        try:
            data, ancillary, _, _ = self._control.recvmsg(
                MESSAGE_NBYTES, socket.CMSG_SPACE(4 * MAX_DESCRIPTORS), socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionError:
            return False
        if not data:
            return False
        number, request = pickle.loads(data)
        if request is None:
            *fds, spawn = array.array("i", b"".join(chunk for _, _, chunk in ancillary))
            self._answer(number, self._fork(spawn, fds))
        else:
            pids, grace_s, awaits_orphans = request
            self._endings.append(_Ending(number, pids, time.monotonic() + grace_s, awaits_orphans))
        return True

    def _answer(self, number: int, answer: Any) -> None:
        with contextlib.suppress(ConnectionError):  # `_take` detects the end of the controller
            self._control.send(pickle.dumps((number, answer)), socket.MSG_NOSIGNAL)

    def _answer_endings(self) -> None:
        """Answer how workers ended, where all have; kill those whose time is over."""
        for ending in list(self._endings):
            running = self._living.intersection(ending.pids)
            if running or (ending.awaits_orphans and self._has_orphans):
                if time.monotonic() < ending.until:
                    continue
                if not ending.has_killed:
                    for pid in running:
                        os.kill(pid, signal.SIGKILL)  # its pid is not reused before `_reap` waits for it
                    ending.has_killed, ending.until = True, time.monotonic() + GONE_S
                    continue
            self._endings.remove(ending)
            ended = [self._ended.pop(pid, None) for pid in ending.pids]
            self._answer(ending.number, [None] * len(ended) if ending.has_killed else ended)

    def _fork(self, spawn: int, fds: list[int]) -> tuple[int, str] | str:
        with open(spawn, "rb") as file:
            what = pickle.load(file)
        try:
            pid = os.fork()
        except OSError as error:
            _close_all(fds)
            return str(error)
        if pid == 0:
            for ours in (self._control, self._wake, self._waker):
                ours.close()
            os.close(self._controller)
            _run_worker(what, *fds)
        _close_all(fds)
        self._living.add(pid)
        return pid, self._skipped

    def _reap(self) -> None:
        """Collect children that have ended, and kill their orphans, which become children of the zygote only then."""
        with contextlib.suppress(BlockingIOError):
            self._wake.recv(4096)
        reaped = []
        with contextlib.suppress(ChildProcessError):  # there are no children
            while (found := os.wait4(-1, os.WNOHANG))[0]:
                reaped.append(found)
        workers = [one for one in reaped if one[0] in self._living]
        out_of_memory = self._memory.words() if workers else ""  # an orphan must not take a worker's note away
        for pid, status, usage in workers:
            self._living.discard(pid)
            self._ended[pid] = Ended(status, usage.ru_maxrss * 1024, out_of_memory)
        if reaped or self._has_orphans:
            self._has_orphans = self._orphans.end(self._living)

    def _end_all(self) -> None:
        """Kill the workers and all processes that they started."""
        self._living.clear()
        self._has_orphans = True
        is_alone = is_readable(self._controller, 0)  # then nobody waits for this
        deadline = time.monotonic() + (ALONE_EXIT_S if is_alone else EXIT_S)
        while self._has_orphans and time.monotonic() < deadline:
            self._reap()
            is_readable(self._wake, ORPHANS_S)


def _run_worker(spawn: Spawn, lane_fd: int, stdout_fd: int, stderr_fd: int, *other_fds: int) -> None:
    """Turn this fork of the zygote into a worker; never returns. Only rank 0 gets the sockets of the rendezvous."""
    rendezvous_fds = other_fds if spawn.log_level is None else other_fds[1:]
    try:
        os.setpgid(0, 0)  # so that the processes it starts can be killed with it
        prctl(_PR_SET_CHILD_SUBREAPER, 1)  # those that leave the group stay its descendants
        _die_with_parent()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        os.dup2(stdout_fd, 1)
        os.dup2(stderr_fd, 2)
        _close_all([stdout_fd, stderr_fd])
        sys.stdout = os.fdopen(1, "w", buffering=1, errors="replace", closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
        faulthandler.enable(all_threads=False)  # a fatal signal shows the Python stack, which `WorkerDied` quotes
        _take_on(spawn)
        connect_when_used()
        if spawn.log_level is not None:
            from bandmaster.output.log_records import send_records

            send_records(other_fds[0], spawn.log_level)
        identity = replace(spawn.identity, pid=os.getpid())
        page = StatusPage(identity)
        with contextlib.suppress(ModuleNotFoundError):  # the room `debugging` may be removed
            from bandmaster.debugging.breakpoints import install_breakpoints

            install_breakpoints(identity, page.hold)
        executor = Executor(page.hold, page.activity)
        executor.prepare(spawn.context)
        sockets = [socket.socket(fileno=fd) for fd in rendezvous_fds]
        rendezvous = Rendezvous(sockets, executor.after) if sockets else None
        page.told = {TASKS: executor.told_of_tasks, COLLECTIVES: told_of_collectives}
        lane = Lane(socket.socket(fileno=lane_fd), SegmentWriter(kept_name(os.getpid())))
        Loop(lane, executor, page, _answers).run()
        executor.close()
        if rendezvous is not None:
            rendezvous.close()
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # the user's code may have closed or replaced it
                stream.flush()
        os._exit(0)


def _answers(executor: Executor, lane: Lane) -> AnswersRequests:
    from bandmaster.answering.requests import Requests

    return Requests(executor, lane)


def _take_on(spawn: Spawn) -> None:
    """Apply the controller's present environment, directory, path and arguments in place of the zygote's."""
    for name in os.environ.keys() - spawn.environment.keys():
        del os.environ[name]
    os.environ.update(spawn.environment.items() - os.environ.items())
    with contextlib.suppress(OSError):
        os.chdir(spawn.directory)
    sys.path[:] = spawn.path
    sys.argv[:] = spawn.argv
    _seed_random_streams()
    set_threads(spawn.environment)


def _seed_random_streams() -> None:
    """Seed the random streams that forks of one process would share, with entropy of the operating system.

    A module that a worker imports later seeds itself in the same way.
    """
    random.seed()
    for name in ("numpy.random", "torch"):
        if name in sys.modules:
            sys.modules[name].seed()


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _die_with_parent() -> None:
    parent = os.getppid()
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the parent had ended before the kernel was asked
