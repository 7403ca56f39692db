"""Facts about a machine, as plain values: `gather` collects them, `findings` judges them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bandmaster.platform.cgroups import Limit

DESCRIPTORS_PER_WORKER = 3  # open in the controller for each local worker: its lane, its standard output and error


@dataclass(frozen=True)
class Software:
    """Installed software.

    Attributes:
        python: Version of Python.
        packages: Version of each package, by name; None if it is not installed.
        torch_cuda: CUDA version that torch was built with, "" for none.
    """

    python: str
    packages: Mapping[str, str | None]
    torch_cuda: str


@dataclass(frozen=True)
class Cores:
    """Logical CPUs.

    Attributes:
        on_machine: Number of CPUs of the machine.
        allowed: Number of CPUs in this process's affinity mask.
        quota: CPUs that the cgroup may use on average; None for no limit.
        thread_variables: Environment variables that set the number of threads of numerical libraries.
    """

    on_machine: int
    allowed: int
    quota: float | None
    thread_variables: Mapping[str, str]

    @property
    def usable(self) -> float:
        """Number of CPUs that this process can keep busy."""
        return self.allowed if self.quota is None else min(self.allowed, self.quota)


@dataclass(frozen=True)
class Memory:
    """Memory, in bytes.

    Attributes:
        total: Memory of the machine.
        available: Memory that the machine can allocate without swapping.
        limit: Limit of this process's cgroup; None for no limit.
        shm_total: Size of ``/dev/shm``.
        shm_available: Free space in ``/dev/shm``.
    """

    total: int
    available: int
    limit: Limit | None
    shm_total: int
    shm_available: int

    @property
    def usable(self) -> int:
        """Most memory that this process could use on an idle machine, in bytes."""
        return self.total if self.limit is None else min(self.total, self.limit.most)

    @property
    def left(self) -> int:
        """Memory that this process can still allocate, in bytes."""
        return self.available if self.limit is None else min(self.available, self.limit.left)


@dataclass(frozen=True)
class Gpus:
    """NVIDIA GPUs.

    Attributes:
        visible: The GPUs that this process may use, by their names in ``CUDA_VISIBLE_DEVICES``.
        variable: Value of ``CUDA_VISIBLE_DEVICES``, None if it is not set.
        driver: Version of the driver, "" if it is unknown, None if there is no driver.
        has_nvml: Whether NVML's Python module is installed.
        nvml_error: Why NVML does not work; "" if it works or was not tried.
    """

    visible: tuple[str, ...]
    variable: str | None
    driver: str | None
    has_nvml: bool
    nvml_error: str


@dataclass(frozen=True)
class Kernel:
    """Features and limits of the kernel for this process.

    Attributes:
        version: Version of Linux.
        has_memfd: Whether ``memfd_create`` (anonymous shared memory) works.
        has_pidfd: Whether ``pidfd_open`` (waiting for a process that is not a child) works.
        can_see_workers: Whether this process can open descriptors of the user's other processes in /proc.
        open_files: Soft limit of descriptors, and the number that this process has open.
        open_files_hard: Hard limit of descriptors.
        processes: Limit of processes and threads; None if there is no limit.
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
        """Number of local workers for which the descriptors suffice."""
        return self.open_files.left // DESCRIPTORS_PER_WORKER


@dataclass(frozen=True)
class Facts:
    """The facts about a machine that `doctor` judges, as seen by this process."""

    software: Software
    cores: Cores
    memory: Memory
    gpus: Gpus
    kernel: Kernel
