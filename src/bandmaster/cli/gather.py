"""Gathers the `Facts` about this machine, without importing torch or Ray."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from bandmaster.cli.facts import Cores, Facts, Gpus, Kernel, Memory, Software
from bandmaster.platform.cgroups import Cgroups, Limit
from bandmaster.platform.hardware import visible_devices
from bandmaster.platform.limits import process_limit
from bandmaster.platform.math_threads import THREAD_VARIABLES

PACKAGES = ("bandmaster", "numpy", "cloudpickle", "torch", "ray")

_DRIVER = Path("/proc/driver/nvidia")
_DRIVER_VERSION = re.compile(r"\b\d{3}\.\d[\d.]*")
_TORCH_CUDA = re.compile(r"^cuda\b[^=]*= *'([\d.]+)'", re.MULTILINE)


def gather() -> Facts:
    """Return the facts about this machine, as seen by this process."""
    return Facts(_software(), _cores(), _memory(), _gpus(), _kernel())


def _software() -> Software:
    cuda = None
    with contextlib.suppress(importlib.metadata.PackageNotFoundError, OSError):
        source = Path(str(importlib.metadata.distribution("torch").locate_file("torch/version.py")))
        cuda = _TORCH_CUDA.search(source.read_text())
    return Software(platform.python_version(), {name: _version_of(name) for name in PACKAGES}, cuda[1] if cuda else "")


def _version_of(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _cores() -> Cores:
    variables = {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ}
    return Cores(os.cpu_count() or 1, len(os.sched_getaffinity(0)), Cgroups().cpu_quota(), variables)


def _memory() -> Memory:
    lines = (line.partition(":") for line in Path("/proc/meminfo").read_text().splitlines())
    amounts = {name: int(amount.split()[0]) << 10 for name, _, amount in lines}
    shm_total = shm_available = 0
    with contextlib.suppress(OSError):
        shm = os.statvfs("/dev/shm")
        shm_total, shm_available = shm.f_frsize * shm.f_blocks, shm.f_frsize * shm.f_bavail
    limit = Cgroups().memory()
    return Memory(amounts["MemTotal"], amounts["MemAvailable"], limit, shm_total, shm_available)


def _gpus() -> Gpus:
    driver = _driver()
    has_nvml = importlib.util.find_spec("pynvml") is not None
    error = _nvml_error() if has_nvml and driver is not None else ""
    return Gpus(tuple(visible_devices()), os.environ.get("CUDA_VISIBLE_DEVICES"), driver, has_nvml, error)


def _driver() -> str | None:
    """Version of NVIDIA's driver, "" if it is unknown, None if there is no driver."""
    with contextlib.suppress(OSError):
        found = _DRIVER_VERSION.search((_DRIVER / "version").read_text())
        return found[0] if found else ""
    return "" if Path("/dev/nvidiactl").exists() else None


def _nvml_error() -> str:
    import pynvml

    try:
        pynvml.nvmlInit()
        pynvml.nvmlShutdown()
    except Exception as error:  # NVML has an exception class for each reason
        return str(error)
    return ""


def _kernel() -> Kernel:
    soft, hard = (_unlimited_is_large(limit) for limit in resource.getrlimit(resource.RLIMIT_NOFILE))
    return Kernel(
        version=platform.release(),
        has_memfd=_works(lambda: os.memfd_create("bandmaster-doctor")),
        has_pidfd=_works(lambda: os.pidfd_open(os.getpid())),
        can_see_workers=_can_see_workers(),
        open_files=Limit(soft, len(os.listdir("/proc/self/fd"))),
        open_files_hard=hard,
        processes=process_limit(),
    )


def _works(open_something: Callable[[], int]) -> bool:
    try:
        os.close(open_something())
    except (AttributeError, OSError):  # Python was built without it, or the kernel or a sandbox refuses
        return False
    return True


def _can_see_workers() -> bool:
    """Whether this process can open another one's descriptor for writing, as `wire.status_page` does."""
    with contextlib.suppress(AttributeError, OSError):
        fd = os.memfd_create("bandmaster-doctor")
        try:
            program = [sys.executable, "-I", "-S", "-c", "input()"]
            with subprocess.Popen(program, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, pass_fds=[fd]) as child:
                path = f"/proc/{child.pid}/fd/{fd}"
                can_see = "bandmaster-doctor" in os.readlink(path) and _works(lambda: os.open(path, os.O_RDWR))
                child.kill()
                return can_see
        finally:
            os.close(fd)
    return False


def _unlimited_is_large(limit: int) -> int:
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit
