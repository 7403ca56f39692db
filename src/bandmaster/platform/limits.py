"""Starts threads, and reports as `ResourceError` why the system allows no more threads or processes."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from bandmaster.errors import ResourceError
from bandmaster.platform.cgroups import Cgroups, Limit
from bandmaster.platform.proc import pids

try:
    import resource
except ImportError as error:  # the first module of Unix that an import of the package comes to
    raise ImportError("bandmaster runs on Linux, and backend 'inprocess' on macOS too; on Windows, use WSL") from error


if TYPE_CHECKING:
    from concurrent.futures import Future

T = TypeVar("T")


def start_thread(name: str, target: Callable[..., object], *args: object) -> threading.Thread:
    """Start a daemon thread.

    Args:
        name: Name of the thread in stacks and messages.
        target: Function that the thread runs.
        *args: Positional arguments of ``target``.

    Raises:
        ResourceError: The system allows no more threads, or has no memory for another one, or the interpreter exits.
    """
    if sys.is_finalizing():  # before Python 3.12, a thread that is started now neither runs nor fails
        raise ResourceError(f"cannot start thread {name!r}: the interpreter exits")
    thread = threading.Thread(target=target, name=name, args=args, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # "can't start new thread"; Python does not report the reason
        raise cannot_start(f"thread {name!r}", error) from error
    return thread


def run_in_thread(name: str, function: Callable[[], T]) -> Future[T]:
    """Call a function in a thread that does not keep the program from ending, as one of an executor would.

    Returns:
        The future of its value. If it is cancelled before the thread has begun, the function is not called.

    Raises:
        ResourceError: As `start_thread`.
    """
    from concurrent.futures import Future  # here, as most programs do not need it

    future: Future[T] = Future()

    def run(future: Future[T]) -> None:
        if future.set_running_or_notify_cancel():
            try:
                value = function()
            except BaseException as error:
                future.set_exception(error)
                del future  # which has the error, and that this frame
            else:
                future.set_result(value)

    start_thread(name, run, future)
    return future


def cannot_start(what: str, error: Exception) -> ResourceError:
    """Make the error for a thread or process that the system refused to start.

    Args:
        what: The thread or process, as the message names it.
        error: The refusal.

    Returns:
        An error whose message also shows the limit on processes and threads, if there is one.
    """
    limit = process_limit()
    known = f"; {limit.used} of at most {limit.most} processes and threads exist" if limit is not None else ""
    return ResourceError(
        f"cannot start {what}: {error}{known}; raise the limits on processes and open files (ulimit -u, ulimit -n, "
        "pids.max of the cgroup), or create fewer groups"
    )


def process_limit() -> Limit | None:
    """The tightest limit on processes and threads; None if there is no limit.

    Considers the user's own limit (``RLIMIT_NPROC``, which does not apply to root) and those of the control groups.
    """
    limits = [Cgroups().processes()]
    most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if most != resource.RLIM_INFINITY and os.geteuid() != 0:
        limits.append(Limit(most, sum(map(_n_threads_of_ours, pids()))))
    return min((limit for limit in limits if limit is not None), key=lambda limit: limit.left, default=None)


def working_directory() -> str:
    """Path of the working directory of this process, in which workers start too.

    Raises:
        ResourceError: The directory was removed.
    """
    try:
        return os.getcwd()
    except FileNotFoundError as error:
        raise ResourceError(
            "cannot start workers: the working directory of this process, in which workers start too, was removed; "
            "change to an existing directory with os.chdir()"
        ) from error


def _n_threads_of_ours(pid: int) -> int:
    """Number of threads of a process; 0 if it has ended or belongs to another user."""
    process = Path(f"/proc/{pid}")
    with contextlib.suppress(OSError):
        if process.stat().st_uid == os.geteuid():
            return len(os.listdir(process / "task"))
    return 0
