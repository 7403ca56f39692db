"""Judges `Facts`: finds the problems of a machine and their fixes, in pure functions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bandmaster.cli.facts import DESCRIPTORS_PER_WORKER, Cores, Facts, Gpus, Kernel, Memory, Software

ENOUGH_WORKERS = 128  # local workers for which the descriptors should suffice
ENOUGH_DESCRIPTORS = 4096
ENOUGH_PROCESSES = 256
LITTLE_MEMORY = 1 << 30  # a process that has imported torch takes a quarter of it
RAY_SHM_SHARE, RAY_SHM_MOST = 0.3, 10 * 10**9  # of memory, and bytes, that Ray's object store wants in /dev/shm
OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}  # oldest drivers for programs built with any CUDA version of that major
# Source: NVIDIA, CUDA Compatibility, minor version compatibility.


@dataclass(frozen=True)
class Finding:
    """A problem with the machine, or a note about it.

    Attributes:
        what: The problem, in one line.
        fix: What to do about it, in one line.
        is_wrong: Whether something will fail or be slow; False for a note about a setting that may be intended.
    """

    what: str
    fix: str
    is_wrong: bool = True

    def __str__(self) -> str:
        kind, advice = ("problem", "fix") if self.is_wrong else ("note", "to change it")
        return f"{kind}: {self.what}\n  {advice}: {self.fix}"


def judge(facts: Facts, uses_ray: bool = False) -> list[Finding]:
    """Return the findings about a machine, problems before notes.

    Args:
        facts: The facts about the machine.
        uses_ray: Whether Ray will be used; a small ``/dev/shm`` is a problem only then.
    """
    found = [
        *_kernel(facts.kernel),
        *_cores(facts.cores),
        *_memory(facts.memory),
        *_shm(facts.memory, facts.software, uses_ray),
        *_gpus(facts.gpus),
        *_torch(facts.software, facts.gpus),
    ]
    return sorted(found, key=lambda finding: not finding.is_wrong)


def _kernel(kernel: Kernel) -> Iterator[Finding]:
    for has, what in ((kernel.has_memfd, "memfd_create"), (kernel.has_pidfd, "pidfd_open")):
        if not has:
            yield Finding(
                f"{what} does not work on this Linux ({kernel.version}), but local workers need it",
                "use Linux 5.3 or newer, outside sandboxes that block the system call, or backend='ray'",
            )
    if not kernel.can_see_workers:
        yield Finding(
            "descriptors of other processes cannot be opened in /proc, so stacks of hanging workers, ps and kill fail",
            "mount /proc, and let processes of one user trace each other (docker run --cap-add=SYS_PTRACE)",
        )
    if kernel.local_workers < ENOUGH_WORKERS:
        yield Finding(
            f"a process may have {kernel.open_files.most} open files, enough for {kernel.local_workers} local workers",
            f"ulimit -n {min(ENOUGH_DESCRIPTORS, kernel.open_files_hard)}"
            if kernel.open_files_hard >= ENOUGH_WORKERS * DESCRIPTORS_PER_WORKER + kernel.open_files.used
            else f"raise the hard limit of {kernel.open_files_hard} (limits.conf, docker run --ulimit nofile=4096)",
        )
    if kernel.processes is not None and kernel.processes.left < ENOUGH_PROCESSES:
        yield Finding(
            f"there is room for {kernel.processes.left} more processes and threads of {kernel.processes.most}",
            "raise the limit: ulimit -u, docker run --pids-limit, or pids.max of the cgroup",
        )


def _cores(cores: Cores) -> Iterator[Finding]:
    for name, value in cores.thread_variables.items():
        first = value.split(",")[0].strip()
        if not first.isdecimal() or first == "0":
            yield Finding(f"{name}={value!r} is not a number of threads", f"unset {name}")
        elif int(first) > cores.usable:
            yield Finding(
                f"{name}={value}: every worker starts that many threads, on {cores.usable:g} cores",
                f"unset {name}: each worker then gets its share of the cores",
            )
    if cores.usable <= cores.allowed / 2 and "OMP_NUM_THREADS" not in cores.thread_variables:
        yield Finding(
            f"the cgroup may use {cores.usable:g} CPUs of the {cores.allowed} for which libraries in this process "
            "start threads",
            f"export OMP_NUM_THREADS={max(1, int(cores.usable))}, or less: workers use this value instead of a share "
            "of the cores",
        )


def _memory(memory: Memory) -> Iterator[Finding]:
    if memory.left < LITTLE_MEMORY:
        yield Finding(
            f"{gib(memory.left)} of {gib(memory.usable)} of memory is free",
            "end processes that use it; `bandmaster ps` shows the memory of your workers",
        )
    if memory.usable < memory.total / 2:
        yield Finding(
            f"the cgroup may use {gib(memory.usable)} of the machine's {gib(memory.total)} of memory",
            "raise the limit: docker run --memory, Kubernetes limits.memory, or systemd MemoryMax",
            is_wrong=False,
        )


def _shm(memory: Memory, software: Software, uses_ray: bool) -> Iterator[Finding]:
    wanted = min(RAY_SHM_SHARE * memory.usable, RAY_SHM_MOST)
    if software.packages.get("ray") and memory.shm_available < wanted:
        yield Finding(
            f"/dev/shm has {gib(memory.shm_available)} free; Ray's object store is slow with less than {gib(wanted)}",
            f"docker run --shm-size={-(-int(wanted) >> 30)}g, or mount -o remount,size=... /dev/shm",
            is_wrong=uses_ray,
        )


def _gpus(gpus: Gpus) -> Iterator[Finding]:
    if gpus.driver is None:
        return
    if not gpus.has_nvml:
        yield Finding(
            "there is an NVIDIA driver, but NVML is not installed, so the GPUs that a container may use are unknown",
            "pip install 'bandmaster[gpu]'",
        )
    if gpus.nvml_error:
        yield Finding(
            f"NVML does not work: {gpus.nvml_error}",
            "restart the machine if the driver was updated; in a container, run it with --gpus all",
        )
    if gpus.variable is None:
        return
    named = [device.strip() for device in gpus.variable.split(",") if device.strip()]
    if not named or named[0].startswith("-"):
        yield Finding(f"CUDA_VISIBLE_DEVICES={gpus.variable!r} hides all GPUs", "unset CUDA_VISIBLE_DEVICES", False)
    elif len(gpus.visible) < len(named):
        missing = named[len(gpus.visible)]
        yield Finding(
            f"CUDA_VISIBLE_DEVICES={gpus.variable} names {missing!r}, which does not exist: "
            f"only {len(gpus.visible)} are used",
            "unset CUDA_VISIBLE_DEVICES, or name GPUs that `nvidia-smi -L` lists",
        )


def _torch(software: Software, gpus: Gpus) -> Iterator[Finding]:
    version = software.packages.get("torch")
    if not version or gpus.driver is None:
        return
    if not software.torch_cuda:
        yield Finding(
            f"torch {version} is built without CUDA, on a machine with an NVIDIA driver",
            "install a build with CUDA: https://pytorch.org/get-started/locally",
        )
        return
    oldest = OLDEST_DRIVERS.get(int(software.torch_cuda.split(".")[0]), 0)
    if gpus.driver and int(gpus.driver.split(".")[0]) < oldest:
        yield Finding(
            f"torch {version} is built with CUDA {software.torch_cuda}, which needs driver {oldest} or newer, "
            f"not {gpus.driver}",
            "update the driver, or install torch built with an older CUDA: https://pytorch.org/get-started/locally",
        )


def gib(nbytes: float) -> str:
    """Format a number of bytes in GiB."""
    return f"{nbytes / (1 << 30):.1f} GiB"
