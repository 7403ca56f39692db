"""Ways in which processes and tasks end, and waiting until processes have ended, or files have come."""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import threading
import time

import psutil
from clock import idle_time


def exit_three():
    os._exit(3)


def kill_oneself():
    os.kill(os.getpid(), signal.SIGKILL)


def segfault():
    os.kill(os.getpid(), signal.SIGSEGV)


def abort_with_a_dump():
    """As C libraries do that say where they were."""
    print(*["  at some_function_of_a_library + 0x1234, in /some/directory/of/it.so"] * 30, sep="\n", file=sys.stderr)
    sys.stderr.flush()
    os.abort()


def deadlock():
    """A mutex that is taken twice: no signal gets the thread out of there."""
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def outstay(begun):
    """Touch a file, and stay whatever interrupts come."""
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            begun.touch()
            time.sleep(600)


def runs(pid):
    """Whether a process has not ended; what is left of an orphan is for PID 1 to clear away, in its own time."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def in_another_thread(act, *args):
    """Call a function in another thread, and wait until it has returned."""
    acting = threading.Thread(target=act, args=args)
    acting.start()
    acting.join(60)


def started(thread):
    """Start a thread, and let it come to its end, or to a lock of this one."""
    thread.start()
    thread.join(0.1)


def until(holds, timeout_s=60.0):
    """Wait until a condition holds that other processes or threads bring about."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)  # between looks at another process


def wait_until_gone(pids, timeout_s=2.0):
    deadline = idle_time() + timeout_s
    while left := [pid for pid in pids if runs(pid)]:
        assert idle_time() < deadline, f"still there after {timeout_s} s: {left}"
        time.sleep(0.01)  # polling for the kernel


def wait_for(path, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} has not come"
        time.sleep(0.001)


async def await_and_go_on(what):
    """Await something, and then for more rounds of the event loop than `ends_if_cancelled` is told."""
    await what
    for _ in range(20):
        await asyncio.sleep(0)


async def ends_if_cancelled(task, n_rounds):
    """Whether a task ends by its cancellation after so many rounds of the event loop."""
    for _ in range(n_rounds):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    return task.cancelled()
