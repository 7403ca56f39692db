"""A plugin that vLLM loads into each of its processes: those that a worker has started end with it.

vLLM's child processes notice the end of their parent only if it shuts them down, which a killed worker cannot do.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal

PARENT = "BANDMASTER_VLLM_PARENT"  # environment variable: the process id of the worker that starts an engine
_PR_SET_PDEATHSIG = 1


def load() -> None:
    """Have the kernel kill this process when the worker ends, if it is the child of a worker that runs an engine."""
    parent = multiprocessing.parent_process()
    if parent is None or os.environ.get(PARENT) != str(parent.pid):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent.pid:  # it had ended before the kernel was asked
        os._exit(1)
