"""The processes of this machine, read from /proc."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Stat(NamedTuple):
    """The state of a process at one moment.

    Attributes:
        pid: Process id.
        name: First 15 bytes of the name of the program.
        state: One letter; ``Z`` and ``X`` mean that the process has ended.
        parent: Process id of the parent.
        start: Start time in clock ticks since boot; tells apart two processes that had the same pid.
        ticks: Processor time that it has used, in clock ticks.

    Source: proc(5), /proc/[pid]/stat.
    """

    pid: int
    name: str
    state: str
    parent: int
    start: int
    ticks: int


def stat(pid: int) -> Stat | None:
    """The present state of a process; None if it does not exist, or is hidden.

    Raises:
        OSError: This process has no descriptor to look with.
    """
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        # The name is in parentheses, and may itself contain parentheses and spaces.
        before, _, after = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")
        fields = after.split()  # field 3 (state) and later
        name, ticks = before.partition("(")[2], int(fields[11]) + int(fields[12])
        return Stat(pid, name, fields[0], int(fields[1]), int(fields[19]), ticks)
    return None


def pids() -> Iterator[int]:
    """Process ids of all visible processes."""
    return (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())


def descriptors(pid: int) -> Iterator[tuple[str, str]]:
    """The descriptors of a process: the path to each, and its name; none if it does not exist or is another user's."""
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # it was closed meanwhile
                yield str(path), os.readlink(path)


def everyone() -> Iterator[Stat]:
    """The state of every visible process."""
    return filter(None, map(stat, pids()))


def children_of(pid: int) -> list[Stat]:
    """The children of process ``pid``, also those that have ended and were not waited for.

    If one of them is waited for meanwhile, the kernel may leave out another: whoever has to find them all looks again.
    """
    listed = _children_of(pid) if _LISTS_CHILDREN else pids()
    return [found for found in map(stat, listed) if found and found.parent == pid]


def _children_of(pid: int) -> list[int]:
    """Process ids of the children of a process, zombies too, by proc(5), /proc/[pid]/task/[tid]/children."""
    children: list[int] = []
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            children += map(int, thread.read_text().split())
    return children


_LISTS_CHILDREN = Path("/proc/thread-self/children").exists()  # not every kernel does; reading all processes is slow


def is_runnable(pid: int) -> bool:
    """Whether a thread of a process runs, or waits for a processor."""
    for thread in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            if thread.read_text(errors="replace").rpartition(")")[2].split(None, 1)[0] == "R":
                return True
    return False


def cpu_s_of_family(pid: int) -> float:
    """Processor time that a process and its descendants have used, in seconds, without those that were waited for."""
    ticks, family = 0, [pid]
    for one in family:  # grows during the loop
        found = stat(one)
        if found is not None:
            ticks += found.ticks
            family += _children_of(one)
    return ticks / os.sysconf("SC_CLK_TCK")


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """The process and the user at the other end of a Unix socket; process 0 is one of another pid namespace."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid
