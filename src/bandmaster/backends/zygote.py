"""The process that workers are forked from: it has imported what is slow, so that they need not.

::

    controller                       zygote                                worker
    Zygote(...) ── starts ─────────► imports numpy, torch...
    spawn(...) ── descriptors ─────► fork ───────────────────────────────► serve(lane)
               ◄─ pid ──────────────┘
    how_it_ended(pid) ─────────────► waits for it ◄── exit ────────────────┘
    end(pids) ─────────────────────► kills those that do not end by themselves

Nothing outlives the controller: when it is gone, the zygote kills the workers, each with the processes it started,
and ends. When the zygote is gone, the kernel kills the workers, and the controller what they have started.
"""

from __future__ import annotations

import array
import contextlib
import gc
import importlib
import os
import pickle
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bandmaster.backends.processes import Ended, MemoryPressure, memory_file, prctl
from bandmaster.backends.threads import THREAD_VARIABLES, set_threads
from bandmaster.errors import PlacementError
from bandmaster.forks import n_forks
from bandmaster.proc import children_of
from bandmaster.wire.desk import Desk, Nameplate
from bandmaster.wire.host import WorkerHost
from bandmaster.wire.lane import Lane
from bandmaster.wire.loop import serve
from bandmaster.wire.segments import SegmentWriter

__all__ = ["Spawn", "Zygote"]

_MESSAGE_NBYTES = 150 * 1024
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Spawn:
    """What a new worker is given: what a fork of the controller itself would have had.

    Attributes:
        nameplate: Who it is, but for its pid.
        environment: Its environment, whole.
        directory: Its working directory.
        path: What it adds to ``sys.path``.
        argv: Its ``sys.argv``.
    """

    nameplate: Nameplate
    environment: Mapping[str, str]
    directory: str
    path: Sequence[str]
    argv: Sequence[str]


class Zygote:
    """The controller's end.

    Args:
        preload: Modules to import; those that are not installed are passed over.
    """

    def __init__(self, preload: Sequence[str]) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.RLock()  # a group that is collected as garbage while this is held may come back here
        self._n_asked = 0
        self._answers: dict[int, Any] = {}  # by number of the question; None where it is still awaited
        self._n_forks = n_forks()
        source = str(Path(__file__).parents[2])
        program = (
            f"import sys; sys.path[:] = [{source!r}, *filter(None, sys.path)]; "
            "from bandmaster.backends.zygote import main; main()"
        )
        single = {name: "1" for name in THREAD_VARIABLES if name not in os.environ}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program, str(theirs.fileno()), *preload],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **single},
            )
        self._workers: set[int] = set()
        watched = (os.pidfd_open(self._process.pid), self._workers)
        threading.Thread(target=_end_after, args=watched, name="bandmaster-zygote-watch", daemon=True).start()

    @property
    def is_ours(self) -> bool:
        """Whether this process has started it, rather than one that this process was forked from."""
        return self._n_forks == n_forks()

    @property
    def is_alive(self) -> bool:
        """Whether it can still be asked for workers."""
        return self._process.poll() is None

    def spawn(self, spawn: Spawn, descriptors: Sequence[int]) -> int:
        """Fork a worker whose lane, standard output and standard error are these descriptors; its pid.

        Raises:
            PlacementError: The machine cannot start one more process, or the zygote is gone.
        """
        with memory_file(pickle.dumps(spawn)) as file:  # an environment can be larger than a message
            answer = self._ask(("spawn",), [*descriptors, file.fileno()])
        if isinstance(answer, str):
            raise PlacementError(f"cannot start a worker process: {answer}")
        self._workers.add(int(answer))
        return int(answer)

    def how_it_ended(self, pid: int) -> str:
        """How a worker ended that has just hung up, as a person would say it; one that still runs is ended."""
        try:
            ended: Ended | None = self._ask(("status", pid))
        except PlacementError:
            return "killed, as the process that workers are forked from is gone"
        if ended is None:
            self.end([pid], 0.0)
            return "it closed its lane while it ran on, and so was ended"
        return ended.in_words()

    def end(self, pids: Sequence[int], grace_s: float) -> None:
        """Wait for workers to end, and kill those that do not in time, with all processes they started."""
        if self.is_alive:
            with contextlib.suppress(PlacementError):
                self._ask(("end", list(pids), grace_s))
                self._workers.difference_update(pids)

    def close(self) -> None:
        """End it, and whatever it has forked."""
        if self.is_ours:
            with contextlib.suppress(OSError):
                self._control.shutdown(socket.SHUT_RDWR)  # also where a fork of the controller has the socket too
            self._process.wait()
        self._control.close()

    def _ask(self, request: Any, descriptors: Sequence[int] = ()) -> Any:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        with self._lock:
            self._n_asked += 1
            number = self._n_asked
            self._answers[number] = None
            try:
                self._control.sendmsg([pickle.dumps((number, *request))], ancillary, socket.MSG_NOSIGNAL)
                while self._answers[number] is None:
                    data = self._control.recv(_MESSAGE_NBYTES)
                    if not data:
                        raise ConnectionResetError("it has hung up")
                    answered, answer = pickle.loads(data)
                    if answered in self._answers:  # if not, whoever asked was interrupted
                        self._answers[answered] = (answer,)
                return self._answers[number][0]
            except OSError as error:
                raise PlacementError(
                    f"the process that workers are forked from is gone ({error}); make the group again"
                ) from error
            finally:
                del self._answers[number]


