"""Lists the resources that a process holds and could leak, read from /proc and Ray."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from bandmaster.backends import get_backend
from bandmaster.platform.proc import Stat, everyone

if TYPE_CHECKING:
    from bandmaster.backends.local import LocalBackend

KINDS = ("threads", "processes", "descriptors", "segments", "placements")

_SEGMENTS = "/memfd:bandmaster ", "/memfd:bandmaster-rows "  # a status page has another name
_ZYGOTE_WATCH = "bandmaster-zygote-watch"
_LEASES = "bandmaster-leases"  # threads of open groups


@dataclass(frozen=True)
class HeldResources:
    """The resources that a process holds at one moment.

    Attributes:
        threads: Names of the process's Python threads.
        processes: Command lines of the process's descendants, except Ray's, by pid and start time in clock ticks since
            boot.
        descriptors: Targets of the open descriptors, as /proc shows them, by number; without descriptors of segments.
        segments: Memory shared with workers: descriptors by number and mappings by address, as /proc shows them.
        placements: Names of Ray's placement groups by id, if this process is connected to a Ray cluster.
    """

    threads: tuple[str, ...]
    processes: Mapping[tuple[int, int], str]
    descriptors: Mapping[int, str]
    segments: Mapping[int, str]
    placements: Mapping[str, str]

    def beyond(self, before: HeldResources, kinds: Collection[str] = KINDS) -> dict[str, list[str]]:
        """Return descriptions of the resources that were added since ``before``, by kind.

        Threads with the same name, descriptors and segments are compared by count, so one that replaces another does
        not count as added. Kinds without additions are omitted.

        Args:
            before: An earlier result of `held_resources`.
            kinds: The kinds to compare: names of attributes of this class.
        """
        found = {
            "threads": sorted((Counter(self.threads) - Counter(before.threads)).elements()),
            "processes": [f"pid {p[0]}: {self.processes[p]}" for p in sorted(self.processes.keys() - before.processes)],
            "descriptors": _more(self.descriptors, before.descriptors),
            "segments": _more(self.segments, before.segments),
            "placements": [name for key, name in self.placements.items() if key not in before.placements],
        }
        return {kind: found[kind] for kind in KINDS if kind in kinds and found[kind]}


def held_resources(kinds: Collection[str] = KINDS) -> HeldResources:
    """Return the resources that this process holds now.

    Args:
        kinds: Some of ``"threads"``, ``"processes"``, ``"descriptors"``, ``"segments"`` and ``"placements"``; each
            takes some milliseconds. The other kinds are left empty.

    Example:
        >>> import subprocess
        >>> before = held_resources(["processes"])
        >>> child = subprocess.Popen(["sleep", "60"])
        >>> list(held_resources(["processes"]).beyond(before))
        ['processes']
        >>> child.kill()
        >>> child.wait()
        -9
        >>> held_resources(["processes"]).beyond(before)
        {}
    """
    zygote = _zygote() if {"processes", "descriptors", "segments"} & set(kinds) else _Zygote()
    processes = _descendants() if "processes" in kinds else ()
    targets = _descriptors() if {"descriptors", "segments"} & set(kinds) else ()
    ours = {fd: target for fd, target in targets if fd not in zygote.descriptors}
    return HeldResources(
        threads=tuple(_threads()) if "threads" in kinds else (),
        processes={process: command for process, command in processes if process[0] != zygote.pid},
        descriptors={fd: target for fd, target in ours.items() if not target.startswith(_SEGMENTS)},
        segments={
            **{fd: target for fd, target in ours.items() if target.startswith(_SEGMENTS)},
            **(dict(_mapped_segments()) if "segments" in kinds else {}),
        },
        placements=dict(_placements()) if "placements" in kinds else {},
    )


def is_connected_to_ray() -> bool:
    """Whether this process is connected to a Ray cluster."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _threads() -> list[str]:
    """Names of the Python threads, except the watcher of the zygote and the threads that maintain open groups."""
    names = [thread.name for thread in threading.enumerate() if thread.name != _LEASES]
    if _ZYGOTE_WATCH in names:
        names.remove(_ZYGOTE_WATCH)
    return names


def _more(now: Mapping[int, str], before: Mapping[int, str]) -> list[str]:
    """Describe the new descriptors or mappings, if there are more of them than before."""
    if len(now) <= len(before):
        return []
    return [f"{fd} -> {target}" for fd, target in now.items() if before.get(fd) != target]


def _descriptors() -> Iterator[tuple[int, str]]:
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, such as the one that reads the directory
            yield int(fd), os.readlink(f"/proc/self/fd/{fd}")


def _mapped_segments() -> Iterator[tuple[int, str]]:
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        if any(name in line for name in _SEGMENTS):
            yield int(line.partition("-")[0], 16), line.split(maxsplit=5)[5]


def _descendants() -> Iterator[tuple[tuple[int, int], str]]:
    """Pid, start time and command line of each descendant, but not of those below a raylet."""
    children: dict[int, list[Stat]] = {}
    for process in everyone():
        children.setdefault(process.parent, []).append(process)
    found = list(children.get(os.getpid(), ()))
    while found:
        process = found.pop()
        yield (process.pid, process.start), _command(process)
        if process.name != "raylet":
            found += children.get(process.pid, ())


def _command(process: Stat) -> str:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{process.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        if words:
            return words
    return f"[{process.name}] (a zombie: it has ended, but nothing has waited for it)"


class _Zygote(NamedTuple):
    pid: int = 0
    descriptors: frozenset[int] = frozenset()


def _zygote() -> _Zygote:
    """The long-lived zygote, with the descriptors that this process holds for it; pid 0 if there is none."""
    zygote = None
    if "bandmaster.backends.local" in sys.modules:
        zygote = cast("LocalBackend", get_backend("local")).lasting_zygote
    if zygote is None or not zygote.is_ours:
        return _Zygote()
    watched = f"Pid:\t{zygote.pid}\n"
    descriptors = {fd for fd, target in _descriptors() if "[pidfd]" in target and watched in _information(fd)}
    return _Zygote(zygote.pid, frozenset({*descriptors, zygote.control.fileno()}))


def _information(fd: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/self/fdinfo/{fd}").read_text()
    return ""


def _placements() -> Iterator[tuple[str, str]]:
    """Id and description of each placement group that is not removed."""
    if is_connected_to_ray():
        for group in sys.modules["ray"].util.placement_group_table().values():
            if group["state"] != "REMOVED":
                key = group["placement_group_id"]
                yield key, f"{group['name'] or 'unnamed'} {key}, {group['state']}, {len(group['bundles'])} slots"
