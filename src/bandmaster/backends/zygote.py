"""The controller's side of the zygote: a process that has imported slow modules, from which workers are forked.

::

    controller                       zygote                                worker
    Zygote(...) ── starts ─────────► imports numpy, torch...
    spawn(...) ── descriptors ─────► fork ───────────────────────────────► serve(lane)
               ◄─ pid ──────────────┘
    how_it_ended(pid) ─────────────► wait4 ◄────────── exit ───────────────┘
    end(pids) ─────────────────────► kills workers that do not exit in time

Nothing outlives the controller: when it ends, the zygote kills the workers, each with the processes it started, and
exits. When the zygote ends, the kernel kills the workers, and the controller kills the processes they started. When the
zygote does not answer, because it is still importing or is stopped, the controller waits only for a limited time.
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
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bandmaster.backends.zygote_process import EXIT_S, GONE_S, MESSAGE_NBYTES, ORPHANS_S, STATUS_S, Spawn
from bandmaster.errors import PlacementError
from bandmaster.platform.forks import n_forks
from bandmaster.platform.limits import start_thread
from bandmaster.platform.locks import SigintSafeLock
from bandmaster.platform.math_threads import THREAD_VARIABLES
from bandmaster.platform.proc import running_children_of, stat
from bandmaster.platform.processes import Ended, Orphans, memory_file, status_in_words

__all__ = ["NoAnswer", "Zygote"]

ANSWER_S = 2.0  # time limit for an answer that the zygote can give at once
POLL_S = 0.1  # how often a waiting thread looks at the time
SHARED_POLL_S = 0.002  # how often it looks whether another thread has read its answer, where others wait, too
GUARD = "import os, sys; os.waitpid(os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ), 0)"
_log = logging.getLogger(__name__)


class NoAnswer(PlacementError):
    """The zygote did not answer in time."""


class Zygote:
    """Starts a zygote and sends it requests. Any thread may use it, also from signal handlers and finalizers.

    A zygote that does not answer in time is abandoned: new groups use another zygote, and the controller kills the
    workers itself. An abandoned zygote is killed once no group uses it, because its end kills its workers.

    Attributes:
        is_abandoned: Whether the zygote was abandoned.
        is_ended: Whether it was ended, or is about to be, as nobody used it any more.
        preload: Names of the modules that the zygote imports. Those that cannot be imported, or that start threads,
            are skipped.

    Args:
        preload: The same.
        variables: Environment variables of the zygote, besides those of the controller.
        is_kept: Whether the zygote stays when nobody uses it.
        has_guard: Whether the zygote is the child of a guard, a process that only waits for it. A process of Ray kills
            its children when it ends. Ray then kills the guard, whereupon the zygote ends all that workers have
            started, before itself; what it would have left to do if it had been killed, nobody else can.
    """

    def __init__(
        self, preload: Sequence[str], variables: Mapping[str, str], is_kept: bool, has_guard: bool = False
    ) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._reading = threading.RLock()  # re-entrant, as a finalizer may close a group at any point
        self._numbers = itertools.count()
        self._answers: dict[int, Any] = {}  # by number of the request; None until the answer arrives
        self._silent_since: float | None = None  # time of the first request since the last answer
        self._has_answered = False
        self.preload = tuple(preload)
        self._n_forks = n_forks()
        source = str(Path(__file__).parents[2])
        program = (
            f"import sys; sys.path[:] = {[source, *filter(None, sys.path)]!r}; "
            "from bandmaster.backends.zygote_process import main; main()"
        )
        guard = [sys.executable, "-ISc", GUARD] if has_guard else []
        single = dict.fromkeys(THREAD_VARIABLES, "1")  # workers set the number of threads that they are told
        self.is_abandoned = False
        self._users: set[int] = set()
        self._pools: set[int] = set()
        self._using = threading.RLock()  # re-entrant, as a finalizer may end a use at any point
        self._is_kept, self._has_guard, self._has_warned = is_kept, has_guard, False
        self.is_ended = False
        self._workers: set[int] = set()
        with contextlib.ExitStack() as if_it_fails, theirs:
            if_it_fails.enter_context(self._control)
            with SigintSafeLock():  # Popen leaves a process or a descriptor if Ctrl-C breaks it
                self._process = subprocess.Popen(
                    [*guard, sys.executable, "-c", program, str(theirs.fileno()), "", *preload],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env={**os.environ, **variables, **single},
                )
                if_it_fails.callback(self._process.wait)
                if_it_fails.callback(self._kill)
            if_it_fails.pop_all()
        try:
            with SigintSafeLock():  # or nobody has the descriptor
                start_thread("bandmaster-zygote-watch", _end_after, os.pidfd_open(self._process.pid), self._workers)
            atexit.register(self.close)
        except BaseException:  # no thread or descriptor is left, or Ctrl-C
            self.close()
            raise

    @property
    def is_ours(self) -> bool:
        """Whether this process started the zygote; False in a fork of the controller."""
        return self._n_forks == n_forks()

    @property
    def is_alive(self) -> bool:
        """Whether the zygote's process is running."""
        return self._process.poll() is None

    @property
    def _pid(self) -> int:
        """Process id of the zygote, which is the only child of its guard; that of the guard if the zygote has ended."""
        children = running_children_of(self._process.pid) if self._has_guard else []
        return children[0].pid if children else self._process.pid

    def _kill(self) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            self._process.kill()

    def keep_for(self, pool: object) -> bool:
        """Have the zygote stay until `let_go` was called with every pool, unless it is abandoned. False if it ended."""
        with self._using:
            self._pools.add(id(pool))  # first, as a finalizer may release the last other pool here
            return not self.is_ended

    def let_go(self, pool: object) -> None:
        """Undo `keep_for`. Calling it again, or without that, does nothing."""
        self._pools.discard(id(pool))
        self._end_if_unused()

    def begin_use(self, user: object) -> None:
        """Register a user. The zygote is not ended until every user has called `end_use`."""
        self._users.add(id(user))

    def end_use(self, user: object) -> None:
        """Unregister a user, whose workers have ended. Calling it again does nothing."""
        self._users.discard(id(user))
        self._end_if_unused()

    def abandon(self) -> None:
        """Have new groups use another zygote; this one is ended once no group uses it."""
        self.is_abandoned = True
        self._end_if_unused()

    def _end_if_unused(self) -> None:
        with self._using:
            is_unkept = self.is_abandoned or not (self._is_kept or self._pools)
            is_over = is_unkept and not self._users and not self.is_ended
            self.is_ended = self.is_ended or is_over
        if is_over:
            self.close()

    def spawn(self, spawn: Spawn, descriptors: Sequence[int], timeout_s: float | None) -> int:
        """Fork a worker.

        Args:
            spawn: What the worker takes over from the controller.
            descriptors: The worker's lane, standard output and standard error, the socket for its log records if the
                spawn has a level for them, and on rank 0 the listening socket of the rendezvous. The worker gets
                duplicates; the caller keeps its own.
            timeout_s: Time limit in seconds; None for no limit.

        Returns:
            The worker's process id.

        Raises:
            NoAnswer: The worker was not forked in time. If it is forked later, it finds its lane closed and exits.
            PlacementError: The machine cannot start another process, or the zygote has ended.
        """
        with memory_file(pickle.dumps(spawn)) as file:  # an environment can be larger than a message
            answer = self._ask(("spawn",), timeout_s, [*descriptors, file.fileno()])
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
            ended: Ended | None = self._ask(("status", pid), STATUS_S + ANSWER_S)
            words = None if ended is None else ended.in_words()
        except NoAnswer as error:
            words = self._seen_from_here(pid, error)
        except PlacementError:
            words = "killed, because the process that workers are forked from has ended"
            _kill_groups([pid])
        if words is None:
            self.end([pid], 0.0)
            return "it closed its connection to the controller but did not exit, so the controller killed it"
        self._workers.discard(pid)
        return words

    def end(self, pids: Sequence[int], grace_s: float) -> None:
        """Wait for workers to exit, and kill those that do not, with all processes that the workers started.

        In a fork of the controller this does nothing, because the workers belong to the controller.

        Args:
            pids: Process ids of the workers.
            grace_s: Seconds until the workers that are still running are killed.
        """
        if not self.is_ours:
            return
        try:
            if pids:
                self._ask(("end", list(pids), grace_s), grace_s + GONE_S + ANSWER_S)
        except NoAnswer:
            self._end_from_here(pids)
        except PlacementError:  # the zygote has ended, and the kernel has killed the workers, but not their children
            _kill_groups(self._workers.intersection(pids))
        self._workers.difference_update(pids)

    def close(self) -> None:
        """End the zygote, its workers, and all processes that the workers started."""
        atexit.unregister(self.close)
        if self.is_ours:
            if self._has_answered:  # else no worker was forked, or none that has been called
                self.end(list(self._workers), 0.0)
            else:
                self._kill()
            with contextlib.suppress(OSError):
                self._control.shutdown(socket.SHUT_RDWR)  # close() would not, if a fork holds the socket
            try:
                self._process.wait(0.0 if self.is_abandoned else EXIT_S + 1.0)
            except subprocess.TimeoutExpired:
                self._kill()
                with contextlib.suppress(subprocess.TimeoutExpired):  # it may be blocked in the kernel
                    self._process.wait(GONE_S)
        self._control.close()

    def _ask(self, request: Any, timeout_s: float | None, descriptors: Sequence[int] = ()) -> Any:
        """Send a request and wait for its answer.

        Raises:
            NoAnswer: No answer arrived within ``timeout_s``.
            PlacementError: The zygote has ended.
        """
        if self.is_abandoned and self._is_silent():
            timeout_s = POLL_S  # it may answer again, but the full time limit is spent only once
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
                others = SHARED_POLL_S if len(self._answers) > 1 and is_sent else POLL_S
                poll.poll(min(left, others) * 1000)  # another waiting thread may read the answer to this request
                if not is_sent:
                    is_sent = self._send(pickle.dumps((number, *request)), ancillary)
                self._receive()
            return self._answers[number][0]
        except (OSError, ValueError) as error:  # ValueError: this process has closed the socket
            raise PlacementError(f"{self._who()} has ended ({error}); create the group again") from error
        finally:
            self._answers.pop(number, None)

    def _send(self, message: bytes, ancillary: Any) -> bool:
        """Send a message; False if the socket is full, because the zygote has not read earlier messages."""
        try:
            self._control.sendmsg([message], ancillary, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        return True

    def _receive(self) -> None:
        """Read an answer, if one has arrived."""
        with SigintSafeLock(), self._reading:  # Ctrl-C must not lose an answer, which may be another thread's
            try:
                data = self._control.recv(MESSAGE_NBYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            if not data:
                raise ConnectionResetError("it closed its socket")
            self._silent_since, self._has_answered = None, True
            number, answer = pickle.loads(data)
            if number in self._answers:  # else the thread that asked was interrupted, or its time is over
                self._answers[number] = (answer,)

    def _unanswered(self) -> NoAnswer:
        """Make the error for a request without an answer. A zygote that has been silent for `ANSWER_S` is abandoned."""
        if self._is_silent():
            self.is_abandoned = True
        found = stat(self._pid)
        if found is not None and found.state in "Tt":
            state = "is stopped"
        elif not self._has_answered:
            state = f"is still importing {', '.join(self.preload)}"
        else:
            state = "does not answer"
        return NoAnswer(f"{self._who()} {state}")

    def _is_silent(self) -> bool:
        """Whether the zygote has had a request for at least `ANSWER_S` seconds without answering any."""
        return self._silent_since is not None and time.monotonic() - self._silent_since >= ANSWER_S

    def _who(self) -> str:
        return f"the process that workers are forked from (pid {self._pid})"

    def _seen_from_here(self, pid: int, why: NoAnswer) -> str | None:
        """How a worker ended, as far as /proc shows it without the zygote's help; None if it is still running."""
        found = stat(pid)
        if found is None or found.parent != self._pid:
            return f"it has ended; its exit status is unknown, because {why}"
        return status_in_words(found.status) if found.state in "ZX" else None

    def _end_from_here(self, pids: Sequence[int]) -> None:
        """Kill workers in place of a zygote that does not answer, and all orphans that the zygote inherited."""
        orphans, others = Orphans(self._pid), self._workers.difference(pids)
        deadline = time.monotonic() + GONE_S
        while orphans.end(others) and time.monotonic() < deadline:
            time.sleep(ORPHANS_S)  # poll, as only a parent is notified when a process ends


def _end_after(zygote: int, workers: set[int]) -> None:
    """Wait for the zygote to end, whereupon the kernel kills the workers; then kill the processes that they started."""
    poll = select.poll()
    poll.register(zygote, select.POLLIN)
    poll.poll()
    os.close(zygote)
    _kill_groups(list(workers))


def _kill_groups(workers: Iterable[int]) -> None:
    """Kill workers and the processes that they started; whoever finds the zygote dead first does this.

    A worker must be killed in this way before it is removed from the zygote's workers.
    """
    for pid in workers:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
