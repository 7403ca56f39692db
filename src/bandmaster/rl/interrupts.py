"""Defers signals during a step in which other ranks take part."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType


def uninterrupted(function: Callable[[], None]) -> None:
    """Call a function, and run the handlers of signals that arrive meanwhile, such as SIGINT, after it has returned.

    Python runs signal handlers only in the main thread; in other threads, this just calls the function.
    """
    if threading.current_thread() is not threading.main_thread():
        return function()
    found = {int(number): signal.getsignal(number) for number in signal.valid_signals()}
    handlers = {number: handler for number, handler in found.items() if callable(handler)}
    arrived: set[int] = set()
    is_over = False

    def handle(number: int, frame: FrameType | None) -> None:
        if is_over:
            handlers[number](number, frame)
        else:
            arrived.add(number)

    try:
        for number in handlers:
            signal.signal(number, handle)
        function()
    finally:
        is_over = True  # from here on a handler may raise; `handle` then stays, and passes signals on
        try:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        finally:
            for number in arrived:
                signal.raise_signal(number)
