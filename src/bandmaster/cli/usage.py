"""Samples the activity and resource use of the ranks of the user's groups, as plain values for `bandmaster top`.

::

    discovery ──► groups ──► status pages, /proc, NVML ──► Moment ──► top_view ──► text
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from bandmaster.cli.discovery import Discovered, Group, Process, discover
from bandmaster.platform.proc import stat
from bandmaster.wire.segment_reader import held_nbytes
from bandmaster.wire.status_page import Activity, in_debuggers


@dataclass(frozen=True)
class RankUsage:
    """One rank at one moment.

    Attributes:
        rank: The rank.
        pid: Its process.
        activity: The method that it runs; None if the worker has no activity page, as in other versions of bandmaster.
        rss_nbytes: Resident memory in bytes.
        cpu_percent: Processor time per time since the previous moment, 100 for one core; None for the first one.
        held_nbytes: Bytes of rows that it has made and its controller holds.
        device: The GPUs that the process uses and its memory on them; "" if it uses none, or NVML is not installed.
        is_in_debugger: Whether it waits at a ``breakpoint()``, or a terminal is attached to it.
    """

    rank: int
    pid: int
    activity: Activity | None
    rss_nbytes: int
    cpu_percent: float | None = None
    held_nbytes: int = 0
    device: str = ""
    is_in_debugger: bool = False


@dataclass(frozen=True)
class GroupUsage:
    """One group at one moment.

    Attributes:
        name: ``name``, or ``name@controller`` if groups of several controllers have the same name.
        world_size: Number of its ranks on all hosts.
        ranks: The ranks on this machine, in rank order.
        note: A remark that the table adds to its name: that its controller has ended, or that it is detached.
    """

    name: str
    world_size: int
    ranks: tuple[RankUsage, ...]
    note: str = ""


@dataclass(frozen=True)
class Moment:
    """All groups of this user on this machine, or only those of one controller, at one moment, sorted by name."""

    groups: tuple[GroupUsage, ...] = ()
    controller: int | None = None


@dataclass
class Sampler:
    """Takes moments one after the other; processor times are relative to the previous moment.

    Attributes:
        controller: Pid of the only controller whose groups are sampled; None for all.
    """

    controller: int | None = None
    _ticks: dict[tuple[int, float], int] = field(default_factory=dict)
    _at: float = 0.0

    def sample(self) -> Moment:
        """Read the present activity and resource use of the ranks."""
        discovered, now = discover(self.controller), time.monotonic()
        before, self._ticks = self._ticks, {}
        elapsed_s, self._at = now - self._at, now
        on_devices = _on_devices()
        debugged = in_debuggers(process.pid for group in discovered.groups for _, process in group.workers)
        groups = []
        for group in discovered.groups:
            held = held_nbytes(group.controller) if group.controller else {}
            ranks = [
                RankUsage(
                    identity.rank,
                    process.pid,
                    Activity.of(process.pid),
                    process.rss_nbytes,
                    self._cpu_percent(process, before, elapsed_s),
                    held.get(process.pid, 0),
                    on_devices.get(process.pid, ""),
                    process.pid in debugged,
                )
                for identity, process in group.workers
            ]
            note = "controller gone" if group.is_orphan else "detached" if group.is_detached else ""
            groups.append(GroupUsage(_name(group, discovered), group.world_size, tuple(ranks), note))
        return Moment(tuple(groups), self.controller)

    def _cpu_percent(self, process: Process, before: Mapping[tuple[int, float], int], elapsed_s: float) -> float | None:
        """Processor time of a process since the previous sample; None if that sample did not contain it."""
        key, found = (process.pid, process.started_s), stat(process.pid)
        if found is None:
            return None
        self._ticks[key] = found.ticks
        return 100 * (found.ticks - before[key]) / os.sysconf("SC_CLK_TCK") / elapsed_s if key in before else None


def _name(group: Group, discovered: Discovered) -> str:
    same = [other for other in discovered.groups if other.name == group.name]
    return group.full_name if len(same) > 1 else group.name


def _on_devices() -> Mapping[int, str]:
    """The GPUs of each process that uses one, with its memory there and the GPU's load; empty without NVML."""
    if importlib.util.find_spec("pynvml") is None:
        return {}
    import pynvml

    found: dict[int, list[str]] = {}
    with contextlib.suppress(Exception):  # NVML has an exception class for each reason
        pynvml.nvmlInit()
        try:
            for number in range(pynvml.nvmlDeviceGetCount()):
                device = pynvml.nvmlDeviceGetHandleByIndex(number)
                load = pynvml.nvmlDeviceGetUtilizationRates(device).gpu
                for process in pynvml.nvmlDeviceGetComputeRunningProcesses(device):
                    memory = f" {process.usedGpuMemory / (1 << 30):.1f} GiB" if process.usedGpuMemory else ""
                    found.setdefault(process.pid, []).append(f"GPU {number} {load}%{memory}")
        finally:
            pynvml.nvmlShutdown()
    return {pid: ", ".join(devices) for pid, devices in found.items()}
