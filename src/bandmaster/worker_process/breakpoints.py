"""Makes ``breakpoint()`` in a worker wait for a terminal. The debugger is loaded when it is first needed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from bandmaster.transport.control_page import WorkerIdentity

if TYPE_CHECKING:
    from bandmaster.worker_process.debugger import Debugger

__all__ = ["install_breakpoints"]

OF_RAY = "ray.util.rpdb."  # Ray sets PYTHONBREAKPOINT to this in its processes; the user has not chosen it


def install_breakpoints(identity: WorkerIdentity, hold: Callable[[], AbstractContextManager[None]]) -> None:
    """Have ``breakpoint()`` wait for ``bandmaster debug``, unless PYTHONBREAKPOINT names something else.

    Args:
        identity: The worker's identity.
        hold: Returns a context manager that defers interrupts.
    """
    debugger: Debugger | None = None

    def hook(*args: Any, **kwargs: Any) -> Any:
        nonlocal debugger
        if not os.environ.get("PYTHONBREAKPOINT", OF_RAY).startswith(OF_RAY):
            return sys.__breakpointhook__(*args, **kwargs)
        if debugger is None:
            from bandmaster.worker_process.debugger import Debugger

            debugger = Debugger(identity, hold)
        debugger.set_trace(sys._getframe(1))
        return None

    sys.breakpointhook = hook
