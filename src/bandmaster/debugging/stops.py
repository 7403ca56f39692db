"""What the debuggers of a worker have in common: they stop in a frame, say where, and hold back interrupts."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Protocol

__all__ = ["Hold", "Stops", "say_where"]

Hold = Callable[[], AbstractContextManager[None]]  # defers interrupts


class Stops(Protocol):
    """A debugger."""

    def set_trace(self, frame: FrameType) -> None:
        """Stop at the next line of a frame."""


def say_where(frame: FrameType, what_to_do: str) -> None:
    """Say in the worker's output where it waits, and how to go on."""
    code = frame.f_code
    where = f"{code.co_name} waits in a debugger at {code.co_filename}:{frame.f_lineno}"
    print(f"{where}; on host {os.uname().nodename}, {what_to_do}", file=sys.stderr, flush=True)
