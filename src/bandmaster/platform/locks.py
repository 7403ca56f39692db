"""A lock that defers SIGINT while it is held, so that Ctrl-C cannot lose data that one thread reads for the others."""

from __future__ import annotations

import os
import signal
import sys
import threading

# The C functions: their wrappers in `signal` convert numbers to enums, which takes ten times as long.
from _signal import getsignal as _handler  # type: ignore[import-not-found]
from _signal import signal as _set_handler
from collections.abc import Callable
from functools import partial
from threading import get_ident
from types import FrameType
from typing import Any

from bandmaster.errors import UsageError
from bandmaster.platform.forks import of_parent

_SIGINT = int(signal.SIGINT)


IN_A_HANDLER = (
    "a signal handler called the group while the interrupted thread was inside one of the group's operations; set a "
    "flag in the handler and call between steps"
)


def check_not_held(lock: Any, words: str = IN_A_HANDLER) -> None:
    """Check that the calling thread does not hold a `threading.RLock` that it is about to take.

    Args:
        lock: The lock.
        words: Message of the error.

    Raises:
        UsageError: The calling thread holds the lock.
    """
    if lock._is_owned():
        raise UsageError(words)


def run_if_free(lock: Any, step: Callable[[], object]) -> bool:
    """Call a function while a `threading.RLock` is held, unless another thread holds it. Returns whether it was called.

    Ctrl-C leaves the lock as it was whenever it comes, also between `acquire` and the first step behind it.
    """
    if lock._is_owned():
        step()
        return True
    try:
        if not lock.acquire(blocking=False):
            return False
        step()
        return True
    finally:
        try:  # noqa: SIM105  # `suppress` is a function, at whose beginning Ctrl-C may come
            lock.release()
        except RuntimeError:  # this thread did not get it
            pass


class SigintSafeLock:
    """A lock that defers SIGINT while the main thread holds it or waits for it, and delivers it on release.

    Only the main thread runs signal handlers, so for other threads this is a plain `threading.RLock`. Entering and
    leaving together take about a microsecond.

    Attributes:
        lock: The underlying `threading.RLock`, for a `threading.Condition`.
        raises: An exception that the signal handler raises besides when SIGINT is deferred; None for none.

    Args:
        on_interrupt: Called by the signal handler when SIGINT is deferred, to wake the main thread if it blocks while
            it holds the lock; None if the main thread never blocks for long.

    Raises:
        UsageError: The main thread enters the lock a second time, which only a signal handler does.
    """

    def __init__(self, on_interrupt: Callable[[], object] | None = None) -> None:
        self.lock: Any = threading.RLock()
        self._on_interrupt = on_interrupt
        self._main = threading.main_thread().ident
        self._before: Any = None  # the SIGINT handler to restore
        self._is_entered = False  # by the main thread
        self._deferred: Callable[[], object] | None = None  # called when the main thread has left the lock
        self.raises: type[BaseException] | None = None

    @property
    def must_be_left(self) -> bool:
        """Whether a signal is deferred and this is the main thread, which must leave the lock to receive it."""
        return self._deferred is not None and get_ident() == self._main

    @staticmethod
    def of_main_thread() -> SigintSafeLock | None:
        """The lock of this class that the main thread has entered last; a signal handler asks."""
        holder = getattr(_handler(_SIGINT), "__self__", None)
        return holder if isinstance(holder, SigintSafeLock) else None

    @property
    def is_inside(self) -> bool:
        """Whether the calling thread enters, holds or leaves the lock, as a finalizer may find it."""
        return self.lock._is_owned() or (self._is_entered and get_ident() == self._main)

    def defer(self, then: Callable[[], object]) -> None:
        """Have the main thread call a function when it has left the lock; a signal handler does."""
        self._deferred = then
        if self._on_interrupt is not None:
            self._on_interrupt()

    def release(self) -> Any:
        """Release the lock without leaving its context. Returns the state that `own` needs to take it again."""
        return self.lock._release_save()

    def own(self, taken: Any) -> None:
        """Take the lock again, unless `release` was interrupted by an exception and this thread still holds it."""
        if not self.lock._is_owned():
            self.lock._acquire_restore(taken or (1, get_ident()))

    def refuse(self) -> None:
        """Have whoever enters the lock from here on get a UsageError, as this process is a fork of its owner."""
        self.lock = _OfParent()

    def __enter__(self) -> None:
        if get_ident() == self._main:
            if self._is_entered:
                raise UsageError(IN_A_HANDLER)
            self._is_entered = True  # first: a signal handler that enters from here on is refused
            try:
                if _handler(_SIGINT) is not None:  # None: the handler was not installed from Python
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
            then, self._deferred = self._deferred, None
            self._before = None
            self._is_entered = False
        if then is not None:
            then()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.defer(partial(_deliver, self._before))
        if self.raises is not None:
            raise self.raises("Ctrl-C")


class _OfParent:
    """Stands for an RLock that guards objects of the process from which this one was forked."""

    def acquire(self, *_: object, **options: object) -> None:
        raise of_parent("the group")

    _acquire_restore = acquire

    def release(self) -> None:
        """Do nothing: the fork was made while this thread held the lock."""

    def _is_owned(self) -> bool:
        return False


def _deliver(handler: Any) -> None:
    """Do what SIGINT does, whose handler was replaced when it came."""
    if callable(handler):
        handler(_SIGINT, sys._getframe())
    else:
        signal.raise_signal(signal.SIGINT)


def _restore_in_child() -> None:
    """Restore the SIGINT handler in a process that was forked while the main thread held such locks."""
    while (holder := SigintSafeLock.of_main_thread()) is not None:
        _set_handler(_SIGINT, holder._before)
        holder._before, holder._is_entered = None, False


os.register_at_fork(after_in_child=_restore_in_child)
