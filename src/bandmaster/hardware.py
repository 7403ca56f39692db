"""What this machine has. The one place that asks the driver."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["count_gpus"]

_DRIVER = Path("/proc/driver/nvidia/gpus")


def count_gpus() -> int:
    """NVIDIA GPUs that this process may use: those of the driver, or fewer by ``CUDA_VISIBLE_DEVICES``."""
    n_gpus = len(list(_DRIVER.iterdir())) if _DRIVER.is_dir() else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return n_gpus
    return min(n_gpus, len([device for device in visible.split(",") if device.strip()]))
