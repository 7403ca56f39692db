"""The worker's side of its control page. Signals to the main thread interrupt calls and write stacks."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import mmap
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from types import FrameType

from bandmaster.platform.limits import start_thread
from bandmaster.wire.control_page import (
    ANNOUNCED,
    INTERRUPT_SIGNAL,
    N_SLOTS,
    RESUMED,
    STACKS_SIGNAL,
    WorkerIdentity,
)
from bandmaster.wire.stacks import TASKS

__all__ = ["ControlPage", "Interrupted"]

AGAIN_S = 0.02  # after an interrupt that was put off
IMPORTS = "<frozen importlib._bootstrap>"  # the file of the frames of an import


class Interrupted(KeyboardInterrupt):
    """Raised in the running method of a worker when the controller interrupts its call."""


class ControlPage:
    """The control page of this worker. Calls can be interrupted if the main thread makes it, which then runs them.

    Args:
        identity: The worker's identity, which the name of the page's descriptor shows to other processes.

    Attributes:
        running: Number of the call that may be interrupted; 0 between calls and while interrupts are deferred.
        told_of_tasks: Returns what is to be said of tasks behind stacks; see `bandmaster.worker_process.tasks`.
    """

    told_of_tasks: Callable[[], str]

    def __init__(self, identity: WorkerIdentity) -> None:
        self.running = 0
        self._put_off: SimpleQueue[None] | None = None  # an item for each interrupt that has to come again
        self._fd = os.memfd_create(str(identity), os.MFD_CLOEXEC)
        os.ftruncate(self._fd, mmap.PAGESIZE)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, os.O_APPEND)  # stacks are appended after the page
        self._slots = memoryview(mmap.mmap(self._fd, mmap.PAGESIZE)).cast("Q")
        faulthandler.register(STACKS_SIGNAL, file=self._fd, all_threads=True, chain=False)
        if threading.current_thread() is threading.main_thread():  # where Python handles signals
            signal.signal(INTERRUPT_SIGNAL, self._signalled)
        else:
            ctypes.CDLL(None).signal(INTERRUPT_SIGNAL, ctypes.c_void_p(signal.SIG_IGN))

    def begin(self, number: int) -> None:
        """Allow a call to be interrupted from now on.

        Args:
            number: Number of the call.

        Raises:
            Interrupted: The controller interrupted the call, perhaps before it began. A signal handler may raise this
                at any moment until `end`.
        """
        self.running = number
        if self._slots[number % N_SLOTS] == number:
            self._interrupt()

    @contextlib.contextmanager
    def announce(self, number: int) -> Iterator[None]:
        """Show other processes, until the block is left, that this call is running.

        Replies over a lane show it by their order; replies of actor tasks do not.
        """
        self._slots[ANNOUNCED] = number
        try:
            yield
        finally:
            self._slots[ANNOUNCED] = 0

    def end(self) -> None:
        """Stop allowing the call to be interrupted."""
        self.running = 0

    def is_resumed(self, number: int) -> bool:
        """Whether all ranks have ended a call that has failed here."""
        return self._slots[RESUMED] == number

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Defer interrupts until the block is left.

        Raises:
            Interrupted: The call was interrupted before or within the block.
        """
        number, self.running = self.running, 0
        try:
            yield
        finally:
            if number and not self.running:  # else another thread has held back a call that has ended since
                self.begin(number)

    def _signalled(self, _: int, frame: FrameType | None) -> None:
        if os.fstat(self._fd).st_size > mmap.PAGESIZE:  # somebody reads stacks
            with contextlib.suppress(Exception):  # stacks can do without
                os.write(self._fd, f"{TASKS}{self.told_of_tasks()}\n".encode())
        self._interrupt(frame)

    def _interrupt(self, frame: FrameType | None = None) -> None:
        number = self.running
        if number and self._slots[number % N_SLOTS] == number:
            while frame is not None:
                # Python lets no exception out of a finalizer, and a module that is imported in part cannot be used
                # later: try again until it is over.
                if frame.f_code.co_name == "__del__" or frame.f_code.co_filename == IMPORTS:
                    self._signal_again()
                    return
                frame = frame.f_back
            self.running = 0  # so that the call is interrupted only once
            raise Interrupted("the controller cancelled the call")

    def _signal_again(self) -> None:
        """Signal this thread again in a moment, by one thread for good: stacks are written while no thread is new."""
        if self._put_off is None:
            self._put_off = SimpleQueue()
            start_thread("bandmaster-interrupts", _signal_later, self._put_off, threading.get_ident())
        self._put_off.put(None)


def _signal_later(put_off: SimpleQueue[None], thread: int) -> None:
    while True:
        put_off.get()
        time.sleep(AGAIN_S)
        signal.pthread_kill(thread, INTERRUPT_SIGNAL)
