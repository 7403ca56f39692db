"""What this machine has. The one place that asks the driver."""

from __future__ import annotations

import os
from itertools import takewhile
from pathlib import Path

from bandmaster.platform.cgroups import Cgroups

__all__ = ["count_cores", "count_gpus", "visible_devices"]

_DRIVER = Path("/proc/driver/nvidia/gpus")


def count_cores() -> int:
    """Cores that this process may keep busy: those that it may run on, or what its control groups' quota comes to."""
    n_cores = len(os.sched_getaffinity(0))
    quota = Cgroups().cpu_quota()
    return n_cores if quota is None else max(1, min(n_cores, int(quota)))


def count_gpus() -> int:
    """NVIDIA GPUs that this process may use."""
    return len(visible_devices())


def visible_devices() -> list[str]:
    """What ``CUDA_VISIBLE_DEVICES`` calls each GPU that this process may use: all, or those that it lists already.

    As CUDA does, it reads that list up to the first number that no GPU has, such as -1.
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
    """By NVML, which knows what a container may see; without it, by what the driver shows."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # not installed, or no driver: NVML has an exception class for each reason
        return len(list(_DRIVER.iterdir())) if _DRIVER.is_dir() else 0
    try:
        return int(pynvml.nvmlDeviceGetCount())
    finally:
        pynvml.nvmlShutdown()
