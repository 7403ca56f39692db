"""The controller's side of the zygote: a process that has imported slow modules, from which workers are forked.

::

    controller                       zygote                                worker
    Zygote(...) ── starts ─────────► imports numpy, torch...
    spawn(...) ── descriptors ─────► fork ───────────────────────────────► serve(lane)
               ◄─ pid ──────────────┘
    end(pids) ─────────────────────► wait4 ◄────────── exit ───────────────┘
               ◄─ how each ended ────  kills workers that do not exit in time

Nothing outlives the controller: when it ends, the zygote kills the workers, each with the processes it started, and
exits. When the zygote ends, the kernel kills the workers, and the controller kills the processes they started, but for
those that have left the process groups of the workers: by then, they are no descendants of any of these processes.

A zygote that imports answers nothing yet, and is waited for as long as a group's ``start_timeout`` says. Once it has
answered, it has to go on answering: one that is silent for `ANSWER_S`, and does not compute, is killed, and the next
group starts another one.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import itertools
import logging
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bandmaster.backends.zygote_process import EXIT_S, GONE_S, MESSAGE_NBYTES, ORPHANS_S, Spawn
from bandmaster.errors import PlacementError
from bandmaster.platform.forks import n_forks
from bandmaster.platform.limits import start_thread
from bandmaster.platform.locks import SigintSafeLock
from bandmaster.platform.math_threads import THREAD_VARIABLES
from bandmaster.platform.proc import children_of, stat
from bandmaster.platform.processes import Ended, end_descendants, is_readable

ANSWER_S = 10.0  # for an answer that the zygote can give at once: its silence costs all its workers
BUSY_S = 60.0  # the same as long as it computes, or waits for a processor
STATUS_S = 1.0  # time for a worker to exit after it closed its lane
POLL_S = 0.02  # how often a waiting thread looks at the time, and whether another thread has read its answer
GUARD = "import os, sys; os.waitpid(os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ), 0)"
_log = logging.getLogger(__name__)


class NoAnswer(PlacementError):
    """The zygote did not answer before the caller's own deadline."""


