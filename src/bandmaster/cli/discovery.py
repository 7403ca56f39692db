"""Who is there: the groups of this user on this machine, and the zygotes whose controller is gone, as plain values.

::

    /proc/<pid>/fd ── control pages ──► workers ──► Group, one per name and controller
    /proc/<pid>/cmdline, fdinfo ───────────────► Zygote: it holds a pidfd of its controller, which says if that lives
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bandmaster.platform.proc import pids, stat
from bandmaster.transport.control_page import WorkerIdentity, find_all

__all__ = ["Discovered", "Group", "Process", "discover"]

ZYGOTE = b"bandmaster.backends.zygote"


@dataclass(frozen=True)
class Process:
    """One process.

    Attributes:
        pid: Its number.
        started_s: When it started, in seconds since the machine did.
        rss_nbytes: Memory that it has, pages that it shares with others counted in.
    """

    pid: int
    started_s: float
    rss_nbytes: int

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """As it is now; None if it is gone, or has ended and only its parent has not noticed."""
        with contextlib.suppress(OSError):
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            found = stat(pid)
            if found is not None and found.state not in "ZX":
                return cls(pid, found.start / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE"))
        return None


@dataclass(frozen=True)
class Group:
    """The workers of one group that are on this machine.

    Attributes:
        name: The group's; two controllers may have groups of one name.
        controller: The pid of its controller, 0 when that is on another host.
        world_size: How many workers it has, wherever they are.
        is_orphan: Whether the controller is gone.
        workers: WorkerIdentity and process of each that is here, by rank.
    """

    name: str
    controller: int
    world_size: int
    is_orphan: bool
    workers: tuple[tuple[WorkerIdentity, Process], ...]

    @property
    def full_name(self) -> str:
        """Which tells it from groups of other controllers."""
        return f"{self.name}@{self.controller}"


@dataclass(frozen=True)
class Discovered:
    """The groups by name, and the zygotes that have no controller any more."""

    groups: tuple[Group, ...] = ()
    orphaned_zygotes: tuple[Process, ...] = ()


def discover() -> Discovered:
    """Everybody of this user's who is here now."""
    members: dict[tuple[str, int, int], list[tuple[WorkerIdentity, Process]]] = {}
    for identity in find_all():
        process = Process.of(identity.pid)
        if process is not None and _is_ours(identity.pid):
            key = identity.group, identity.controller, identity.world_size
            members.setdefault(key, []).append((identity, process))
    groups = [_group(*key, members[key]) for key in sorted(members)]
    return Discovered(tuple(groups), tuple(_orphaned_zygotes()))


def _group(name: str, controller: int, world_size: int, members: list[tuple[WorkerIdentity, Process]]) -> Group:
    workers = tuple(sorted(members, key=lambda member: member[0].rank))
    living = Process.of(controller)
    oldest = min(process.started_s for _, process in workers)
    is_gone = living is None or living.started_s > oldest  # its number may have gone to somebody else since
    return Group(name, controller, world_size, controller != 0 and is_gone, workers)


def _orphaned_zygotes() -> Iterator[Process]:
    yield from filter(None, map(Process.of, filter(is_orphaned_zygote, pids())))


def is_orphaned_zygote(pid: int) -> bool:
    """Whether it is a zygote of this user's, and the pidfd that it holds of its controller names nobody any more.

    Workers have the same command line, being its forks, but have closed that pidfd.
    """
    with contextlib.suppress(OSError):
        if _is_ours(pid) and ZYGOTE in Path(f"/proc/{pid}/cmdline").read_bytes():
            controllers = [other for other in _pidfds_of(pid) if other != 0]  # 0: in a container that we cannot see
            return bool(controllers) and all(Process.of(other) is None for other in controllers)
    return False


def _pidfds_of(pid: int) -> Iterator[int]:
    """The processes that a process has a pidfd of; -1 for one that is gone."""
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if "pidfd" in os.readlink(path):
                lines = Path(f"/proc/{pid}/fdinfo/{path.name}").read_text().splitlines()
                yield from (int(line.removeprefix("Pid:")) for line in lines if line.startswith("Pid:"))


def _is_ours(pid: int) -> bool:
    """Root can see find_all's. Who owns the directory does not say it: a process can have that look like root's."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
            if line.startswith("Uid:"):
                return {int(uid) for uid in line.split()[1:]} == {os.geteuid()}
    return False


def age_s(process: Process) -> float:
    """How long it has been running."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - process.started_s
