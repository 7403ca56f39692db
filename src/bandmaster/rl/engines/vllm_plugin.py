"""A plugin that vLLM loads into each of its processes: they end with their worker, and take its weights.

vLLM's child processes notice the end of their parent only if it shuts them down, which a killed worker cannot do. The
engine by which weights come is registered in vLLM's factory, and imported when it is used.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal

PARENT = "BANDMASTER_VLLM_PARENT"  # environment variable: the process id of the worker that starts an engine
_PR_SET_PDEATHSIG = 1


WEIGHTS = "bandmaster"  # the name of the weight transfer engine in vLLM's factory


def load() -> None:
    """Register how weights come, and end with the worker."""
    _register_weights()
    _end_with_worker()


def _register_weights() -> None:
    """Register the weight transfer engine, unless an earlier load has."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    with contextlib.suppress(ValueError):
        WeightTransferEngineFactory.register_engine(
            WEIGHTS, "bandmaster.rl.engines.vllm_weights", "StagedWeightsEngine"
        )


def _end_with_worker() -> None:
    """Have the kernel kill this process when the worker ends, if it is the child of a worker that runs an engine."""
    parent = multiprocessing.parent_process()
    if parent is None or os.environ.get(PARENT) != str(parent.pid):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent.pid:  # it had ended before the kernel was asked
        os._exit(1)
