"""Makes ``breakpoint()`` in a worker stop in an IDE, by debugpy."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType, ModuleType

from bandmaster.debugging.terminal import say_where
from bandmaster.wire.status_page import DEBUGGER, announce

_HOST = "127.0.0.1"
_PORT = 5678  # the port of debugpy's documentation, and of IDEs' templates
_LOOK_S = 0.2


class Ide:
    """Waits until an IDE is attached, then stops. The worker counts as in a debugger until the IDE detaches.

    Args:
        hold: Returns a context manager that defers interrupts.
    """

    def __init__(self, hold: Callable[[], AbstractContextManager[None]]) -> None:
        self._hold = hold
        self._address = ""

    def set_trace(self, frame: FrameType) -> None:
        """Stop at the next line of a frame."""
        try:
            debugpy, pydevd = _imported()
        except ImportError:
            print("breakpoint() goes on, as debugpy is not installed: pip install debugpy", file=sys.stderr, flush=True)
            return
        with self._hold():
            if not debugpy.is_client_connected():
                self._wait(debugpy, frame)
        # debugpy.breakpoint() would stop here rather than in the user's frame
        pydevd.settrace(suspend=True, trace_only_current_thread=True, patch_multiprocessing=False, stop_at_frame=frame)

    def _wait(self, debugpy: ModuleType, frame: FrameType) -> None:
        self._address = self._address or _listen(debugpy)
        descriptor = announce(DEBUGGER, self._address)
        try:
            say_where(frame, f"attach an IDE to {self._address}")
            debugpy.wait_for_client()
        except BaseException:
            os.close(descriptor)
            raise
        threading.Thread(target=_close_when_detached, args=(debugpy, descriptor), daemon=True).start()


def _imported() -> tuple[ModuleType, ModuleType]:
    """Return debugpy, and pydevd, on which it is built.

    Raises:
        ImportError: debugpy is not installed.
    """
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # else it warns that it cannot stop in frozen modules
    hook = sys.breakpointhook
    try:
        import debugpy
        import debugpy.server.api  # makes pydevd importable
        import pydevd
    finally:
        sys.breakpointhook = hook  # pydevd has set its own, which does not wait
    return debugpy, pydevd


def _listen(debugpy: ModuleType) -> str:
    debugpy.configure(subProcess=False)  # else it would change how the worker starts processes
    try:
        host, port = debugpy.listen((_HOST, _PORT))
    except RuntimeError:  # another rank has the port
        host, port = debugpy.listen((_HOST, 0))
    return f"{host}:{port}"


def _close_when_detached(debugpy: ModuleType, descriptor: int) -> None:
    debugpy.trace_this_thread(False)
    while debugpy.is_client_connected():  # there is nothing to wait on
        time.sleep(_LOOK_S)
    os.close(descriptor)
