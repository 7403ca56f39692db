"""What Linux knows of processes that have ended, how and whether memory ran out; and ending those they leave behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from bandmaster.platform.cgroups import Cgroups
from bandmaster.platform.locks import SigintSafeLock
from bandmaster.platform.proc import Stat, everyone, running_children_of, stat

__all__ = ["Ended", "MemoryPressure", "Orphans", "end_descendants", "memory_file", "prctl", "status_in_words"]

GiB = 1 << 30
TRACKER_GRACE_S = 1.0  # for a resource tracker of `multiprocessing` to unlink what its processes have left


@dataclass(frozen=True)
class Ended:
    """How a process ended.

    Attributes:
        status: As `os.wait4` gives it.
        peak_nbytes: The most memory that it had at once.
        out_of_memory: What the kernel says about memory that ran out, "" if nothing.
    """

    status: int
    peak_nbytes: int
    out_of_memory: str

    def in_words(self) -> str:
        """Exit code or signal by its name, and for what the kernel may have killed, what is known about memory."""
        text = status_in_words(self.status)
        if os.waitstatus_to_exitcode(self.status) != -signal.SIGKILL:
            return text
        return f"{text}; it had up to {self.peak_nbytes / GiB:.1f} GiB of {_limit()}{self.out_of_memory}"


def status_in_words(status: int) -> str:
    """Exit code, or signal by its name, of a status as `os.wait4` gives it."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:  # most real-time signals have no name
        return f"killed by signal {-code}"


class MemoryPressure:
    """How often the kernel has killed a process because memory ran out, since this was made or asked the last time."""

    def __init__(self) -> None:
        self._seen = dict(_out_of_memory_kills())

    def words(self) -> str:
        """For a message, "" if it has not."""
        before, self._seen = self._seen, dict(_out_of_memory_kills())
        places = [place for place, n in self._seen.items() if n > before.get(place, n)]
        return f", and the kernel killed for want of memory meanwhile ({', '.join(places)})" if places else ""


@contextlib.contextmanager
def memory_file(content: bytes) -> Iterator[IO[bytes]]:
    """A file without a name, to be read from its beginning by whoever is given its descriptor."""
    with SigintSafeLock():  # so that Ctrl-C leaves no descriptor that nobody closes
        made = open(os.memfd_create("bandmaster-spawn", os.MFD_CLOEXEC), "w+b", buffering=0)  # noqa: SIM115
    with made as file:
        view = memoryview(content)
        while view:
            view = view[file.write(view) :]
        file.seek(0)
        yield file


def prctl(operation: int, argument: int) -> None:
    """The system call."""
    ctypes.CDLL(None, use_errno=True).prctl(operation, argument)


class Orphans:
    """The processes that a child subreaper became the parent of because their own parents ended.

    Args:
        parent: The pid of the subreaper.
    """

    def __init__(self, parent: int) -> None:
        self._parent = parent
        self._killed_at: dict[tuple[int, int], float] = {}  # by pid and start

    def end(self, but_for: Collection[int]) -> bool:
        """Kill the subreaper's children that are not ``but_for``; whether there were any that still ran.

        What these have started themselves comes to the subreaper in its turn: call this until it is False.
        """
        orphans = {(p.pid, p.start): p for p in running_children_of(self._parent) if p.pid not in but_for}
        now = time.monotonic()
        self._killed_at = {key: self._killed_at.get(key) or now + _grace_s(key[0]) for key in orphans}
        for key, moment in self._killed_at.items():
            if moment <= now:
                _kill(orphans[key])
        return bool(orphans)


def end_descendants() -> None:
    """Kill whatever descends from this process, but for trackers, which end by themselves when it does."""
    children: dict[int, list[Stat]] = {}
    for process in everyone():
        children.setdefault(process.parent, []).append(process)
    found = children.get(os.getpid(), [])
    while found:
        process = found.pop()
        found += children.get(process.pid, [])
        if not _grace_s(process.pid):
            _kill(process)


def _grace_s(pid: int) -> float:
    with contextlib.suppress(OSError):
        if b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return TRACKER_GRACE_S
    return 0.0


def _kill(process: Stat) -> None:
    """Kill a process, but none that has been given its number since."""
    with contextlib.suppress(ProcessLookupError, PermissionError), SigintSafeLock():
        pidfd = os.pidfd_open(process.pid)
        try:
            found = stat(process.pid)
            if found is not None and found.start == process.start:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        finally:
            os.close(pidfd)


def _out_of_memory_kills() -> Iterator[tuple[str, int]]:
    events = Cgroups().directory("memory") / "memory.events"
    for place, path in (("on this machine", Path("/proc/vmstat")), ("in its control group", events)):
        with contextlib.suppress(OSError):
            counts = dict(line.split() for line in path.read_text().splitlines())
            if "oom_kill" in counts:
                yield place, int(counts["oom_kill"])


def _limit() -> str:
    limit = Cgroups().memory()
    if limit is not None:
        return f"the {limit.most / GiB:.1f} GiB that its control group may have"
    return f"the {os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / GiB:.1f} GiB that this machine has"
