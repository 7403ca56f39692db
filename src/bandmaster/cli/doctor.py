"""``bandmaster doctor``: what this machine offers, what is wrong with it, and whether a worker can be started."""

from __future__ import annotations

import importlib.util
import os
import socket
import time
from collections.abc import Iterator
from itertools import pairwise

from bandmaster.cli.facts import Cores, Facts, Gpus, Kernel, Memory
from bandmaster.cli.findings import Finding, gib, judge
from bandmaster.cli.gather import gather
from bandmaster.errors import BandmasterError
from bandmaster.group import WorkerGroup
from bandmaster.plan.render import text_table
from bandmaster.plan.transfer import Dispatch
from bandmaster.pool import ResourcePool
from bandmaster.registration import register
from bandmaster.worker import Worker

__all__ = ["doctor"]

ANSWER_WITHIN_S = 60.0


def doctor(ray_address: str | None, is_quick: bool) -> int:
    """Look, judge, try.

    Args:
        ray_address: A cluster to look at too, ``"auto"`` for the one that a pool would join, None for none.
        is_quick: Whether no worker is started.

    Returns:
        0, or 1 if something is wrong.
    """
    facts = gather()
    print(text_table(f"{socket.gethostname()}, as this process sees it", ["what", "found"], list(_rows(facts))))
    findings = judge(facts, uses_ray=ray_address is not None)
    if ray_address is not None:
        findings += _look_at_ray(ray_address)
    print()
    if findings:
        print(*findings, sep="\n", end="\n\n")
    if not is_quick:
        findings += _try_a_worker()
    n_wrong = sum(finding.is_wrong for finding in findings)
    print(f"{n_wrong} wrong" if n_wrong else "nothing is wrong")
    return 1 if n_wrong else 0


def _rows(facts: Facts) -> Iterator[tuple[str, str]]:
    """What was found, a line each."""
    packages = facts.software.packages
    yield "python", facts.software.python
    yield from ((name, version or "not installed") for name, version in packages.items())
    if packages.get("torch"):
        yield "torch's CUDA", facts.software.torch_cuda or "none"
    yield "GPUs", _gpus(facts.gpus)
    if facts.gpus.variable is not None:
        yield "CUDA_VISIBLE_DEVICES", repr(facts.gpus.variable)
    yield "cores", _cores(facts.cores)
    yield from facts.cores.thread_variables.items()
    yield "memory", _memory(facts.memory)
    shm = f"{gib(facts.memory.shm_available)} of {gib(facts.memory.shm_total)} free"
    yield "/dev/shm", f"{shm}; Ray's object store lies there, nothing of backend local"
    yield "Linux", _kernel(facts.kernel)
    files, hard = facts.kernel.open_files.most, facts.kernel.open_files_hard
    raised = f", up to {hard} when raised" if hard > files else ""
    yield "open files", f"{files}{raised}: enough for {facts.kernel.local_workers} local workers"
    processes = facts.kernel.processes
    yield "processes", f"{processes.left} of {processes.most} left" if processes else "no limit"


def _gpus(gpus: Gpus) -> str:
    if gpus.driver is None:
        return f"{len(gpus.visible)}, no NVIDIA driver"
    nvml = "NVML works" if gpus.has_nvml and not gpus.nvml_error else "without NVML"
    return f"{len(gpus.visible)}, driver {gpus.driver or 'of unknown version'}, {nvml}"


def _cores(cores: Cores) -> str:
    quota = "" if cores.quota is None else f", together as much time as {cores.quota:g} have (cgroup)"
    return f"{cores.allowed} of {cores.on_machine}{quota}"


def _memory(memory: Memory) -> str:
    limit = "" if memory.limit is None else f", {gib(memory.limit.left)} of {gib(memory.limit.most)} in its cgroup"
    return f"{gib(memory.available)} of {gib(memory.total)} available{limit}"


def _kernel(kernel: Kernel) -> str:
    tried = {
        "memfd_create": kernel.has_memfd,
        "pidfd_open": kernel.has_pidfd,
        "/proc/<pid>/fd of others": kernel.can_see_workers,
    }
    return f"{kernel.version}; " + ", ".join(f"{name} {'works' if works else 'fails'}" for name, works in tried.items())


def _look_at_ray(address: str) -> list[Finding]:
    """Print the nodes of a cluster; what is wrong with it."""
    if importlib.util.find_spec("ray") is None:
        return [Finding("Ray is not installed", "pip install 'bandmaster[ray]'")]
    from bandmaster.cli.ray import NotThere, nodes_of

    try:
        nodes = nodes_of(address)
    except NotThere as error:
        return [Finding(str(error), "ray start --head, or give the address of a cluster that runs: --ray HOST:PORT")]
    rows = [
        [node.name, _of(node.cpus_free, node.cpus_total), _of(node.gpus_free, node.gpus_total), ", ".join(node.holders)]
        for node in nodes
    ]
    print()
    print(text_table("the Ray cluster", ["node", "free CPUs", "free GPUs", "held by"], rows))
    return []


def _of(free: float | None, total: float | None) -> str:
    return "not counted" if free is None or total is None else f"{free:g} of {total:g}"


class Probe(Worker):
    """Says who it is."""

    @register(Dispatch.ONE_TO_ALL)
    def pid(self) -> int:
        """Of its process."""
        return os.getpid()


def _try_a_worker() -> list[Finding]:
    """Start a local worker, call it, close it, and print how long that took; what went wrong, if anything."""
    times = [time.perf_counter()]
    try:
        with ResourcePool([1], backend="local", name_prefix="doctor") as pool:
            group = WorkerGroup(pool, Probe)
            times.append(time.perf_counter())
            group.pid.submit().result(timeout=ANSWER_WITHIN_S)
            times.append(time.perf_counter())
        times.append(time.perf_counter())
    except (BandmasterError, OSError) as error:
        finding = Finding(
            f"a local worker cannot be started and called: {error}",
            "mend first what is wrong above; if nothing is, this message says what to do or where it fails",
        )
        print(finding)
        return [finding]
    started, answered, closed = (1e3 * (after - before) for before, after in pairwise(times))
    print(f"a local worker: started in {started:.0f} ms, answered in {answered:.2f} ms, closed in {closed:.0f} ms")
    return []
