"""A cheap check after each test that it left no process: to read all of /proc takes longer than most tests do.

::

    pids below this process, before and after ──► the same, or fewer: done
                                              └─► more: `held_resources` says what is a leak, until nothing is
"""

import contextlib
import gc
import os
import signal
import time
from pathlib import Path

from bandmaster.testing.belongings import held_resources

GONE_S = 10.0
COLLECT_S = 0.5  # a collection with torch loaded takes a fifth of a second


@contextlib.contextmanager
def no_handler_left():
    """Check that the block leaves SIGINT as it was: tests after it would wait for an interrupt that nobody notices."""
    before = signal.getsignal(signal.SIGINT)
    yield
    after = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)
    assert after == before, f"SIGINT is handled by {after}, no longer by {before}"
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, []), "SIGINT is blocked"


@contextlib.contextmanager
def no_processes_left():
    """Check that the block leaves no process below this one. An error of the block is raised without the check."""
    before = _pids_below()
    yield
    if _pids_below() <= before:
        return
    start = time.monotonic()
    collect_at = start + COLLECT_S
    while left := [f"pid {pid}: {command}" for (pid, _), command in _held() if pid not in before]:
        now = time.monotonic()
        assert now < start + GONE_S, "\n".join(["left behind:", *left])
        if now >= collect_at:
            gc.collect()
            collect_at = now + COLLECT_S
        time.sleep(0.02)  # polling for processes to end


def _held():
    return held_resources(["processes"]).processes.items()


def _pids_below():
    """Pids of the processes below this one, as far as the main threads of its children have started them."""
    found, tasks = set(), [f"/proc/self/task/{thread}" for thread in os.listdir("/proc/self/task")]
    while tasks:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            new = set(map(int, Path(tasks.pop(), "children").read_text().split())) - found
            found |= new
            tasks += [f"/proc/{pid}/task/{pid}" for pid in new]
    return found
