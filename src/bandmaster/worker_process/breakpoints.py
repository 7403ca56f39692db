"""Makes ``breakpoint()`` in a worker wait for a terminal or an IDE. Debuggers are loaded when they are first needed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, Protocol

from bandmaster.transport.control_page import WorkerIdentity

__all__ = ["Hold", "install_breakpoints", "say_where"]

OF_RAY = "ray.util.rpdb."  # Ray sets PYTHONBREAKPOINT to this in its processes; the user has not chosen it
OF_IDES = "debugpy.breakpoint"

Hold = Callable[[], AbstractContextManager[None]]  # defers interrupts


class _Stops(Protocol):
    def set_trace(self, frame: FrameType) -> None:
        """Stop at the next line of a frame."""


def install_breakpoints(identity: WorkerIdentity, hold: Hold) -> None:
    """Have ``breakpoint()`` wait for ``bandmaster debug``, or for what PYTHONBREAKPOINT names.

    Args:
        identity: The worker's identity.
        hold: Returns a context manager that defers interrupts.
    """
    debuggers: dict[str, _Stops] = {}

    def hook(*args: Any, **kwargs: Any) -> Any:
        chosen = os.environ.get("PYTHONBREAKPOINT") or OF_RAY
        if chosen != OF_IDES and not chosen.startswith(OF_RAY):
            return sys.__breakpointhook__(*args, **kwargs)
        if chosen not in debuggers:
            debuggers[chosen] = _made(chosen, identity, hold)
        debuggers[chosen].set_trace(sys._getframe(1))
        return None

    sys.breakpointhook = hook


def _made(chosen: str, identity: WorkerIdentity, hold: Hold) -> _Stops:
    if chosen == OF_IDES:
        from bandmaster.worker_process.ide import Ide

        return Ide(hold)
    from bandmaster.worker_process.debugger import Debugger

    return Debugger(identity, hold)


def say_where(frame: FrameType, what_to_do: str) -> None:
    """Say in the worker's output where it waits, and how to go on."""
    code = frame.f_code
    where = f"{code.co_name} waits in a debugger at {code.co_filename}:{frame.f_lineno}"
    print(f"{where}; on host {os.uname().nodename}, {what_to_do}", file=sys.stderr, flush=True)
