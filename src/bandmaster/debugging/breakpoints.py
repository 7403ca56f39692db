"""Makes ``breakpoint()`` in a worker wait for a terminal or an IDE. Debuggers are loaded when they are first needed."""

from __future__ import annotations

import os
import sys
from typing import Any

from bandmaster.debugging.stops import Hold, Stops
from bandmaster.wire.control_page import WorkerIdentity

__all__ = ["install_breakpoints"]

OF_RAY = "ray.util.rpdb."  # Ray sets PYTHONBREAKPOINT to this in its processes; the user has not chosen it
OF_IDES = "debugpy.breakpoint"


def install_breakpoints(identity: WorkerIdentity, hold: Hold) -> None:
    """Have ``breakpoint()`` wait for ``bandmaster debug``, or for what PYTHONBREAKPOINT names.

    Args:
        identity: The worker's identity.
        hold: Returns a context manager that defers interrupts.
    """
    debuggers: dict[str, Stops] = {}

    def hook(*args: Any, **kwargs: Any) -> Any:
        chosen = os.environ.get("PYTHONBREAKPOINT") or OF_RAY
        if chosen != OF_IDES and not chosen.startswith(OF_RAY):
            return sys.__breakpointhook__(*args, **kwargs)
        if chosen not in debuggers:
            debuggers[chosen] = _made(chosen, identity, hold)
        debuggers[chosen].set_trace(sys._getframe(1))
        return None

    sys.breakpointhook = hook


def _made(chosen: str, identity: WorkerIdentity, hold: Hold) -> Stops:
    if chosen == OF_IDES:
        from bandmaster.debugging.ide import Ide

        return Ide(hold)
    from bandmaster.debugging.debugger import Debugger

    return Debugger(identity, hold)
