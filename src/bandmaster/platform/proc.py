"""The processes of this machine, as Linux tells of them in /proc."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["Stat", "everyone", "pids", "running_children_of", "stat"]


class Stat(NamedTuple):
    """What is known of a process at one moment.

    Attributes:
        pid: Its number.
        name: Of its program, the first 15 bytes.
        state: A letter; ``Z`` and ``X`` for one that has ended.
        parent: The number of its parent.
        start: When it started, in ticks since the boot.
        status: How it ended, as `os.wait4` gives it, once it has; 0 where this process may not know.

    Source: proc(5), /proc/[pid]/stat.
    """

    pid: int
    name: str
    state: str
    parent: int
    start: int
    status: int


def stat(pid: int) -> Stat | None:
    """As it is now; None if it is gone."""
    with contextlib.suppress(OSError):
        before, _, after = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")  # any name
        fields = after.split()  # from the third on
        return Stat(pid, before.partition("(")[2], fields[0], int(fields[1]), int(fields[19]), int(fields[49]))
    return None


def pids() -> Iterator[int]:
    """The numbers of all processes that can be seen."""
    return (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())


def everyone() -> Iterator[Stat]:
    """All of them."""
    return filter(None, map(stat, pids()))


def running_children_of(pid: int) -> list[Stat]:
    """The processes whose parent is ``pid``, but for those that have ended and that it has not waited for."""
    return [process for process in everyone() if process.parent == pid and process.state not in "ZX"]
