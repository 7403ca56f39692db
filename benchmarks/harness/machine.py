"""The machine that figures were taken on."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def facts() -> dict[str, str]:
    """Processor, cores, memory, kernel and load."""
    gib = _meminfo("MemTotal") / (1 << 30)
    load = os.getloadavg()
    return {
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{gib:.0f} GiB",
        "kernel": f"{platform.system()} {platform.release().split('-')[0]}",
        "huge pages": _huge_pages(),
        "load when started": f"{load[0]:.1f}",
    }


def available_nbytes() -> int:
    """Memory that could be had without swapping."""
    return _meminfo("MemAvailable")


def shared_nbytes() -> int:
    """Shared memory and files in memory of all processes, mapped or not."""
    return _meminfo("Shmem")


def _meminfo(key: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise KeyError(key)


def _processor() -> str:
    names = [line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


def _huge_pages() -> str:
    try:
        words = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return "unknown"
    return words.partition("[")[2].partition("]")[0]
