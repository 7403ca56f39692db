"""Makes ``breakpoint()`` in a worker wait for a terminal or an IDE. Debuggers are loaded when they are first needed.

::

    breakpoint() ──► Debugger (pdb) ── Terminal ◄── socket ──► attach ◄── bandmaster debug
             └─────► Ide (debugpy) ◄── TCP ──► an IDE
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

from bandmaster.wire.status_page import WorkerIdentity

OF_RAY = "ray.util.rpdb."  # Ray sets PYTHONBREAKPOINT to this in its processes; the user has not chosen it
OF_IDES = "debugpy.breakpoint"


def install_breakpoints(identity: WorkerIdentity, hold: Callable[[], AbstractContextManager[None]]) -> None:
    """Make ``breakpoint()`` wait for ``bandmaster debug``, or for the debugger that PYTHONBREAKPOINT names.

    Args:
        identity: The worker's identity.
        hold: Returns a context manager that defers interrupts.
    """
    stops: dict[bool, Callable[[FrameType], object]] = {}  # stop in a frame: in an IDE or not

    def hook(*args: Any, **kwargs: Any) -> Any:
        chosen = os.environ.get("PYTHONBREAKPOINT") or OF_RAY
        is_ide = chosen == OF_IDES
        if not is_ide and not chosen.startswith(OF_RAY):
            return sys.__breakpointhook__(*args, **kwargs)
        if is_ide not in stops:
            if is_ide:
                from bandmaster.debugging.ide import Ide

                stops[is_ide] = Ide(hold).set_trace
            else:
                from bandmaster.debugging.debugger import Debugger

                stops[is_ide] = Debugger(identity, hold).set_trace
        stops[is_ide](sys._getframe(1))
        return None

    sys.breakpointhook = hook
