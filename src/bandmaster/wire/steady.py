"""A lock whose holder is not broken by Ctrl-C: what is read under it for other threads and calls must not be lost."""

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

__all__ = ["SteadyLock"]

_SIGINT = int(signal.SIGINT)


class SteadyLock:
    """A re-entrant lock. Ctrl-C waits while the main thread holds it or waits for it, and comes when it lets go.

    Only the main thread is ever interrupted; for others it is a lock. It takes about a microsecond.

    Attributes:
        lock: The lock itself, for a `threading.Condition`.

    Args:
        on_interrupt: Called when Ctrl-C has come, at any moment, to wake whom the main thread waits for; None if it
            never waits long.
    """

    def __init__(self, on_interrupt: Callable[[], object] | None = None) -> None:
        self.lock = threading.RLock()
        self._on_interrupt = on_interrupt
        self._main = threading.main_thread().ident
        self._before: Any = None  # what handled it
        self._depth = 0
        self._is_interrupted = False

    @property
    def has_to_let_go(self) -> bool:
        """Whether Ctrl-C has come, and would be let through if this thread left the lock now."""
        return self._is_interrupted and self._depth == 1 and get_ident() == self._main

    def let_go(self) -> Any:
        """Let go of it inside, however often this thread has taken it; what `own` needs to have it again."""
        return self.lock._release_save()  # type: ignore[attr-defined]

    def own(self, taken: Any) -> None:
        """Have it again. To be called in any case: where `let_go` was not come to, or was and did not return."""
        if not self.lock._is_owned():  # type: ignore[attr-defined]
            self.lock._acquire_restore(taken or (1, get_ident()))  # type: ignore[attr-defined]

    def __enter__(self) -> None:
        if get_ident() == self._main:
            if not self._depth and _handler(_SIGINT) is not None:  # else it was set by other means than Python's
                self._before = _set_handler(_SIGINT, self._note)
            self._depth += 1
            try:
                self.lock.acquire()
            except BaseException:  # of the handler of another signal
                self._leave()
                raise
        else:
            self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()
        if get_ident() == self._main:
            self._leave()

    def _leave(self) -> None:
        self._depth -= 1
        if not self._depth and self._before is not None:
            before, self._before = self._before, None
            _set_handler(_SIGINT, before)
            if self._is_interrupted:
                self._is_interrupted = False
                if callable(before):
                    before(_SIGINT, sys._getframe())
                else:
                    signal.raise_signal(signal.SIGINT)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._is_interrupted = True
        if self._on_interrupt is not None:
            self._on_interrupt()


def _let_go_in_child() -> None:
    """A process that was forked while the main thread held such locks gets its Ctrl-C back."""
    while isinstance(holder := getattr(_handler(_SIGINT), "__self__", None), SteadyLock):
        _set_handler(_SIGINT, holder._before)
        holder._before, holder._depth = None, 0


os.register_at_fork(after_in_child=_let_go_in_child)
