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
import itertools
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bandmaster.backends.zygote_process import EXIT_S, GONE_S, MESSAGE_NBYTES, ORPHANS_S, STATUS_S, Spawn
from bandmaster.errors import PlacementError
from bandmaster.platform.forks import n_forks
from bandmaster.platform.limits import start_thread
from bandmaster.platform.locks import SigintSafeLock
from bandmaster.platform.math_threads import THREAD_VARIABLES
from bandmaster.platform.proc import stat
from bandmaster.platform.processes import Ended, Orphans, memory_file, status_in_words

__all__ = ["NoAnswer", "Zygote"]

ANSWER_S = 2.0  # for the zygote to answer what it can answer at once
POLL_S = 0.1  # how often to look whether another thread has read an answer


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
            "from bandmaster.backends.zygote_process import main; main()"
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
        with SigintSafeLock(), self._reading:  # Ctrl-C must not lose an answer, which may be another thread's
            try:
                data = self._control.recv(MESSAGE_NBYTES, socket.MSG_DONTWAIT)
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