class Zygote:
    """Starts a zygote and sends it requests. Any thread may use it, also from signal handlers and finalizers.

    Attributes:
        control: The socket by which the controller reaches the zygote.
        modules: Names of the modules that the zygote imports. Those that cannot be imported, or that start threads,
            are skipped.
        is_ended: Whether it was ended, as nobody held it any more, or because it did not answer.

    Args:
        modules: The same.
        variables: Environment variables of the zygote, besides those of the controller.
        has_guard: Whether the zygote is the child of a guard, a process that only waits for it. A process of Ray kills
            its children when it ends. Ray then kills the guard, whereupon the zygote ends all that workers have
            started, before itself; what it would have left to do if it had been killed, nobody else can.
    """

    def __init__(self, modules: Sequence[str], variables: Mapping[str, str], has_guard: bool) -> None:
        self.modules = tuple(modules)
        self.is_ended = False
        self._holders: set[int] = set()
        self._ending = threading.RLock()  # re-entrant, as a finalizer may release the zygote at any point
        self._workers: set[int] = set()
        self._numbers = itertools.count()
        self._answers: dict[int, Any] = {}  # by number of the request; None until the answer arrives
        self._reading = threading.RLock()  # re-entrant, as a finalizer may close a group at any point
        self._silent_since: float | None = None  # time of the first request since the last answer
        self._has_answered = self._has_warned = False
        self._has_guard = has_guard
        self._why_ended = "has ended"
        self._n_forks = n_forks()
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.ExitStack() as if_it_fails, theirs:
            if_it_fails.enter_context(self.control)
            with SigintSafeLock():  # Popen leaves a process or a descriptor if Ctrl-C breaks it
                self._process = _start(theirs, self.modules, variables, has_guard)
                if_it_fails.callback(self._kill)
                pidfd = os.pidfd_open(self._process.pid)
                self._watch = start_thread("bandmaster-zygote-watch", _end_after, pidfd, self._workers)
            atexit.register(self.close, "was ended at the exit of the controller")
            if_it_fails.pop_all()

    @property
    def pid(self) -> int:
        """Process id of the zygote; that of its guard if it has ended."""
        children = children_of(self._process.pid) if self._has_guard else []
        return children[0].pid if children else self._process.pid

    @property
    def is_ours(self) -> bool:
        """Whether this process started the zygote; False in a fork of the controller."""
        return self._n_forks == n_forks()

    @property
    def is_alive(self) -> bool:
        """Whether the zygote's process is running."""
        return self._process.poll() is None

    def hold(self, holder: object) -> bool:
        """Have the zygote stay until `release` was called with every holder. False if it was ended before."""
        with self._ending:
            self._holders.add(id(holder))
            return not self.is_ended

    def release(self, holder: object) -> None:
        """Undo `hold`, and end the zygote if nobody holds it any more. Without a `hold`, this does nothing."""
        with self._ending:
            is_over = {id(holder)} == self._holders and not self.is_ended
            self._holders.discard(id(holder))
            self.is_ended = self.is_ended or is_over
        if is_over:
            self.close()

    def spawn(self, spawn: Spawn, descriptors: Sequence[int], timeout_s: float | None) -> int:
        """Fork a worker.

        Args:
            spawn: The state that the worker takes over from the controller.
            descriptors: The worker's lane, standard output and standard error, the socket for its log records if the
                spawn has a level for them, and on rank 0 the listening socket of the rendezvous. The worker gets
                duplicates; the caller keeps its own.
            timeout_s: Time limit in seconds; None for no limit.

        Returns:
            The worker's process id.

        Raises:
            NoAnswer: The worker was not forked in time. If it is forked later, it finds its lane closed and exits.
            PlacementError: The machine cannot start another process, or the zygote has ended or does not answer.
        """
        with SigintSafeLock():  # so that Ctrl-C cannot leak the descriptor
            made = open(os.memfd_create("bandmaster-spawn", os.MFD_CLOEXEC), "w+b")  # noqa: SIM115
        with made as file:  # an environment can be larger than a message
            pickle.dump(spawn, file)
            file.seek(0)  # writes out first
            answer = self._ask(None, 0.0, timeout_s, [*descriptors, file.fileno()])
        if isinstance(answer, str):
            raise PlacementError(f"cannot start a worker process: {answer}")
        pid, skipped = answer
        self._workers.add(pid)
        if skipped and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "each worker imports some modules itself, rather than sharing one import, because a process that has "
                "threads cannot be forked safely: %s",
                skipped,
            )
        return int(pid)

    def how_it_ended(self, pid: int) -> str:
        """Describe, for a message, how a worker ended whose lane was closed. If it is still running, it is killed."""
        try:
            (ended,) = self._end([pid], STATUS_S, awaits_orphans=False)
        except PlacementError:
            return f"killed, because the process that workers are forked from {self._why_ended}"
        if ended is None:
            return "it closed its connection to the controller but did not exit, so the controller killed it"
        return ended.in_words()

    def end(self, pids: Sequence[int], grace_s: float) -> None:
        """Wait for workers to exit, and kill those that do not, with all processes that the workers started.

        In a fork of the controller this does nothing, because the workers belong to the controller.

        Args:
            pids: Process ids of the workers.
            grace_s: Seconds until the workers that are still running are killed.
        """
        if self.is_ours and pids:
            with contextlib.suppress(PlacementError):  # the zygote has ended, and with it the workers
                self._end(pids, grace_s, awaits_orphans=True)

    def _end(self, pids: Sequence[int], grace_s: float, awaits_orphans: bool) -> Sequence[Ended | None]:
        """Wait for workers to exit. Returns how each ended; None for each if some had to be killed.

        Raises:
            PlacementError: The zygote has ended: the kernel has killed the workers, and `_watch` their children.
        """
        try:
            ended: Sequence[Ended | None] = self._ask((list(pids), grace_s, awaits_orphans), grace_s + GONE_S)
        except PlacementError:
            self._watch.join(GONE_S)
            raise
        self._workers.difference_update(pids)
        return ended

    def close(self, why: str = "") -> None:
        """End the zygote, its workers, and all processes that the workers started.

        Args:
            why: What the errors of calls say that happened to the zygote; by default what they said before.
        """
        self._why_ended = why or self._why_ended
        self.is_ended = True
        atexit.unregister(self.close)
        if self.is_ours:
            with contextlib.suppress(OSError):
                self.control.shutdown(socket.SHUT_RDWR)  # close() would not, if a fork holds the socket
            try:
                self._process.wait(EXIT_S + 1.0 if self._has_answered else 0.0)  # it has no workers before
            except subprocess.TimeoutExpired:
                self._kill()
        self.control.close()

    def _kill(self) -> None:
        """Kill the zygote, its guard and all descendants, which need not have been started by living workers."""
        deadline = time.monotonic() + GONE_S
        while end_descendants(self._process.pid) and time.monotonic() < deadline:
            time.sleep(ORPHANS_S)  # children of killed processes become children of the zygote
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it may be blocked in the kernel
            self._process.wait(GONE_S)

    def _ask(
        self, request: Any, takes_s: float, timeout_s: float | None = None, descriptors: Sequence[int] = ()
    ) -> Any:
        """Send a request and wait for its answer.

        Args:
            request: The pids, grace and whether orphans are awaited, of workers that are to end; None to fork one.
            takes_s: Seconds that the zygote may take for it.
            timeout_s: Seconds after which the caller gives up; None for no limit.
            descriptors: Descriptors that go with the request.

        Raises:
            NoAnswer: No answer arrived within ``timeout_s``.
            PlacementError: The zygote has ended, or was ended because it did not answer.
        """
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        number, began, is_sent = next(self._numbers), time.monotonic(), False
        poll, message = select.poll(), pickle.dumps((number, request))
        try:
            self._answers[number] = None
            while self._answers[number] is None:
                if not is_sent:
                    with contextlib.suppress(BlockingIOError):  # the zygote has not read earlier messages
                        self.control.sendmsg([message], ancillary, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
                        is_sent = True
                poll.register(self.control, select.POLLIN if is_sent else select.POLLIN | select.POLLOUT)
                if not poll.poll(POLL_S * 1000):
                    self._check_time(began, takes_s, timeout_s)
                self._receive()
            return self._answers[number][0]
        except (OSError, ValueError) as error:  # ValueError: this process has closed the socket
            raise PlacementError(f"{self._who} {self._why_ended} ({error}); create the group again") from error
        finally:
            self._answers.pop(number, None)

    def _receive(self) -> None:
        """Read an answer, if one has arrived."""
        with SigintSafeLock(), self._reading:  # Ctrl-C must not lose an answer, which may be another thread's
            try:
                data = self.control.recv(MESSAGE_NBYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            if not data:
                raise ConnectionResetError("it closed its socket")
            self._silent_since, self._has_answered = None, True
            number, answer = pickle.loads(data)
            if number in self._answers:  # else the thread that asked was interrupted, or its time is over
                self._answers[number] = (answer,)

    def _check_time(self, began: float, takes_s: float, timeout_s: float | None) -> None:
        """Raise `NoAnswer` if the caller's time is over, and kill the zygote if it has been silent for too long."""
        now = time.monotonic()
        if timeout_s is not None and now - began >= timeout_s:
            state = "has not answered yet" if self._has_answered else f"is still importing {', '.join(self.modules)}"
            raise NoAnswer(f"{self._who} {state}")
        self._silent_since = self._silent_since or now
        silent_s = now - self._silent_since - takes_s
        if self._has_answered and silent_s >= ANSWER_S and (silent_s >= BUSY_S or not self._is_busy):
            self._why_ended = f"did not answer for {silent_s:.0f} s and was killed"
            self._kill()
            self.close()

    @property
    def _is_busy(self) -> bool:
        """Whether it computes, or would if others left it a processor."""
        found = stat(self.pid)
        return found is not None and found.state == "R"

    @property
    def _who(self) -> str:
        return f"the process that workers are forked from (pid {self.pid})"


def _start(
    control: socket.socket, modules: Sequence[str], variables: Mapping[str, str], has_guard: bool
) -> subprocess.Popen[bytes]:
    source = str(Path(__file__).parents[2])
    paths = [source, *(path for path in sys.path if path and isinstance(path, str))]  # Python ignores others
    program = (  # each path is an argument, as Linux has a limit of 128 KiB for one
        f"import sys; sys.path[:] = sys.argv[1:{len(paths) + 1}]; del sys.argv[1:{len(paths) + 1}]; "
        "from bandmaster.backends.zygote_process import main; main()"
    )
    guard = [sys.executable, "-ISc", GUARD] if has_guard else []
    single = dict.fromkeys(THREAD_VARIABLES, "1")  # workers set the number of threads that they are told
    by_env = [f"-W{option}" for option in os.environ.get("PYTHONWARNINGS", "").split(",")]  # inherited
    flags = [flag for flag in subprocess._args_from_interpreter_flags() if flag not in by_env]  # type: ignore[attr-defined]
    return subprocess.Popen(
        [*guard, sys.executable, *flags, "-c", program, *paths, str(control.fileno()), "", *modules],
        stdin=subprocess.DEVNULL,
        pass_fds=[control.fileno()],
        env={**os.environ, **variables, **single},
    )


def _end_after(zygote: int, workers: set[int]) -> None:
    """Wait for the zygote to end, whereupon the kernel kills the workers; then kill their process groups."""
    is_readable(zygote)
    os.close(zygote)
    for pid in list(workers):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
