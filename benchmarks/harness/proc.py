"""What the kernel says of a tree of processes: processor time, memory, descriptors, threads."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

PROC = Path("/proc")
_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)


def tree(root: int) -> list[int]:
    """A process and all its descendants."""
    children = defaultdict(list)
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(*_GONE):
                children[_stat(int(entry.name))[1]].append(int(entry.name))
    found = [root]
    for pid in found:
        found += children[pid]
    return found


def cpu_s(pids: Iterable[int]) -> float:
    """Processor time of all their threads, in seconds; the kernel counts nanoseconds."""
    total = 0
    for pid in pids:
        for task in _listed(PROC / str(pid) / "task"):
            with contextlib.suppress(*_GONE):
                total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def shared_out_nbytes(pids: Iterable[int]) -> int:
    """Memory of all: what several have mapped counts once (the kernel's proportional set size)."""
    return sum(_kib(pid, "smaps_rollup", "Pss") for pid in pids) * 1024


def resident_nbytes(pid: int) -> int:
    """Memory that a process has resident, shared memory included."""
    return _kib(pid, "status", "VmRSS") * 1024


def peak_nbytes(pid: int) -> int:
    """The most that it had resident since it was forgotten last."""
    return _kib(pid, "status", "VmHWM") * 1024


def forget_peak(pid: int) -> None:
    """Count the peak from now on."""
    with contextlib.suppress(*_GONE):
        (PROC / str(pid) / "clear_refs").write_text("5")


def n_descriptors(pids: Iterable[int]) -> int:
    """Open descriptors of all."""
    return sum(len(_listed(PROC / str(pid) / "fd")) for pid in pids)


def n_threads(pids: Iterable[int]) -> int:
    """Threads of all."""
    return sum(len(_listed(PROC / str(pid) / "task")) for pid in pids)


def kill_left(started: dict[int, int], grace_s: float) -> list[int]:
    """Wait for processes to end, and kill those that do not; they are known by pid and by when they were started."""
    deadline = time.monotonic() + grace_s
    while (left := [pid for pid, when in started.items() if _is_same(pid, when)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in left:
        with contextlib.suppress(*_GONE):
            os.kill(pid, signal.SIGKILL)
    return left


def start_times(pids: Iterable[int]) -> dict[int, int]:
    """When each was started: with its pid, that is who it is."""
    times = {}
    for pid in pids:
        with contextlib.suppress(*_GONE):
            times[pid] = _stat(pid)[19]
    return times


def _is_same(pid: int, when: int) -> bool:
    with contextlib.suppress(*_GONE):
        fields = _stat(pid)
        return fields[19] == when and fields[0] != ord("Z")
    return False


def _stat(pid: int) -> list[int]:
    """State as a number, parent, and so on: what comes after the name in its stat."""
    state, *rest = (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    return [ord(state), *map(int, rest)]


def _kib(pid: int, file: str, key: str) -> int:
    with contextlib.suppress(*_GONE):
        for line in (PROC / str(pid) / file).read_text().splitlines():
            if line.startswith(key + ":"):
                return int(line.split()[1])
    return 0


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except _GONE:
        return []
