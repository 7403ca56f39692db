"""Makes ``breakpoint()`` in a worker wait for a terminal or an IDE. Debuggers are loaded when they are first needed.

::

    breakpoint() ──► Debugger (pdb) ── Terminal ◄── socket ──► attach ◄── bandmaster debug
             └─────► Ide (debugpy) ◄── TCP ──► an IDE
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from types import FrameType
from typing import Any

from bandmaster.debugging.terminal import say_where
from bandmaster.wire.status_page import DEBUGGER, WorkerIdentity, announce

OF_RAY = "ray.util.rpdb."  # Ray sets PYTHONBREAKPOINT to this in its processes; the user has not chosen it
OF_IDES = "debugpy.breakpoint"
_HOST = "127.0.0.1"
_PORT = 5678  # the port of debugpy's documentation, and of IDEs' templates
_LOOK_S = 0.2

Hold = Callable[[], AbstractContextManager[None]]


def install_breakpoints(identity: WorkerIdentity, hold: Hold) -> None:
    """Make ``breakpoint()`` wait for ``bandmaster debug``, or for the debugger that PYTHONBREAKPOINT names.

    Args:
        identity: The worker's identity.
        hold: Returns a context manager that defers interrupts.
    """
    ide = Ide(hold)

    @cache
    def debugger() -> Any:
        from bandmaster.debugging.debugger import Debugger

        return Debugger(identity, hold)

    def hook(*args: Any, **kwargs: Any) -> Any:
        chosen = os.environ.get("PYTHONBREAKPOINT") or OF_RAY
        if chosen == OF_IDES:
            return ide.set_trace(sys._getframe(1))
        if not chosen.startswith(OF_RAY):
            return sys.__breakpointhook__(*args, **kwargs)
        return debugger().set_trace(sys._getframe(1))

    sys.breakpointhook = hook


class Ide:
    """Waits until an IDE is attached, then stops. The worker counts as in a debugger until the IDE detaches.

    Args:
        hold: Returns a context manager that defers interrupts.
    """

    def __init__(self, hold: Hold) -> None:
        self._hold = hold
        self._address = ""

    def set_trace(self, frame: FrameType) -> None:
        """Stop at the next line of a frame."""
        os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # else it warns that it cannot stop in frozen ones
        hook = sys.breakpointhook
        try:
            import debugpy
            import debugpy.server.api  # makes pydevd importable
            import pydevd
        except ImportError:
            print("breakpoint() goes on, as debugpy is not installed: pip install debugpy", file=sys.stderr, flush=True)
            return
        finally:
            sys.breakpointhook = hook  # pydevd has set its own, which does not wait
        with self._hold():
            if not debugpy.is_client_connected():
                self._wait(debugpy, frame)
        # debugpy.breakpoint() would stop here rather than in the user's frame
        pydevd.settrace(suspend=True, trace_only_current_thread=True, patch_multiprocessing=False, stop_at_frame=frame)

    def _wait(self, debugpy: Any, frame: FrameType) -> None:
        if not self._address:
            debugpy.configure(subProcess=False)  # else it would change how the worker starts processes
            try:
                host, port = debugpy.listen((_HOST, _PORT))
            except RuntimeError:  # another rank has the port
                host, port = debugpy.listen((_HOST, 0))
            self._address = f"{host}:{port}"
        descriptor = announce(DEBUGGER, self._address)
        try:
            say_where(frame, f"attach an IDE to {self._address}")
            debugpy.wait_for_client()
        except BaseException:
            os.close(descriptor)
            raise
        threading.Thread(target=_close_when_detached, args=(debugpy, descriptor), daemon=True).start()


def _close_when_detached(debugpy: Any, descriptor: int) -> None:
    debugpy.trace_this_thread(False)
    while debugpy.is_client_connected():  # it offers nothing to wait on
        time.sleep(_LOOK_S)
    os.close(descriptor)
