"""What this machine has. The one place that asks the driver."""

from __future__ import annotations

import os
from itertools import takewhile
from pathlib import Path

__all__ = ["count_gpus", "visible_devices"]

_DRIVER = Path("/proc/driver/nvidia/gpus")


def count_gpus() -> int:
    """NVIDIA GPUs that this process may use."""
    return len(visible_devices())


def visible_devices() -> list[str]:
    """What ``CUDA_VISIBLE_DEVICES`` calls each GPU that this process may use: all, or those that it lists already.

    As CUDA does, it reads that list up to the first number that no GPU has.
    """
    n_gpus = _count_physical()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(number) for number in range(n_gpus)]
    named = [device.strip() for device in visible.split(",") if device.strip()]
    return list(takewhile(lambda device: not device.isdigit() or int(device) < n_gpus, named))[:n_gpus]


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
