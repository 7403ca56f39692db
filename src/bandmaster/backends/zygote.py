"""The process that workers are forked from: it has imported what is slow, so that they need not.

::

    controller                       zygote                                worker
    Zygote(...) ── starts ─────────► imports numpy, torch...
    spawn(...) ── descriptors ─────► fork ───────────────────────────────► serve(lane)
               ◄─ pid ──────────────┘
    how_it_ended(pid) ─────────────► waits for it ◄── exit ────────────────┘
    end(pids) ─────────────────────► kills those that do not end by themselves

Nothing outlives the controller: when it is gone, the zygote kills the workers, each with the processes it started,
and ends. When the zygote is gone, the kernel kills the workers, and the controller what they have started. When the
zygote does not answer, because it still imports or is stopped, the controller does not wait for it for ever.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import gc
import importlib
import itertools
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

from bandmaster.backends.processes import Ended, MemoryPressure, Orphans, memory_file, prctl, status_in_words
from bandmaster.backends.threads import THREAD_VARIABLES, set_threads
from bandmaster.errors import PlacementError
from bandmaster.forks import n_forks
from bandmaster.limits import start_thread
from bandmaster.proc import stat
from bandmaster.wire.desk import Desk, Nameplate
from bandmaster.wire.host import WorkerHost
from bandmaster.wire.lane import Lane
from bandmaster.wire.loop import serve
from bandmaster.wire.segments import SegmentWriter
from bandmaster.wire.steady import SteadyLock

__all__ = ["NoAnswer", "Spawn", "Zygote"]

ANSWER_S = 2.0  # for the zygote to answer what it can answer at once
STATUS_S = 1.0  # for a worker to end that has hung up
GONE_S = 1.5  # for processes to be gone that were killed
EXIT_S = 2.0  # for the zygote to end all workers, and itself
ORPHANS_S = 0.05  # how often to look whether some are left
POLL_S = 0.1  # how often to look whether another thread has read an answer
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


class NoAnswer(PlacementError):
    """The zygote has not answered in time."""


class Zygote:
    """The controller's end. Any thread may use it, and so may a signal's handler or a finalizer in one that does.

    A zygote that does not answer is abandoned: it gets no more groups, the controller ends its workers itself, and it
    is killed once no group uses it, as that would kill its workers.

    Attributes:
        is_abandoned: Whether it has not answered in time.

    Args:
        preload: Modules to import; those that are not installed are passed over.
    """

    def __init__(self, preload: Sequence[str]) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._reading = threading.RLock()  # re-entrant, as a finalizer may end a group anywhere
        self._numbers = itertools.count()
        self._answers: dict[int, Any] = {}  # by number of the question; None where it is still awaited
        self._silent_since: float | None = None  # when it was asked something, if it has not answered anything since
        self._has_answered = False
        self._preload = preload
        self._n_forks = n_forks()
        source = str(Path(__file__).parents[2])
        program = (
            f"import sys; sys.path[:] = [{source!r}, *filter(None, sys.path)]; "
            "from bandmaster.backends.zygote import main; main()"
        )
        single = {name: "1" for name in THREAD_VARIABLES if name not in os.environ}
        with contextlib.ExitStack() as if_it_fails, theirs:
            if_it_fails.enter_context(self._control)
            self._process = subprocess.Popen(
                [sys.executable, "-c", program, str(theirs.fileno()), *preload],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **single},
            )
            if_it_fails.pop_all()
        self.is_abandoned = False
        self._users: set[int] = set()
        self._workers: set[int] = set()
        try:
            start_thread("bandmaster-zygote-watch", _end_after, os.pidfd_open(self._process.pid), self._workers)
            atexit.register(self.close)
        except BaseException:  # there is no thread or no descriptor left for this, or Ctrl-C
            self.close()
            raise

    @property
    def is_ours(self) -> bool:
        """Whether this process has started it, rather than one that this process was forked from."""
        return self._n_forks == n_forks()

    @property
    def is_alive(self) -> bool:
        """Whether its process is there."""
        return self._process.poll() is None

    def begin_use(self, user: object) -> None:
        """It is not killed before this user calls `end_use`."""
        self._users.add(id(user))

    def end_use(self, user: object) -> None:
        """This user has ended its workers. Calling it again does nothing."""
        self._users.discard(id(user))
        if self.is_abandoned and not self._users:
            self.close()

    def spawn(self, spawn: Spawn, descriptors: Sequence[int], timeout_s: float | None) -> int:
        """Fork a worker whose lane, standard output and standard error are these descriptors; its pid.

        Raises:
            NoAnswer: It was not forked in time. If it still will be, it finds that its lane is closed, and ends.
            PlacementError: The machine cannot start one more process, or the zygote is gone.
        """
        with memory_file(pickle.dumps(spawn)) as file:  # an environment can be larger than a message
            answer = self._ask(("spawn",), timeout_s, [*descriptors, file.fileno()])
        if isinstance(answer, str):
            raise PlacementError(f"cannot start a worker process: {answer}")
        self._workers.add(int(answer))
        return int(answer)

    def how_it_ended(self, pid: int) -> str:
        """How a worker ended that has just hung up, as a person would say it; one that still runs is ended."""
        try:
            ended: Ended | None = self._ask(("status", pid), STATUS_S + ANSWER_S)
            words = None if ended is None else ended.in_words()
        except NoAnswer as error:
            words = self._seen_from_here(pid, error)
        except PlacementError:
            words = "killed, as the process that workers are forked from is gone"
        if words is None:
            self.end([pid], 0.0)
            return "it closed its lane while it ran on, and so was ended"
        self._workers.discard(pid)
        return words

    def end(self, pids: Sequence[int], grace_s: float) -> None:
        """Wait for workers to end, and kill those that do not in time, with all processes they started.

        In a fork of the controller this does nothing: they are not its own.
        """
        if not self.is_ours:
            return
        try:
            if self.is_alive and pids:
                self._ask(("end", list(pids), grace_s), grace_s + GONE_S + ANSWER_S)
        except PlacementError:
            self._end_from_here(pids)
        self._workers.difference_update(pids)

    def close(self) -> None:
        """End it, and whatever it has forked."""
        atexit.unregister(self.close)
        if self.is_ours:
            if self._has_answered:  # else it has forked nothing, or nothing that has anything to do
                self.end(list(self._workers), 0.0)
            else:
                self._process.kill()
            with contextlib.suppress(OSError):
                self._control.shutdown(socket.SHUT_RDWR)  # also where a fork of the controller has the socket too
            try:
                self._process.wait(0.0 if self.is_abandoned else EXIT_S + 1.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel may hold it up
                    self._process.wait(GONE_S)
        self._control.close()

    def _ask(self, request: Any, timeout_s: float | None, descriptors: Sequence[int] = ()) -> Any:
        """The answer to a request.

        Raises:
            NoAnswer: There was none in time.
            PlacementError: The zygote is gone.
        """
        if self.is_abandoned and self._is_silent():
            timeout_s = POLL_S  # it may answer again, but it is not waited for once more
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        number, began, is_sent = next(self._numbers), time.monotonic(), False
        self._silent_since = self._silent_since or began
        poll = select.poll()
        try:
            self._answers[number] = None
            while self._answers[number] is None:
                left = POLL_S if timeout_s is None else began + timeout_s - time.monotonic()
                if left <= 0:
                    raise self._unanswered()
                poll.register(self._control, select.POLLIN if is_sent else select.POLLIN | select.POLLOUT)
                poll.poll(min(left, POLL_S) * 1000)  # whoever else waits may read the answer to this one
                if not is_sent:
                    is_sent = self._send(pickle.dumps((number, *request)), ancillary)
                self._receive()
            return self._answers[number][0]
        except (OSError, ValueError) as error:  # ValueError: its socket has been closed here
            raise PlacementError(f"{self._who()} is gone ({error}); make the group again") from error
        finally:
            self._answers.pop(number, None)

    def _send(self, message: bytes, ancillary: Any) -> bool:
        """Send a message; False if the zygote has not read those before."""
        try:
            self._control.sendmsg([message], ancillary, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        return True

    def _receive(self) -> None:
        """Take an answer, if there is one."""
        with SteadyLock(), self._reading:  # Ctrl-C must not lose an answer, which may be another thread's
            try:
                data = self._control.recv(_MESSAGE_NBYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            if not data:
                raise ConnectionResetError("it has hung up")
            self._silent_since, self._has_answered = None, True
            number, answer = pickle.loads(data)
            if number in self._answers:  # if not, whoever asked was interrupted, or has not waited so long
                self._answers[number] = (answer,)

    def _unanswered(self) -> NoAnswer:
        """The error for this; a zygote that is silent is abandoned."""
        if self._is_silent():
            self.is_abandoned = True
        found = stat(self._process.pid)
        if found is not None and found.state in "Tt":
            state = "is stopped"
        elif not self._has_answered:
            state = f"is still importing {', '.join(self._preload)}"
        else:
            state = "does not answer"
        return NoAnswer(f"{self._who()} {state}")

    def _is_silent(self) -> bool:
        """Whether it has answered nothing for so long that it may never."""
        return self._silent_since is not None and time.monotonic() - self._silent_since >= ANSWER_S

    def _who(self) -> str:
        return f"the process that workers are forked from (pid {self._process.pid})"

    def _seen_from_here(self, pid: int, why: NoAnswer) -> str | None:
        """How a worker ended, as far as it can be seen without the zygote; None if it still runs."""
        found = stat(pid)
        if found is None or found.parent != self._process.pid:
            return f"it has ended; how is not known, as {why}"
        return status_in_words(found.status) if found.state in "ZX" else None

    def _end_from_here(self, pids: Sequence[int]) -> None:
        """End workers as the zygote would, which does not; all that it became the parent of as well."""
        orphans, others = Orphans(self._process.pid), self._workers.difference(pids)
        deadline = time.monotonic() + GONE_S
        while orphans.end(others) and time.monotonic() < deadline:
            time.sleep(ORPHANS_S)  # only their parent is told of their end


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
        with contextlib.suppress(Exception, SystemExit):  # whoever needs it will see why when a worker imports it
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what is imported stays shared with the workers
    _Nursery(control, controller).run()


@dataclass
class _Question:
    """One that is answered when workers have ended.

    Attributes:
        number: Of the question.
        pids: The workers.
        until: How long to wait for that.
        kills: Whether those are killed then that have not ended, and waited for once more.
        has_killed: Whether this was done.
    """

    number: int
    pids: frozenset[int]
    until: float
    kills: bool
    has_killed: bool = False


class _Nursery:
    """Forks workers, and knows how each of them ended. It waits only in one place, for whatever may come."""

    def __init__(self, control: socket.socket, controller: int) -> None:
        self._control = control
        self._controller = controller
        self._living: set[int] = set()
        self._ended: dict[int, Ended] = {}
        self._orphans = Orphans(os.getpid())
        self._has_orphans = False
        self._questions: list[_Question] = []
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
            ready = {fd for fd, _ in poll.poll(self._patience_ms())}
            self._reap()
            if self._controller in ready or (self._control.fileno() in ready and not self._take()):
                self._end_all()
                signal.set_wakeup_fd(-1)
                return
            self._answer_what_is_due()

    def _patience_ms(self) -> float | None:
        """How long there is nothing to do if nothing comes."""
        moments = [question.until for question in self._questions]
        if self._has_orphans:
            moments.append(time.monotonic() + ORPHANS_S)
        return max(0.0, min(moments) - time.monotonic()) * 1000 if moments else None

    def _take(self) -> bool:
        """Take a question of the controller's; False when it is gone."""
        try:
            data, ancillary, _, _ = self._control.recvmsg(
                _MESSAGE_NBYTES, socket.CMSG_SPACE(4 * 4), socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionError:
            return False
        if not data:
            return False
        number, operation, *arguments = pickle.loads(data)
        if operation == "spawn":
            *fds, spawn = array.array("i", b"".join(chunk for _, _, chunk in ancillary))
            self._answer(number, self._fork(spawn, fds))
        elif operation == "status":
            (pid,) = arguments
            self._questions.append(_Question(number, frozenset([pid]), time.monotonic() + STATUS_S, kills=False))
        else:
            pids, grace_s = arguments
            self._questions.append(_Question(number, frozenset(pids), time.monotonic() + grace_s, kills=True))
        return True

    def _answer(self, number: int, answer: Any) -> None:
        with contextlib.suppress(ConnectionError):  # that the controller is gone is seen when it is read from
            self._control.send(pickle.dumps((number, answer)), socket.MSG_NOSIGNAL)

    def _answer_what_is_due(self) -> None:
        for question in list(self._questions):
            running = self._living & question.pids
            is_over = not running and not (question.kills and self._has_orphans)
            if not is_over and time.monotonic() < question.until:
                continue
            if not is_over and question.kills and not question.has_killed:
                for pid in running:
                    os.kill(pid, signal.SIGKILL)  # its number is taken until it is waited for
                question.has_killed, question.until = True, time.monotonic() + GONE_S
                continue
            self._questions.remove(question)
            if question.kills:
                for pid in question.pids:
                    self._ended.pop(pid, None)
                self._answer(question.number, None)
            else:
                (pid,) = question.pids
                self._answer(question.number, self._ended.get(pid))

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
        """Wait for what has ended, and end what it has left: while it lived, it was the parent of that itself."""
        with contextlib.suppress(BlockingIOError):
            self._wake.recv(4096)
        has_reaped = False
        with contextlib.suppress(ChildProcessError):  # there is none
            while (found := os.wait4(-1, os.WNOHANG))[0]:
                pid, status, usage = found
                has_reaped = True
                if pid in self._living:
                    self._living.discard(pid)
                    self._ended[pid] = Ended(status, usage.ru_maxrss * 1024, self._memory.words())
        if has_reaped or self._has_orphans:
            self._has_orphans = self._orphans.end(self._living)

    def _end_all(self) -> None:
        """End the workers and whatever they have started."""
        self._living.clear()
        self._has_orphans = True
        deadline = time.monotonic() + EXIT_S
        while self._has_orphans and time.monotonic() < deadline:
            self._reap()
            select.select([self._wake], [], [], ORPHANS_S)


# --- in a worker ------------------------------------------------------------------------------------------------


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
        lane = Lane(socket.socket(fileno=lane_fd), SegmentWriter(), is_only_reader=True)
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