def _end_after(zygote: int, workers: set[int]) -> None:
    """When the zygote is gone, the kernel ends the workers; end what they have started themselves."""
    poll = select.poll()
    poll.register(zygote, select.POLLIN)
    poll.poll()
    os.close(zygote)
    for pid in list(workers):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


# --- in the zygote ----------------------------------------------------------------------------------------------


def main() -> None:
    """What the zygote runs: ``argv`` is the descriptor of its socket, and the modules to import."""
    control = socket.socket(fileno=int(sys.argv[1]))
    prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what a dead worker leaves behind comes here to be ended
    # A process group of its own: Ctrl-C in a terminal is the controller's to handle. But the same session, as Linux
    # schedules sessions against each other (autogroup), and calls would take longer.
    os.setpgid(0, 0)
    controller = os.pidfd_open(os.getppid())  # sockets may live on in what the controller forks; this does not
    for name in sys.argv[2:]:
        with contextlib.suppress(Exception):  # whoever needs it will see why when a worker imports it
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what is imported stays shared with the workers
    _Nursery(control, controller).run()


class _Nursery:
    """Forks workers, and knows how each of them ended."""

    def __init__(self, control: socket.socket, controller: int) -> None:
        self._control = control
        self._controller = controller
        self._living: set[int] = set()
        self._ended: dict[int, Ended] = {}
        self._memory = MemoryPressure()
        self._wake, self._waker = socket.socketpair()  # the kernel's word that a worker ended
        self._wake.setblocking(False)
        self._waker.setblocking(False)

    def run(self) -> None:
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # which comes with the controller's end if this one was stopped
        poll = select.poll()
        for source in (self._control, self._wake, self._controller):
            poll.register(source, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if self._wake.fileno() in ready:
                self._reap()
            if self._controller in ready or (self._control.fileno() in ready and not self._answer()):
                self._end(list(self._living), 0.0)
                return

    def _answer(self) -> bool:
        """Do what the controller asks; False when it is gone."""
        try:
            data, ancillary, _, _ = self._control.recvmsg(
                _MESSAGE_NBYTES, socket.CMSG_SPACE(4 * 4), socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionError:
            return False
        if not data:
            return False
        number, operation, *arguments = pickle.loads(data)
        answer: Any
        if operation == "spawn":
            *fds, spawn = array.array("i", b"".join(chunk for _, _, chunk in ancillary))
            answer = self._fork(spawn, fds)
        elif operation == "status":
            answer = self._status(*arguments)
        else:
            answer = None
            self._end(*arguments)
        try:
            self._control.send(pickle.dumps((number, answer)), socket.MSG_NOSIGNAL)
        except ConnectionError:
            return False
        return True

    def _fork(self, spawn: int, fds: list[int]) -> int | str:
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
        return pid

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake.recv(4096)
        while (pid := _ended_child()) is not None:
            if pid in self._living:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)  # what it started itself; its number is taken until it is waited for
            _, status, usage = os.wait4(pid, 0)
            if pid in self._living:
                self._living.discard(pid)
                self._ended[pid] = Ended(status, usage.ru_maxrss * 1024, self._memory.words())
            self._end_orphans()

    def _end_orphans(self) -> None:
        """End what a dead worker started in sessions of their own; while it lived, it was their parent itself."""
        for pid in children_of(os.getpid()):
            if pid not in self._living:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _status(self, pid: int) -> Ended | None:
        self._wait_for([pid], 1.0)
        return self._ended.get(pid)

    def _end(self, pids: list[int], grace_s: float) -> None:
        self._wait_for(pids, grace_s)
        for pid in self._living.intersection(pids):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        self._wait_for(pids, 5.0)
        for pid in pids:
            self._ended.pop(pid, None)

    def _wait_for(self, pids: list[int], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            self._reap()
            left = deadline - time.monotonic()
            if left <= 0 or not self._living.intersection(pids):
                return
            select.select([self._wake], [], [], left)


# --- in a worker ------------------------------------------------------------------------------------------------


def _ended_child() -> int | None:
    """A child that has ended and was not waited for."""
    with contextlib.suppress(ChildProcessError):
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return found.si_pid if found is not None else None
    return None


def _run_worker(spawn: Spawn, lane_fd: int, stdout_fd: int, stderr_fd: int) -> None:
    """Become a worker; never returns."""
    try:
        os.setpgid(0, 0)  # so that the processes it starts can be ended with it
        prctl(_PR_SET_CHILD_SUBREAPER, 1)  # and those that leave the group are known as this one's as long as it lives
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
        _take_on(spawn)
        desk = Desk(replace(spawn.nameplate, pid=os.getpid()))
        host = WorkerHost(desk.hold)
        lane = Lane(socket.socket(fileno=lane_fd), SegmentWriter())
        os.register_at_fork(after_in_child=lane.socket.close)  # or the controller would not hear of this one's end
        serve(lane, host, desk)
        host.close()
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _take_on(spawn: Spawn) -> None:
    """What the controller is like now, not what it was when the zygote started."""
    os.environ.clear()
    os.environ.update(spawn.environment)
    with contextlib.suppress(OSError):
        os.chdir(spawn.directory)
    sys.path[:] = spawn.path
    sys.argv[:] = spawn.argv
    _seed_random_streams()
    set_threads(spawn.environment)


def _seed_random_streams() -> None:
    """Seed, from the operating system, the streams that forks of one process would share.

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
        os._exit(1)  # it was gone before the kernel knew
