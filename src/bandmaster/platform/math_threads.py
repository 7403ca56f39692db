"""Threads of numerical libraries, in workers that were forked with them imported: variables come too late for these."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator, Mapping

__all__ = ["THREAD_VARIABLES", "set_threads"]

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

# What OpenBLAS calls it in numpy's own wheels, in older ones, and by itself.
_SETTERS = ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_", "openblas_set_num_threads")


def set_threads(environment: Mapping[str, str]) -> None:
    """Have torch and numpy's OpenBLAS, if they are imported, use as many threads as the environment says."""
    n_threads = _number(environment.get("OMP_NUM_THREADS", ""))
    if n_threads and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(n_threads)
    n_threads = _number(environment.get("OPENBLAS_NUM_THREADS", "")) or n_threads
    for path in _loaded("openblas") if n_threads else ():
        for name in _SETTERS:
            with contextlib.suppress(AttributeError, OSError):  # it has been replaced on disk since, say
                getattr(ctypes.CDLL(path), name)(n_threads)


def _number(text: str) -> int:
    """The first of a list such as ``"4,2"``, which is that of the outermost level; 0 if there is none."""
    first = text.partition(",")[0].strip()
    return int(first) if first.isdigit() else 0


def _loaded(name: str) -> Iterator[str]:
    """Paths of the shared libraries of this process that are called so."""
    with open("/proc/self/maps", errors="surrogateescape") as maps:
        paths = {line.split(maxsplit=5)[-1].strip() for line in maps if name in line}
    return (path for path in paths if name in os.path.basename(path) and ".so" in path)
