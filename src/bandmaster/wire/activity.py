"""The page on which a worker shows other processes of the same user which method it runs, and since when.

::

    worker                                             any process of the same user on its host
    a call: since, index of the method ── memfd ──►    read(pid) ──► Activity
    the first call of a method: its name ──┘

The page is not part of the control page: readers truncate that one, and its layout is fixed by numbers of calls. Its
name has the version of its layout, so that processes with another version of this library do not misread it.
The worker's side is `bandmaster.worker_process.activity`.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from dataclasses import dataclass

from bandmaster.platform.proc import descriptors

__all__ = [
    "HEADER",
    "MAX_NAME_NBYTES",
    "NAMES_AT",
    "N_MORE",
    "N_TASKS",
    "PAGE_NBYTES",
    "RUNNING",
    "SINCE",
    "Activity",
    "page_name",
]

PAGE_NBYTES = 16 * 1024
HEADER = struct.Struct("<QdQQ")  # what runs, since when, how many calls run besides, how many tasks there are
RUNNING, SINCE, N_MORE, N_TASKS = range(4)  # words of 8 bytes
NAMES_AT = 64  # from here on the names of methods, each followed by a zero byte; the first one has the index 1
MAX_NAME_NBYTES = 200
_MOST_READS = 8


def page_name(pid: int) -> str:
    """What /proc calls the page of a worker."""
    return f"bandmaster-activity-1 {pid}"


@dataclass(frozen=True)
class Activity:
    """What a worker does at one moment.

    Attributes:
        method: Name of the running method, with its role if it has one; "" if the worker waits for calls.
        seconds: How long the method has been running; 0 if none is.
        n_more: Number of calls that run besides, where async methods overlap.
        n_tasks: Number of tasks of the event loop of async methods.
    """

    method: str
    seconds: float = 0.0
    n_more: int = 0
    n_tasks: int = 0

    @classmethod
    def of(cls, pid: int) -> Activity | None:
        """Read the page of a worker; None if the process is gone, not ours to see, or shows no such page."""
        name = f"/memfd:{page_name(pid)} (deleted)"
        for path, shown in descriptors(pid):
            if shown == name:
                with contextlib.suppress(OSError), open(path, "rb", buffering=0) as page:
                    return cls._read(page.fileno())
        return None

    @classmethod
    def _read(cls, page: int) -> Activity | None:
        """Read the header until two readings agree: the worker writes its words one after the other."""
        header = os.pread(page, HEADER.size, 0)
        for _ in range(_MOST_READS):
            before, header = header, os.pread(page, HEADER.size, 0)
            if before == header:
                break
        if len(header) < HEADER.size:
            return None
        running, since, n_more, n_tasks = HEADER.unpack(header)
        if not running:
            return cls("", n_tasks=n_tasks)
        names = os.pread(page, PAGE_NBYTES - NAMES_AT, NAMES_AT).split(b"\0")
        if running > len(names):
            return None
        method = names[running - 1].decode(errors="replace")
        shown = "".join(c if c.isprintable() else "?" for c in method)
        return cls(shown, max(0.0, time.monotonic() - since), n_more, n_tasks)
