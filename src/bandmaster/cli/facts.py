"""What a machine offers to workers, as plain values: gathered by `gather`, judged by `findings`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bandmaster.platform.cgroups import Limit

__all__ = ["DESCRIPTORS_PER_WORKER", "Cores", "Facts", "Gpus", "Kernel", "Memory", "Software"]

DESCRIPTORS_PER_WORKER = 3  # of the controller, for a local worker: its lane, its standard output and error


@dataclass(frozen=True)
class Software:
    """What is installed.

    Attributes:
        python: Its version.
        packages: Versions by name; None for what is not installed.
        torch_cuda: The CUDA that torch was built with, "" for none.
    """

    python: str
    packages: Mapping[str, str | None]
    torch_cuda: str


@dataclass(frozen=True)
class Cores:
    """Logical CPUs.

    Attributes:
        on_machine: All of them.
        allowed: Those that the scheduler may put this process on.
        quota: How many of them its cgroup may use on average, None for all.
        thread_variables: What the environment says about threads of numerical libraries.
    """

    on_machine: int
    allowed: int
    quota: float | None
    thread_variables: Mapping[str, str]

    @property
    def usable(self) -> float:
        """How many can be busy at once."""
        return self.allowed if self.quota is None else min(self.allowed, self.quota)


@dataclass(frozen=True)
class Memory:
    """Bytes.

    Attributes:
        total: What the machine has.
        available: What it can give without swapping.
        limit: What the cgroup of this process may have, None for all.
        shm_total: Size of ``/dev/shm``.
        shm_available: What is free there.
    """

    total: int
    available: int
    limit: Limit | None
    shm_total: int
    shm_available: int

    @property
    def usable(self) -> int:
        """What this process may have, if nobody else needed any."""
        return self.total if self.limit is None else min(self.total, self.limit.most)

    @property
    def left(self) -> int:
        """What it can still take."""
        return self.available if self.limit is None else min(self.available, self.limit.left)


@dataclass(frozen=True)
class Gpus:
    """NVIDIA GPUs.

    Attributes:
        visible: What ``CUDA_VISIBLE_DEVICES`` calls those that this process may use.
        variable: That variable, None if it is not set.
        driver: Version of the driver, "" if it is not known, None if there is no driver.
        has_nvml: Whether NVML's Python module is installed.
        nvml_error: Why NVML does not work, "" if it does, or was not tried.
    """

    visible: tuple[str, ...]
    variable: str | None
    driver: str | None
    has_nvml: bool
    nvml_error: str


@dataclass(frozen=True)
class Kernel:
    """What Linux lets this process do.

    Attributes:
        version: Of Linux.
        has_memfd: Whether memory without a name can be had.
        has_pidfd: Whether a process can be waited for that is no child.
        can_see_workers: Whether descriptors of other processes of this user can be opened.
        open_files: Descriptors: the soft limit, and how many this process has.
        open_files_hard: What the soft limit can be raised to.
        processes: Processes and threads; None if there is no limit.
    """

    version: str
    has_memfd: bool
    has_pidfd: bool
    can_see_workers: bool
    open_files: Limit
    open_files_hard: int
    processes: Limit | None

    @property
    def local_workers(self) -> int:
        """How many workers the descriptors are enough for."""
        return self.open_files.left // DESCRIPTORS_PER_WORKER


@dataclass(frozen=True)
class Facts:
    """A machine, as a process on it sees it."""

    software: Software
    cores: Cores
    memory: Memory
    gpus: Gpus
    kernel: Kernel
