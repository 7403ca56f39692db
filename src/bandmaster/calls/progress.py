"""One thread that drives calls and checks workers for which no other thread waits.

::

    add_done_callback, await, on_death ──► Progress.add(watch) ──► the thread: blocks until
                                                                     a reply arrives at a group that is watched,
                                                                     a ticket was done by another thread, or
                                                                     a watch is due
                                           watch.look() ◄────────── and looks; it ends soon after the last watch
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from bandmaster.contract import Workers
from bandmaster.errors import ResourceError, UsageError
from bandmaster.platform.deadline import Deadline
from bandmaster.platform.limits import start_thread
from bandmaster.platform.locks import SigintSafeLock

PATIENCE_S = 0.02  # a watch that is due is looked at again after this time: another thread may be at it
LOOK_S = 0.1  # polling interval for workers without a descriptor that shows arrivals
IDLE_S = 0.05  # after which the thread ends without watches; a pipeline soon adds one, and a start takes 0.3 ms
LOOK_AROUND_S = 5.0  # after which all watches are looked at: Ctrl-C may have come as one was to be told
_log = logging.getLogger(__name__)


class Watch(Protocol):
    """An object that the thread looks at when something may have happened.

    Attributes:
        workers: The workers whose replies and deaths it watches.
        due: The moment at which to look at the latest, by `time.monotonic`; None for no moment.
    """

    workers: Workers
    due: float | None

    def look(self) -> bool:
        """Make progress without waiting. Returns whether the watch is over."""


class Once:
    """A watch that calls a function, which ends some work of workers, in the thread, once."""

    due: float | None = None

    def __init__(self, workers: Workers, function: Callable[[], object]) -> None:
        self.workers, self._function = workers, function

    def look(self) -> bool:
        """Call the function. Returns that the watch is over."""
        self._function()
        return True


class Progress:
    """The watches of this process, and the thread, which runs as long as there are watches, and a moment longer.

    Attributes:
        lock: Guards the watches. It is re-entrant, because garbage collection while it is held may call this object.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._watches: dict[int, Watch] = {}  # by their ids
        self._to_look: deque[Watch] = deque()
        self._wake = self._waker = -1  # the ends of a pipe
        self._looked_around = 0.0  # when it last looked at all watches
        self._ident: int | None = None  # of the thread

    def add(self, watch: Watch) -> None:
        """Add a watch, and start the thread if it does not run.

        Raises:
            ResourceError: The system allows no more threads or descriptors.
        """
        with SigintSafeLock(), self.lock:  # so that Ctrl-C does not leave half of these changes
            if self._wake < 0:
                try:
                    self._wake, self._waker = os.pipe()
                except OSError as error:
                    raise ResourceError(f"there is no descriptor to wait in the background with ({error})") from error
                os.set_blocking(self._waker, False)
                try:
                    start_thread("bandmaster-progress", self._run)
                except ResourceError:
                    self._close()
                    raise
            self._watches[id(watch)] = watch
            self.look_at(watch)

    def look_at(self, watch: Watch) -> None:
        """Make the thread look at a watch soon. Any thread may call this; it does not block."""
        with SigintSafeLock(), self.lock:
            if self._wake >= 0:  # else the thread has ended, and so has the watch, whose values must not be kept
                self._to_look.append(watch)
                with contextlib.suppress(BlockingIOError):  # the pipe is full, which also wakes the thread
                    os.write(self._waker, b"1")

    def wait_for_look(self, watch: Watch, deadline: Deadline) -> bool:
        """Wait until the thread has looked at a watch if it was told to; False if the time is over before.

        In the thread itself, look at the watch.
        """
        if threading.get_ident() == self._ident:
            watch.look()
            return True
        looked = threading.Event()
        self.add(Once(watch.workers, looked.set))
        return looked.wait(deadline.left())

    def check_may_wait(self) -> None:
        """Raise UsageError in the thread itself, which would wait for a callback that it alone calls."""
        if threading.get_ident() == self._ident:
            raise UsageError(
                "a callback cannot wait for a call by wait, as_completed or await, which need other callbacks of its "
                "thread; call result() of each future, or wait in a thread of your own"
            )

    def _run(self) -> None:
        is_idle, self._ident = False, threading.get_ident()
        while True:
            self._look()
            with self.lock:
                watches = list(self._watches.values())
                if is_idle and not watches:
                    self._close()
                    return
            is_idle = not self._wait(watches)

    def _look(self) -> None:
        while self._to_look:
            watch = self._to_look.popleft()
            with self.lock:
                is_watched = self._watches.pop(id(watch), None) is not None
            if is_watched:
                try:
                    is_over = watch.look()
                except BaseException:  # the user's code may raise anything, and this thread has the watches of all
                    _log.exception(
                        "cannot read the replies of a call or check a group in the background; no callback will run"
                    )
                    is_over = True
                if not is_over:  # else another thread may have added it again meanwhile
                    with self.lock:
                        self._watches[id(watch)] = watch

    def _wait(self, watches: list[Watch]) -> bool:
        """Wait until there is something to look at. Returns False if nothing has come."""
        by_fd: dict[int, Workers] = {}
        now, due = time.monotonic(), [watch.due for watch in watches if watch.due is not None]
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        silent = []
        for watch in watches:
            fd = watch.workers.arrivals
            if fd is None:
                silent.append(watch)
            elif fd not in by_fd:
                by_fd[fd] = watch.workers
                poll.register(fd, select.POLLIN)
        most_s = LOOK_S if silent else LOOK_AROUND_S if watches else IDLE_S
        waits_s = [*(max(PATIENCE_S, moment - now) for moment in due), most_s]
        ready = poll.poll(min(waits_s) * 1000)
        for fd, _ in ready:
            if fd == self._wake:
                os.read(fd, select.PIPE_BUF)
            else:
                workers = by_fd[fd]
                workers.check(is_thorough=False)  # tickets that become done notify their watches
                if workers.deaths:
                    self._to_look.extend(watch for watch in watches if watch.workers is workers)
        now = time.monotonic()
        if ready and now - self._looked_around < LOOK_AROUND_S:
            self._to_look.extend(silent)
        else:
            self._to_look.extend(watches)
            self._looked_around = now
        self._to_look.extend(watch for watch in watches if watch.due is not None and watch.due <= now)
        return bool(ready)

    def _close(self) -> None:
        ends = self._wake, self._waker
        self._wake = self._waker = -1
        self._ident = None
        self._to_look.clear()
        for fd in ends:
            os.close(fd)


progress = Progress()


def _begin_anew() -> None:
    """Reset the state in a forked process, which has no such thread, and whose watches belong to the parent."""
    if progress._wake >= 0:
        progress._close()
    progress.__init__()  # type: ignore[misc]  # resets all of its state


os.register_at_fork(after_in_child=_begin_anew)
