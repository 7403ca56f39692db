"""The worker's side of its control page: calls are interrupted, and stacks written, by signals to the main thread."""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import mmap
import os
import signal
from collections.abc import Iterator

from bandmaster.transport.control_page import ANNOUNCED, INTERRUPT_SIGNAL, N_SLOTS, STACKS_SIGNAL, WorkerIdentity

__all__ = ["ControlPage", "Interrupted"]


class Interrupted(KeyboardInterrupt):
    """Raised in a worker's method whose call the controller has cancelled."""


class ControlPage:
    """The page of this worker. Made in the main thread, where signals are handled.

    Attributes:
        running: Number of the call that is running; 0 between calls.
    """

    def __init__(self, identity: WorkerIdentity) -> None:
        self.running = 0
        self._fd = os.memfd_create(str(identity), os.MFD_CLOEXEC)
        os.ftruncate(self._fd, mmap.PAGESIZE)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, os.O_APPEND)  # stacks go behind the page
        self._slots = memoryview(mmap.mmap(self._fd, mmap.PAGESIZE)).cast("Q")
        faulthandler.register(STACKS_SIGNAL, file=self._fd, all_threads=True, chain=False)
        signal.signal(INTERRUPT_SIGNAL, self._interrupt)

    def begin(self, number: int) -> None:
        """Allow a call to be interrupted from here on.

        Raises:
            Interrupted: The call has been cancelled. It may be raised at any moment until `end`.
        """
        self.running = number
        if self._slots[number % N_SLOTS] == number:
            self._interrupt()

    @contextlib.contextmanager
    def announce(self, number: int) -> Iterator[None]:
        """Write that this call runs, for processes that cannot tell from the order of the replies."""
        self._slots[ANNOUNCED] = number
        try:
            yield
        finally:
            self._slots[ANNOUNCED] = 0

    def end(self) -> None:
        """Do not let the call be interrupted any more."""
        self.running = 0

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Defer interruptions until the block is left.

        Raises:
            Interrupted: The call was cancelled, perhaps within the block.
        """
        number, self.running = self.running, 0
        try:
            yield
        finally:
            self.begin(number)

    def _interrupt(self, *_: object) -> None:
        number = self.running
        if number and self._slots[number % N_SLOTS] == number:
            self.running = 0  # so that it is interrupted once
            raise Interrupted("the controller cancelled the call")
