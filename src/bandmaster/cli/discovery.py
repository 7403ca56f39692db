"""Finds the user's groups on this machine, and zygotes whose controller has ended, as plain values.

::

    /proc/<pid>/fd ── status pages ──► workers ──► Group, one per name and controller
    /proc/<pid>/cmdline, fdinfo ───────────────► Zygote: its pidfd of the controller shows whether the controller runs
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bandmaster.platform.proc import descriptors, pids, stat
from bandmaster.wire.segment_reader import held_nbytes
from bandmaster.wire.status_page import AGENT, WorkerIdentity, announcement, find_all

ZYGOTE = b"bandmaster.backends.zygote"


@dataclass(frozen=True)
class Process:
    """One running process.

    Attributes:
        pid: Process id.
        started_s: Start time, in seconds since the machine booted.
        rss_nbytes: Resident memory in bytes, including pages shared with other processes.
    """

    pid: int
    started_s: float
    rss_nbytes: int

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """Read the process ``pid`` from /proc; None if it does not exist or is a zombie."""
        with contextlib.suppress(OSError):
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            found = stat(pid)
            if found is not None and found.state not in "ZX":
                return cls(pid, found.start / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE"))
        return None


@dataclass(frozen=True)
class Group:
    """The workers of one group that run on this machine.

    Attributes:
        name: The group's name; groups of different controllers may have the same name.
        controller: Pid of the group's controller, 0 when the controller runs on another host.
        world_size: Number of workers of the group on all hosts.
        is_orphan: Whether the controller has ended.
        workers: Identity and process of each worker on this machine, by rank.
        held_nbytes: Bytes of rows that these workers have made and their controller holds, in shared memory.
        agent_of: If ``controller`` is an agent, its name for the controller on another host; else "".
        is_detached: Whether the workers outlive their controller; then the group is never an orphan.
    """

    name: str
    controller: int
    world_size: int
    is_orphan: bool
    workers: tuple[tuple[WorkerIdentity, Process], ...]
    held_nbytes: int = 0
    agent_of: str = ""
    is_detached: bool = False

    @property
    def full_name(self) -> str:
        """``name@controller``, which is unique on this machine."""
        return f"{self.name}@{self.controller}"


@dataclass(frozen=True)
class Discovered:
    """The processes that `discover` found.

    Attributes:
        groups: The groups, sorted by name.
        orphaned_zygotes: Zygotes whose controller has ended.
        controller: Pid of the only controller whose groups were wanted; None for all.
    """

    groups: tuple[Group, ...] = ()
    orphaned_zygotes: tuple[Process, ...] = ()
    controller: int | None = None


def no_groups(controller: int | None) -> str:
    """The words for groups that were not found; ``controller`` is that of `discover`."""
    who = "you have" if controller is None else f"controller {controller} has"
    return f"{who} no groups on this machine"


def discover(controller: int | None = None) -> Discovered:
    """Find the groups and orphaned zygotes of this user on this machine.

    Args:
        controller: Pid of the only controller whose groups are wanted. Nothing tells the controller of an orphaned
            zygote but the workers that it has forked, so one without workers is left out. By default all controllers.
    """
    members: dict[tuple[str, int, int, int], list[tuple[WorkerIdentity, Process]]] = {}
    for identity in find_all():
        process = Process.of(identity.pid)
        is_wanted = controller is None or identity.controller == controller
        if is_wanted and process is not None and _is_ours(identity.pid):
            key = identity.group, identity.controller, identity.controllers_start, identity.world_size
            members.setdefault(key, []).append((identity, process))
    groups = [_group(members[key]) for key in sorted(members)]
    zygotes = _orphaned_zygotes(pids() if controller is None else _parents_of(groups))
    return Discovered(tuple(groups), tuple(zygotes), controller)


def _group(members: list[tuple[WorkerIdentity, Process]]) -> Group:
    workers = tuple(sorted(members, key=lambda member: member[0].rank))
    one = workers[0][0]
    controller, living = one.controller, stat(one.controller)
    is_gone = living is None or living.state in "ZX" or living.start != one.controllers_start  # the pid is used again
    held = held_nbytes(controller) if controller else {}
    nbytes = sum(held.get(process.pid, 0) for _, process in workers)
    agent_of = (announcement(controller, AGENT) if controller else None) or ""
    is_detached = all(identity.is_detached for identity, _ in workers)
    is_orphan = controller != 0 and is_gone and not is_detached
    return Group(one.group, controller, one.world_size, is_orphan, workers, nbytes, agent_of, is_detached)


def _orphaned_zygotes(candidates: Iterable[int]) -> Iterator[Process]:
    yield from filter(None, map(Process.of, filter(is_orphaned_zygote, candidates)))


def _parents_of(groups: Sequence[Group]) -> list[int]:
    """Pids of the processes that have forked the workers of groups, in order and once each."""
    found = filter(None, (stat(process.pid) for group in groups for _, process in group.workers))
    return sorted({worker.parent for worker in found})


def is_orphaned_zygote(pid: int) -> bool:
    """Whether a process is a zygote of this user whose controller has ended.

    The zygote's pidfd of its controller shows that. Workers and their forks have its command line, and a status page.
    """
    with contextlib.suppress(OSError):
        is_zygotes = _is_ours(pid) and ZYGOTE in Path(f"/proc/{pid}/cmdline").read_bytes()
        if is_zygotes and not any(WorkerIdentity.read(name) for _, name in descriptors(pid)):
            controllers = [other for other in _pidfds_of(pid) if other != 0]  # 0: in another pid namespace
            return bool(controllers) and all(Process.of(other) is None for other in controllers)
    return False


def _pidfds_of(pid: int) -> Iterator[int]:
    """The pids to which a process holds pidfds; -1 for a process that has ended."""
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if "pidfd" in os.readlink(path):
                lines = Path(f"/proc/{pid}/fdinfo/{path.name}").read_text().splitlines()
                yield from (int(line.removeprefix("Pid:")) for line in lines if line.startswith("Pid:"))


def _is_ours(pid: int) -> bool:
    """Whether a process belongs to this user.

    `find_all` returns the processes of all users when it runs as root. The owner of /proc/<pid> does not decide it,
    because a non-dumpable process has a directory owned by root.
    """
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
            if line.startswith("Uid:"):
                return {int(uid) for uid in line.split()[1:]} == {os.geteuid()}
    return False


def age_s(process: Process) -> float:
    """The time since a process started, in seconds."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - process.started_s
