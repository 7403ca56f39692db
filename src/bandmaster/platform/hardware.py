"""CPU cores and GPUs of this machine. No other module queries the GPU driver."""

from __future__ import annotations

import os
from itertools import takewhile
from pathlib import Path

from bandmaster.platform.cgroups import Cgroups

_DRIVER = Path("/proc/driver/nvidia/gpus")


def count_cores() -> int:
    """Number of cores that this process may keep busy, by its affinity and the quota of its control groups."""
    n_cores = len(os.sched_getaffinity(0))
    quota = Cgroups().cpu_quota()
    return n_cores if quota is None else max(1, min(n_cores, int(quota)))


def count_gpus() -> int:
    """Number of NVIDIA GPUs that this process may use."""
    return len(visible_devices())


def has_gpus() -> bool:
    """Whether this machine has NVIDIA GPUs, of which this process may perhaps use none."""
    return _count_physical() > 0


def visible_devices() -> list[str]:
    """The entry of ``CUDA_VISIBLE_DEVICES`` for each GPU that this process may use.

    If the variable is set, these are its own entries; otherwise the numbers of all GPUs. Like CUDA, this function stops
    reading the variable at the first number that no GPU has, such as -1.
    """
    n_gpus = _count_physical()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(number) for number in range(n_gpus)]
    named = [device.strip() for device in visible.split(",") if device.strip()]
    return list(takewhile(lambda device: not _is_number(device) or 0 <= int(device) < n_gpus, named))[:n_gpus]


def _is_number(device: str) -> bool:
    return device.removeprefix("-").isdigit()


def _count_physical() -> int:
    """Number of GPUs according to NVML, which respects container limits; without NVML, according to /proc."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # not installed, or no driver: NVML has an exception class for each reason
        return len(list(_DRIVER.iterdir())) if _DRIVER.is_dir() else 0
    try:
        return int(pynvml.nvmlDeviceGetCount())
    finally:
        pynvml.nvmlShutdown()
