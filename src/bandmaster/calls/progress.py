"""One thread that looks after calls and workers that no other thread waits for.

::

    add_done_callback, await, on_death ──► Progress.add(watch) ──► the thread: blocks until
                                                                     a reply arrives at a group that is watched,
                                                                     a ticket was done by another thread, or
                                                                     a watch is due
                                           watch.look() ◄────────── and looks; it ends with the last watch
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
from functools import partial
from typing import Protocol

from bandmaster.contract import Ticket, Workers
from bandmaster.errors import ResourceError
from bandmaster.platform.limits import start_thread

__all__ = ["CallWatch", "Progress", "Watch", "progress"]

PATIENCE_S = 0.02
LOOK_S = 0.1  # how often workers are asked that tell of nothing by themselves
_log = logging.getLogger(__name__)


class Watch(Protocol):
    """What the thread looks after.

    Attributes:
        workers: Where replies and deaths come from.
        due: The moment at which to look at the latest, by `time.monotonic`; None for no moment.
    """

    workers: Workers
    due: float | None

    def look(self) -> bool:
        """Do what can be done without waiting; whether the watch is over."""


class Progress:
    """The watches of this process, and the thread, which runs as long as there is any."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # re-entrant, as a signal handler may come here in the middle of it
        self._watches: dict[int, Watch] = {}  # by their ids
        self._to_look: deque[Watch] = deque()
        self._wake = -1

    def add(self, watch: Watch) -> None:
        """Look after something from here on.

        Raises:
            ResourceError: The system allows no more threads or descriptors.
        """
        with self._lock:
            if self._wake < 0:
                try:
                    self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
                except OSError as error:
                    raise ResourceError(f"there is no descriptor to wait in the background with ({error})") from error
                try:
                    start_thread("bandmaster-progress", self._run)
                except BaseException:
                    self._close()
                    raise
            self._watches[id(watch)] = watch
        self.look_at(watch)

    def look_at(self, watch: Watch) -> None:
        """Look at a watch soon: something has happened. From any thread; it does not block."""
        self._to_look.append(watch)
        with self._lock:
            if self._wake >= 0:  # else the thread has ended, and the watch with it
                os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        while True:
            self._look()
            with self._lock:
                if not self._watches:
                    self._close()
                    return
                watches = list(self._watches.values())
            self._wait(watches)

    def _look(self) -> None:
        while self._to_look:
            watch = self._to_look.popleft()
            if id(watch) in self._watches:
                try:
                    is_over = watch.look()
                except Exception:
                    _log.exception(
                        "cannot read the replies of a call or check a group in the background; no callback will run"
                    )
                    is_over = True
                if is_over:
                    with self._lock:
                        del self._watches[id(watch)]

    def _wait(self, watches: list[Watch]) -> None:
        """Wait until there is something to look at."""
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
        waits_s = [*(moment - now for moment in due), *([LOOK_S] if silent else [])]
        for fd, _ in poll.poll(max(0.0, min(waits_s)) * 1000 if waits_s else None):
            if fd == self._wake:
                with contextlib.suppress(OSError):
                    os.eventfd_read(fd)
            else:
                workers = by_fd[fd]
                workers.check(is_thorough=False)  # tickets that are done by this tell their watches
                if workers.deaths:
                    self._to_look.extend(watch for watch in watches if watch.workers is workers)
        now = time.monotonic()
        self._to_look.extend(silent)
        self._to_look.extend(watch for watch in watches if watch.due is not None and watch.due <= now)

    def _close(self) -> None:
        fd, self._wake = self._wake, -1
        os.close(fd)


progress = Progress()


class Watched(Protocol):
    """A call that can be watched; see `bandmaster.calls.pending.PendingCall`."""

    workers: Workers
    tickets: dict[int, object]
    due: float | None
    on_done: Callable[[], object] | None

    def wait(self, timeout_s: float | None) -> bool:
        """Read replies; whether all are there."""


class CallWatch:
    """Has a call be done, and then something be called, though no thread waits for it."""

    def __init__(self, call: Watched, when_done: Callable[[], object]) -> None:
        self.workers: Workers = call.workers
        self.due: float | None = None
        self._call = call
        self._when_done = when_done
        look = partial(progress.look_at, self)
        call.on_done = look
        for ticket in list(call.tickets.values()):
            if isinstance(ticket, Ticket):
                ticket.on_done = look

    def look(self) -> bool:
        """Read what has arrived for the call."""
        if self._call.wait(0):
            self._call.on_done = None  # which refers to this, so that rows would stay until garbage is collected
            self._when_done()
            return True
        due = self._call.due
        self.due = None if due is None else max(due, time.monotonic() + PATIENCE_S)  # another thread may be at it
        return False


def _begin_anew() -> None:
    """The thread is not there in a process that was forked, and its watches are the parent's."""
    if progress._wake >= 0:
        progress._close()
    progress.__init__()  # type: ignore[misc]  # it has no state but that


os.register_at_fork(after_in_child=_begin_anew)
