"""Threads and processes that this process starts, and what is said when the system allows no more of them."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path

from bandmaster.errors import ResourceError
from bandmaster.platform.cgroups import Cgroups, Limit
from bandmaster.platform.proc import pids

__all__ = ["cannot_start", "process_limit", "start_thread", "working_directory"]


def start_thread(name: str, target: Callable[..., object], *args: object) -> threading.Thread:
    """Start a daemon thread.

    Args:
        name: Of the thread, in stacks and messages.
        target: What it runs.
        *args: Positional arguments of ``target``.

    Raises:
        ResourceError: The system allows no more threads, or has no memory for one.
    """
    thread = threading.Thread(target=target, name=name, args=args, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # "can't start new thread", for whatever reason
        raise cannot_start(f"thread {name!r}", error) from error
    return thread


def cannot_start(what: str, error: Exception) -> ResourceError:
    """The error for a thread or process that the system has refused, with the limit on their number if there is one."""
    limit = process_limit()
    known = f"; {limit.used} of at most {limit.most} processes and threads are there" if limit is not None else ""
    return ResourceError(
        f"cannot start {what}: {error}{known}; raise the limits on processes and open files (ulimit -u, ulimit -n, "
        "pids.max of the control group), or make fewer groups"
    )


def process_limit() -> Limit | None:
    """The limit on processes and threads of which least is left: the user's, which does not hold for root, or that of
    a control group; None if there is no limit."""
    limits = [Cgroups().processes()]
    most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if most != resource.RLIM_INFINITY and os.geteuid() != 0:
        limits.append(Limit(most, sum(map(_n_threads_of_ours, pids()))))
    return min((limit for limit in limits if limit is not None), key=lambda limit: limit.left, default=None)


def working_directory() -> str:
    """Path of the working directory, which the workers will have too.

    Raises:
        ResourceError: It was removed.
    """
    try:
        return os.getcwd()
    except FileNotFoundError as error:
        raise ResourceError(
            "cannot start workers: the working directory of this process, which would be theirs as well, was removed; "
            "change to another one with os.chdir()"
        ) from error


def _n_threads_of_ours(pid: int) -> int:
    """How many threads a process has, if it is one of this user's; else 0."""
    process = Path(f"/proc/{pid}")
    with contextlib.suppress(OSError):
        if process.stat().st_uid == os.geteuid():
            return len(os.listdir(process / "task"))
    return 0
