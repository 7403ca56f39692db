"""Lets any number of threads wait for data on many sockets, while one of them blocks in the kernel for all.

::

    receive ── no other thread is blocked ──► epoll ──► the function of each ready socket, perhaps for other threads too
      └─────── another thread is blocked ───► a condition, until that thread returns: it may have read this one's data
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence

from bandmaster.errors import ResourceError
from bandmaster.platform.forks import in_forks
from bandmaster.platform.locks import SigintSafeLock

ARRIVED, HAS_ROOM = int(select.EPOLLIN), int(select.EPOLLOUT)
CLOSE_TIMEOUT_S = 5.0

_Events = Sequence[tuple[int, int]]  # a descriptor, and what can be done with it


class Poller:
    """Waits for events on a set of descriptors, and calls the function of each descriptor that has one.

    Attributes:
        lock: Held by the caller of every method but `wake`, and while functions are called. `receive` releases it while
            the thread is blocked, and Ctrl-C wakes that thread.

    Raises:
        ResourceError: There is no descriptor for it.
    """

    def __init__(self) -> None:
        self._wake = -1
        self.lock = SigintSafeLock(self.wake)
        try:
            self._poll = select.epoll()
            with self.lock:  # a file closes itself when Ctrl-C leaves nobody who would
                self._wake_file = open(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC), "r+b", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise ResourceError(
                f"process {os.getpid()} on host {socket.gethostname()} has no descriptor to wait for replies with "
                f"({error}); raise the limit on open files (ulimit -n)"
            ) from error
        self._wake = self._wake_file.fileno()
        self._poll.register(self._wake, ARRIVED)
        self._takers: dict[int, Callable[[int], object]] = {}  # by descriptor
        self._is_back = threading.Condition(self.lock.lock)  # notified when the blocked thread has returned
        self._blocked: int | None = None  # the thread that is blocked in the kernel
        self._n_waiting = 0  # threads that wait for that one
        in_forks(self, Poller._end_in_fork)

    def fileno(self) -> int:
        """A descriptor that is readable when something has arrived."""
        return self._poll.fileno()

    def watch(self, fd: int, take: Callable[[int], object]) -> None:
        """Add a descriptor to the set.

        Args:
            fd: The descriptor.
            take: Called with the events of the descriptor, 0 where it is to look without one.
        """
        self._takers[fd] = take
        self._poll.register(fd, ARRIVED)

    def ignore(self, fd: int) -> None:
        """Remove a descriptor from the set."""
        if self._takers.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def ask_for_room(self, fd: int, is_asked: bool) -> None:
        """Report also, or no longer, when a descriptor can be written to."""
        self._poll.modify(fd, ARRIVED | HAS_ROOM if is_asked else ARRIVED)

    def receive(self, timeout_s: float | None) -> None:
        """Block until something was received, another thread has received something, or the time is over.

        Args:
            timeout_s: How long; None for as long as it takes.
        """
        if self._blocked is not None:
            self._await_the_blocked(timeout_s)
            return
        ready: _Events = ()
        taken = None
        try:
            self._blocked = threading.get_ident()
            taken = self.lock.release()
            ready = self._poll.poll(timeout_s)
        except ValueError:  # `close` has waited long enough for this thread, which had no processor
            if not self._poll.closed:
                raise
        finally:
            self.lock.own(taken)
            self._blocked = None
            if self._n_waiting:
                self._is_back.notify_all()  # one of the threads that waited for this one goes on in its place
        self._dispatch(ready)

    def receive_all(self) -> bool:
        """Receive everything that has arrived, without blocking; whether that was anything."""
        has_received = False
        while not self._poll.closed and (ready := self._poll.poll(0)):
            if self._blocked is not None:  # that thread acknowledges being woken
                ready = [event for event in ready if event[0] != self._wake]
            if not self._dispatch(ready):
                break
            has_received = True
        return has_received

    def _dispatch(self, ready: _Events) -> int:
        """Call the functions of the ready descriptors; returns the number of descriptors that were ready."""
        n_ready = 0
        try:
            for fd, events in ready:
                if fd == self._wake:
                    with contextlib.suppress(OSError):  # nothing was written, or it was closed
                        os.eventfd_read(fd)
                elif fd in self._takers:  # it may have been removed since
                    n_ready += 1
                    self._takers[fd](events)
        finally:
            if n_ready and self._blocked is not None:
                self.wake()
        return n_ready

    def wake_if_blocked(self) -> None:
        """Have the thread that is blocked in the kernel return, if there is one: something was read, or has changed."""
        if self._blocked is not None:
            self.wake()

    def wake(self) -> None:
        """Have the thread that is blocked in the kernel return. Any thread may call this, with or without the lock."""
        with contextlib.suppress(OSError, ValueError):  # it was closed, or Ctrl-C comes before there is one
            os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Have all waiting threads return, and close the descriptors of this object."""
        self.wake()  # closing alone would not wake the thread that is blocked in the kernel
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        while self._blocked is not None and (left := deadline - time.monotonic()) > 0:
            self._await_the_blocked(left)
        self._is_back.notify_all()
        self._takers.clear()
        self._close()

    def _end_in_fork(self) -> None:
        self.lock.refuse()  # a fork would take what arrives away from its parent
        self._close()

    def _close(self) -> None:
        self._wake = -1
        self._poll.close()
        self._wake_file.close()

    def _await_the_blocked(self, timeout_s: float | None) -> None:
        """Wait until the blocked thread has returned from the kernel, and perhaps longer."""
        self._n_waiting += 1
        try:
            self._is_back.wait(timeout_s)
        finally:
            self._n_waiting -= 1
