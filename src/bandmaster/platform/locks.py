"""A lock that defers SIGINT while it is held, so that Ctrl-C loses nothing that is read under it for other threads."""

from __future__ import annotations

import os
import signal
import sys
import threading

# C's own functions: those around them make enums of numbers, and take ten times as long.
from _signal import getsignal as _handler  # type: ignore[import-not-found]
from _signal import signal as _set_handler
from collections.abc import Callable
from threading import get_ident
from types import FrameType
from typing import Any

from bandmaster.errors import UsageError

__all__ = ["SigintSafeLock", "check_not_held"]

_SIGINT = int(signal.SIGINT)


IN_A_HANDLER = (
    "a signal handler called the group in the middle of one of the group's own operations; set a flag in the handler "
    "and call between steps"
)


def check_not_held(lock: Any, words: str = IN_A_HANDLER) -> None:
    """Refuse to take a `threading.RLock` that this thread holds already.

    Raises:
        UsageError: It does; ``words`` say why that is wrong.
    """
    if lock._is_owned():
        raise UsageError(words)


class SigintSafeLock:
    """A lock that defers SIGINT while the main thread holds it or waits for it: Ctrl-C comes when it is released.

    Only the main thread runs signal handlers; for other threads this is a plain lock. Entering and leaving take about
    a microsecond.

    Attributes:
        lock: The lock itself, for a `threading.Condition`.

    Args:
        on_interrupt: Called when Ctrl-C has come, at any moment, to wake the main thread where it waits; None if it
            never waits long.

    Raises:
        UsageError: The main thread enters it a second time, which a signal handler does.
    """

    def __init__(self, on_interrupt: Callable[[], object] | None = None) -> None:
        self.lock = threading.RLock()
        self._on_interrupt = on_interrupt
        self._main = threading.main_thread().ident
        self._before: Any = None  # what handled SIGINT
        self._is_entered = False  # by the main thread
        self._is_interrupted = False

    @property
    def has_to_let_go(self) -> bool:
        """Whether Ctrl-C has come and waits for this thread to leave the lock."""
        return self._is_interrupted and get_ident() == self._main

    def let_go(self) -> Any:
        """Release the lock without leaving it; returns what `own` needs to take it again."""
        return self.lock._release_save()  # type: ignore[attr-defined]

    def own(self, taken: Any) -> None:
        """Take the lock again, if this thread does not hold it: an exception may have come before or in `let_go`."""
        if not self.lock._is_owned():  # type: ignore[attr-defined]
            self.lock._acquire_restore(taken or (1, get_ident()))  # type: ignore[attr-defined]

    def __enter__(self) -> None:
        if get_ident() == self._main:
            if self._is_entered:
                raise UsageError(IN_A_HANDLER)
            self._is_entered = True  # before anything else: a handler that comes from here on is refused
            try:
                if _handler(_SIGINT) is not None:  # else it was set by other means than Python's
                    self._before = _set_handler(_SIGINT, self._note)
                self.lock.acquire()
            except BaseException:  # raised by the handler of another signal
                self._leave()
                raise
        else:
            self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        try:
            self.lock.release()
        finally:
            if get_ident() == self._main:
                self._leave()

    def _leave(self) -> None:
        before = self._before
        try:
            if before is not None:
                _set_handler(_SIGINT, before)
        finally:
            is_interrupted, self._is_interrupted = self._is_interrupted, False
            self._before = None
            self._is_entered = False
        if is_interrupted:
            if callable(before):
                before(_SIGINT, sys._getframe())
            else:
                signal.raise_signal(signal.SIGINT)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._is_interrupted = True
        if self._on_interrupt is not None:
            self._on_interrupt()


def _let_go_in_child() -> None:
    """Restore the SIGINT handler in a process that was forked while the main thread held such locks."""
    while isinstance(holder := getattr(_handler(_SIGINT), "__self__", None), SigintSafeLock):
        _set_handler(_SIGINT, holder._before)
        holder._before, holder._is_entered = None, False


os.register_at_fork(after_in_child=_let_go_in_child)
