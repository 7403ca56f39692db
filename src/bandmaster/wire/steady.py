"""A lock whose holder is not broken by Ctrl-C: what is read under it for other threads and calls must not be lost."""

from __future__ import annotations

import signal
import threading

# C's own functions: those around them make enums of numbers, and take ten times as long.
from _signal import getsignal as _handler  # type: ignore[import-not-found]
from _signal import signal as _set_handler
from collections.abc import Callable
from types import FrameType

__all__ = ["SteadyLock"]

_SIGINT = int(signal.SIGINT)


class SteadyLock:
    """A re-entrant lock. Ctrl-C waits while the main thread holds it or waits for it, and comes when it lets go.

    Only the main thread is ever interrupted; for others it is a lock. It takes about a microsecond.

    Attributes:
        lock: The lock itself, for a `threading.Condition`.
        is_interrupted: Whether Ctrl-C has come: the main thread is to let go soon.

    Args:
        on_interrupt: Called when it has come, at any moment, to wake whom the main thread waits for.
    """

    def __init__(self, on_interrupt: Callable[[], object]) -> None:
        self.lock = threading.RLock()
        self.is_interrupted = False
        self._on_interrupt = on_interrupt
        self._main = threading.main_thread().ident
        self._before: object = None  # what handled it
        self._depth = 0

    def __enter__(self) -> None:
        if threading.get_ident() == self._main:
            if not self._depth and _handler(_SIGINT) is not None:  # else it was set by other means than Python's
                self._before = _set_handler(_SIGINT, self._note)
            self._depth += 1
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()
        if threading.get_ident() == self._main:
            self._depth -= 1
            if not self._depth and self._before is not None:
                before, self._before = self._before, None
                _set_handler(_SIGINT, before)
                if self.is_interrupted:
                    self.is_interrupted = False
                    signal.raise_signal(signal.SIGINT)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.is_interrupted = True
        self._on_interrupt()
