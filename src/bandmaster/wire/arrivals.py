"""Waiting for what arrives on many sockets, in any number of threads: one of them is blocked in the kernel for all.

::

    wait ── nobody is blocked yet ──► epoll ──► what has arrived, whomever it is for
      └──── another thread is ──────► until that one is back: it may have read what this one waits for
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Sequence

from bandmaster.wire.steady import SteadyLock

__all__ = ["HAS_ROOM", "Arrivals", "Event"]

ARRIVED, HAS_ROOM = int(select.EPOLLIN), int(select.EPOLLOUT)
CLOSE_TIMEOUT_S = 5.0

Event = tuple[int, int]  # a descriptor, and what can be done with it


class Arrivals:
    """What has arrived at some descriptors.

    Attributes:
        lock: Held by whoever calls anything of this but `wake`. It is let go of while somebody waits, and Ctrl-C wakes
            who is blocked in the kernel.
        n_told: How often `tell` was called.
    """

    def __init__(self) -> None:
        self._wake = -1
        self.lock = SteadyLock(self.wake)
        with self.lock:  # a file closes itself when Ctrl-C leaves nobody who would
            self._wake_file = open(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC), "r+b", buffering=0)  # noqa: SIM115
        self._wake = self._wake_file.fileno()
        self._poll = select.epoll()
        self._poll.register(self._wake, ARRIVED)
        self._is_back = threading.Condition(self.lock.lock)  # that who was blocked in the kernel is not any more
        self._blocked: int | None = None  # the thread that is
        self._n_waiting = 0  # how many wait for that one
        self.n_told = 0

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._poll.closed

    def watch(self, fd: int) -> None:
        """Look at one more descriptor."""
        self._poll.register(fd, ARRIVED)

    def ignore(self, fd: int) -> None:
        """Look at it no longer."""
        self._poll.unregister(fd)

    def ask_for_room(self, fd: int, is_asked: bool) -> None:
        """Whether to tell when it can be written to as well."""
        self._poll.modify(fd, ARRIVED | HAS_ROOM if is_asked else ARRIVED)

    def wait(self, timeout_s: float | None, n_told: int) -> Sequence[Event]:
        """Until something has arrived, something was read by others, or the time is over.

        Args:
            timeout_s: How long; None for as long as it takes.
            n_told: What it was when the caller looked around and found that it had to wait.
        """
        me = threading.get_ident()
        if self._blocked not in (None, me):  # if it is this thread, a signal handler of the user's makes a call
            self._await_the_blocked(timeout_s, n_told)
            return ()
        before = self._blocked
        ready: Sequence[Event] = ()
        taken = None
        try:
            self._blocked = me  # from here on, a signal handler that reads something wakes this
            if self.n_told == n_told:
                taken = self.lock.let_go()
                ready = self._poll.poll(timeout_s)
        finally:
            self.lock.own(taken)
            self._blocked = before
            if self._n_waiting:
                self._is_back.notify_all()  # one of those who waited for this thread goes on in its place
        if self._poll.closed:
            return ()
        for event in ready:
            if event[0] == self._wake:
                self._acknowledge()
                return [event for event in ready if event[0] != self._wake]
        return ready

    def now(self) -> Sequence[Event]:
        """What has arrived already."""
        return [] if self._poll.closed else [event for event in self._poll.poll(0) if event[0] != self._wake]

    def tell(self) -> None:
        """Something was read or has changed: another thread that is blocked in the kernel is to look around."""
        self.n_told += 1
        if self._blocked is not None and self._blocked != threading.get_ident():
            self.wake()

    def leave(self) -> None:
        """Nobody waits here any more: if this was a signal handler's wait, the one that it interrupted looks around."""
        if self._blocked is not None and (self._n_waiting or self._blocked == threading.get_ident()):
            self.wake()

    def wake(self) -> None:
        """Have who is blocked in the kernel come back. From anywhere."""
        with contextlib.suppress(OSError):  # it was closed
            os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Have everybody come back, and close what is ours of the descriptors."""
        self.wake()  # closing alone would not wake who is blocked in the kernel
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        while self._blocked not in (None, threading.get_ident()) and (left := deadline - time.monotonic()) > 0:
            self._await_the_blocked(left, self.n_told)
        self._is_back.notify_all()
        self._wake = -1
        self._wake_file.close()
        self._poll.close()

    def _await_the_blocked(self, timeout_s: float | None, n_told: int) -> None:
        """Until it is back from the kernel, and perhaps longer."""
        self._n_waiting += 1  # from here on, a signal handler that reads something has it come back
        try:
            if self.n_told == n_told:
                self._is_back.wait(timeout_s)
        finally:
            self._n_waiting -= 1

    def _acknowledge(self) -> None:
        with contextlib.suppress(OSError):  # nothing was written, or it was closed
            os.eventfd_read(self._wake)
