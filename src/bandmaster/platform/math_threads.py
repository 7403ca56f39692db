"""Sets the number of threads of numerical libraries in a forked worker.

The zygote imported these libraries before the fork, so they do not read the environment variables of the worker.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator, Mapping

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

# Name of OpenBLAS's setter in current numpy wheels, in older ones, and in OpenBLAS's own builds.
_SETTERS = ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_", "openblas_set_num_threads")


def set_threads(environment: Mapping[str, str]) -> None:
    """Set the number of threads of torch and of numpy's OpenBLAS, where they are loaded.

    Args:
        environment: Variables of the worker. ``OMP_NUM_THREADS`` applies to both libraries;
            ``OPENBLAS_NUM_THREADS``, if it is set, takes precedence for OpenBLAS.
    """
    n_threads = _number(environment.get("OMP_NUM_THREADS", ""))
    if n_threads and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(n_threads)
    n_threads = _number(environment.get("OPENBLAS_NUM_THREADS", "")) or n_threads
    for path in _loaded("openblas") if n_threads else ():
        for name in _SETTERS:
            with contextlib.suppress(AttributeError, OSError):  # it may have been replaced on disk since then
                getattr(ctypes.CDLL(path), name)(n_threads)


def _number(text: str) -> int:
    """The first number of a list such as ``"4,2"``, that of the outermost nesting level; 0 if there is none."""
    first = text.partition(",")[0].strip()
    return int(first) if first.isdigit() else 0


def _loaded(name: str) -> Iterator[str]:
    """Paths of the loaded shared libraries whose file name contains ``name``."""
    with open("/proc/self/maps", errors="surrogateescape") as maps:
        paths = {line.split(maxsplit=5)[-1].strip() for line in maps if name in line}
    return (path for path in paths if name in os.path.basename(path) and ".so" in path)
