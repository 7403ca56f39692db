"""The limits that the control groups of this process set on memory, processes and CPUs, for cgroup v1 and v2.

A limit applies to all groups below the one that sets it. The tightest one between this process's own group and the
root of the hierarchy is therefore the effective one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MEMORY = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
_PROCESSES = (("pids.max", "pids.current"),)
_NO_LIMIT = 1 << 60  # version 1 reports a number above this where no limit is set


@dataclass(frozen=True)
class Limit:
    """A limit and its current usage.

    Attributes:
        most: The limit, in bytes or in processes and threads.
        used: The current usage, in the same unit.
    """

    most: int
    used: int

    @property
    def left(self) -> int:
        """The unused part of the limit; 0 if the usage exceeds the limit."""
        return max(0, self.most - self.used)


class Cgroups:
    """Reads the limits of a process's control groups; by default those of this process.

    Args:
        root: Directory where the cgroup hierarchies are mounted.
        membership: File in which the kernel lists the groups of the process.
    """

    def __init__(self, root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> None:
        self._root, self._membership = root, membership

    def memory(self) -> Limit | None:
        """The memory limit in bytes; its usage excludes file pages that the kernel can drop. None without a limit."""
        limits = [
            Limit(limit.most, limit.used - _inactive_files(directory))
            for directory, limit in self._limits("memory", _MEMORY)
        ]
        return min(limits, key=lambda limit: limit.left, default=None)

    def processes(self) -> Limit | None:
        """The limit on the number of processes and threads; None if there is no limit."""
        limits = [limit for _, limit in self._limits("pids", _PROCESSES)]
        return min(limits, key=lambda limit: limit.left, default=None)

    def cpu_quota(self) -> float | None:
        """Number of CPUs that the process may use on average; None if there is no quota."""
        return min(self._quotas(), default=None)

    def directory(self, controller: str) -> Path:
        """Directory of the process's own group that limits ``controller``; the root if there is none."""
        return next(self._directories(controller), self._root)

    def _limits(self, controller: str, files: tuple[tuple[str, str], ...]) -> Iterator[tuple[Path, Limit]]:
        for directory in self._directories(controller):
            for most, used in files:
                with contextlib.suppress(OSError, ValueError):  # "max" stands for no limit
                    limit = Limit(int((directory / most).read_text()), int((directory / used).read_text()))
                    if limit.most < _NO_LIMIT:
                        yield directory, limit

    def _quotas(self) -> Iterator[float]:
        for directory in self._directories("cpu"):
            with contextlib.suppress(OSError, ValueError):
                quota, period = (directory / "cpu.max").read_text().split()
                yield int(quota) / int(period)
            with contextlib.suppress(OSError, ValueError):
                quota = (directory / "cpu.cfs_quota_us").read_text()
                if int(quota) > 0:
                    yield int(quota) / int((directory / "cpu.cfs_period_us").read_text())

    def _directories(self, controller: str) -> Iterator[Path]:
        """Directories of the groups that limit ``controller``, from the process's own to the root of the hierarchy.

        In a container the kernel may report paths as the host sees them, so callers skip directories that do not exist.
        """
        with contextlib.suppress(OSError):
            for line in self._membership.read_text().splitlines():
                _, controllers, path = line.split(":", 2)
                if controllers in ("", controller) or controller in controllers.split(","):
                    mounted = self._root / (controller if controllers else "")
                    group = mounted / path.lstrip("/")
                    yield from (parent for parent in (group, *group.parents) if parent.is_relative_to(mounted))


def _inactive_files(directory: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        counts = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
        return int(counts.get("total_inactive_file", counts.get("inactive_file", 0)))
    return 0
