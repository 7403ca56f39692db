"""Ctrl-C at chosen steps of the library, and pauses for other threads."""

import contextlib
import gc
import signal
import sys
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from threading import Condition

import pytest


def pressed(call, n, again=0, number=signal.SIGINT):
    """Call a function, and press Ctrl-C at the n-th entry or exit of one of the library's; whether there was one.

    The end of a block under a condition is such an exit, too. Press it once more as many steps later as ``again`` says.
    It does not come as garbage is collected, where Python ignores it. Another signal may come in its place.
    """

    def press(frame, kind, what):
        nonlocal n, again
        is_end = kind == "return" and frame.f_code is Condition.__exit__.__code__
        is_ours = frame.f_globals.get("__name__", "").startswith("bandmaster")
        is_plain = not frame.f_code.co_flags & (CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR)  # others lose it here
        n -= is_end or (is_ours and is_plain and kind in ("call", "return"))
        if n == 0:
            n, again = again, 0
            if n == 0:
                sys.setprofile(None)
            signal.raise_signal(number)

    gc.disable()
    try:
        sys.setprofile(press)
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
        gc.enable()
    return n <= 0


def pressed_when(is_now):
    """Ctrl-C is pressed in the block at the first event of the profiler, with frame, kind and what, that is meant."""
    return done_when(is_now, lambda: signal.raise_signal(signal.SIGINT))


@contextlib.contextmanager
def done_when(is_now, act):
    """`act` is called in the block at the first event of the profiler, with frame, kind and what, that is meant."""

    def look(frame, kind, what):
        if is_now(frame, kind, what):
            sys.setprofile(None)
            act()

    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(None)


@contextlib.contextmanager
def interrupted_when(is_now):
    """Ctrl-C is pressed so, and ends the block."""
    with pytest.raises(KeyboardInterrupt), pressed_when(is_now):
        yield


def called_with_a_pause(function, n, pause, file="feed.py"):
    """Call a function, with a pause for other threads before the n-th line of a file of the library's."""

    def trace(frame, event, arg):
        nonlocal n
        n -= event == "line"
        if n == 0 and event == "line":
            pause()
        return trace if frame.f_code.co_filename.endswith(file) else None

    sys.settrace(trace)
    try:
        return function()
    finally:
        sys.settrace(None)
