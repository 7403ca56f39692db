"""Describes how processes ended, including out-of-memory kills, and kills the processes that they leave behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from bandmaster.platform.cgroups import Cgroups
from bandmaster.platform.locks import SigintSafeLock
from bandmaster.platform.proc import Stat, children_of, everyone, stat

GiB = 1 << 30
TRACKER_GRACE_S = 1.0  # time for a resource tracker of `multiprocessing` to unlink leaked objects


@dataclass(frozen=True)
class Ended:
    """The end of a process.

    Attributes:
        status: Wait status as `os.wait4` returns it.
        peak_nbytes: Peak resident memory in bytes.
        out_of_memory: Note on out-of-memory kills from `MemoryPressure.words`; "" if there were none.
    """

    status: int
    peak_nbytes: int
    out_of_memory: str

    def in_words(self) -> str:
        """Exit code or signal name; after SIGKILL also peak memory, memory limit and out-of-memory kills."""
        code = os.waitstatus_to_exitcode(self.status)
        if code >= 0:
            return f"exit code {code}"
        names = {known.value: known.name for known in signal.Signals}  # most real-time signals have none
        text = f"killed by {names.get(-code, f'signal {-code}')}"
        if -code != signal.SIGKILL:
            return text
        return f"{text}; its peak memory was {self.peak_nbytes / GiB:.1f} GiB of {_limit()}{self.out_of_memory}"


class MemoryPressure:
    """Detects that the kernel killed a process for lack of memory since construction or the last call of `words`."""

    def __init__(self) -> None:
        self._seen = dict(_out_of_memory_kills())

    def words(self) -> str:
        """Note for a message on the out-of-memory kills since the last call; "" if there were none."""
        before, self._seen = self._seen, dict(_out_of_memory_kills())
        places = [place for place, n in self._seen.items() if n > before.get(place, n)]
        return f"; the kernel's out-of-memory killer ended a process meanwhile ({', '.join(places)})" if places else ""


def prctl(operation: int, argument: int) -> None:
    """Call prctl(2) with one argument. Errors are ignored."""
    ctypes.CDLL(None, use_errno=True).prctl(operation, argument)


class Orphans:
    """Kills the orphans of a child subreaper: processes that became its children because their own parents ended.

    Args:
        parent: Process id of the subreaper.
    """

    def __init__(self, parent: int) -> None:
        self._parent = parent
        self._killed_at: dict[tuple[int, int], float] = {}  # by pid and start

    def end(self, but_for: Collection[int]) -> bool:
        """Kill the subreaper's children, but for those listed. Call it when all were waited for that could be.

        Children of a killed process become children of the subreaper, so call this until it returns False. A child
        that has ended and cannot be waited for yet has threads that are about to end, and may leave children then.

        Args:
            but_for: Process ids of the children to keep.

        Returns:
            Whether there was any other child.
        """
        orphans = {(p.pid, p.start): p for p in children_of(self._parent) if p.pid not in but_for}
        now = time.monotonic()
        self._killed_at = {key: self._killed_at.get(key) or now + _grace_s(key[0]) for key in orphans}
        for key, moment in self._killed_at.items():
            if moment <= now:
                _kill(orphans[key])
        return bool(orphans)


def end_descendants(of: int) -> bool:
    """Kill all descendants of a process, but for resource trackers, which end when their parents do.

    Returns:
        Whether there was any.
    """
    children: dict[int, list[Stat]] = {}
    for process in everyone():
        children.setdefault(process.parent, []).append(process)
    found, has_killed = children.get(of, []), False
    while found:
        process = found.pop()
        found += children.get(process.pid, [])
        if process.state not in "ZX" and not _grace_s(process.pid):
            has_killed = True
            _kill(process)
    return has_killed


def is_readable(source: int | socket.socket, timeout_s: float | None = None) -> bool:
    """Wait until a descriptor, perhaps one from 1,024 on, is readable; that of a process is so when it has ended."""
    poll = select.poll()
    poll.register(source, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))


def _grace_s(pid: int) -> float:
    with contextlib.suppress(OSError):
        if b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return TRACKER_GRACE_S
    return 0.0


def _kill(process: Stat) -> None:
    """Kill a process, unless its pid belongs to another process by now."""
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
    for place, path in (("on this machine", Path("/proc/vmstat")), ("in its cgroup", events)):
        with contextlib.suppress(OSError):
            counts = dict(line.split() for line in path.read_text().splitlines())
            if "oom_kill" in counts:
                yield place, int(counts["oom_kill"])


def _limit() -> str:
    limit = Cgroups().memory()
    if limit is not None:
        return f"the {limit.most / GiB:.1f} GiB that its cgroup may use"
    return f"the {os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / GiB:.1f} GiB that this machine has"
