"""What the control groups of this process allow it, under version 1 and 2 of Linux's interface.

A limit holds for all groups below the one that has it, so the least one on the way to the root counts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Cgroups", "Limit"]

_MEMORY = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
_PROCESSES = (("pids.max", "pids.current"),)
_NO_LIMIT = 1 << 60  # version 1 says a number near this where there is none


@dataclass(frozen=True)
class Limit:
    """The most that may be used, and how much of it is."""

    most: int
    used: int

    @property
    def left(self) -> int:
        """What may still be taken."""
        return max(0, self.most - self.used)


class Cgroups:
    """Those of this process.

    Args:
        root: Where the hierarchies are mounted.
        membership: The kernel's list of the groups that the process is in.
    """

    def __init__(self, root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> None:
        self._root, self._membership = root, membership

    def memory(self) -> Limit | None:
        """Bytes, without those of files that the kernel would drop; None if there is no limit."""
        limits = [
            Limit(limit.most, limit.used - _inactive_files(directory))
            for directory, limit in self._limits("memory", _MEMORY)
        ]
        return min(limits, key=lambda limit: limit.left, default=None)

    def processes(self) -> Limit | None:
        """Processes and threads; None if there is no limit."""
        limits = [limit for _, limit in self._limits("pids", _PROCESSES)]
        return min(limits, key=lambda limit: limit.left, default=None)

    def cpu_quota(self) -> float | None:
        """CPUs that may be used on average; None if there is no quota."""
        return min(self._quotas(), default=None)

    def directory(self, controller: str) -> Path:
        """The group itself that rules ``controller``."""
        return next(self._directories(controller), self._root)

    def _limits(self, controller: str, files: tuple[tuple[str, str], ...]) -> Iterator[tuple[Path, Limit]]:
        for directory in self._directories(controller):
            for most, used in files:
                with contextlib.suppress(OSError, ValueError):  # "max" is no number
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
        """The groups that rule ``controller``, from this process's own to the root of their hierarchy.

        In a container the kernel may name them as its host does: then what of the path is not there is passed over.
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
