"""``bandmaster doctor``: shows what this machine offers and its problems, and tests whether a worker starts."""

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
from bandmaster.groups.group import WorkerGroup
from bandmaster.plan.placement import Node
from bandmaster.plan.render import text_table
from bandmaster.plan.transfer import Dispatch
from bandmaster.pool import ResourcePool
from bandmaster.registration import register
from bandmaster.worker import Worker

ANSWER_WITHIN_S = 60.0


def doctor(ray_address: str | None, is_quick: bool) -> int:
    """Print the facts about this machine and the problems with it, and start a worker as a test.

    Args:
        ray_address: Ray cluster to check too; ``"auto"`` for the cluster that a pool would join, None for no cluster.
        is_quick: Whether to skip the test that starts a worker.

    Returns:
        The exit status: 0, or 1 if there is a problem.
    """
    facts = gather()
    print(text_table(f"{socket.gethostname()}, as this process sees it", ["item", "value"], list(_rows(facts))))
    findings = judge(facts, uses_ray=ray_address is not None)
    if ray_address is not None:
        findings += _look_at_ray(ray_address)
    print()
    if findings:
        print(*findings, sep="\n", end="\n\n")
    if not is_quick:
        findings += _try_a_worker()
    n_wrong = sum(finding.is_wrong for finding in findings)
    print(f"{n_wrong} problem{'s' * (n_wrong > 1)} found" if n_wrong else "no problems found")
    return 1 if n_wrong else 0


def _rows(facts: Facts) -> Iterator[tuple[str, str]]:
    """The facts as rows of a table, each with a name and a value."""
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
    yield "/dev/shm", f"{shm}; used by Ray's object store, not by backend local"
    yield "Linux", _kernel(facts.kernel)
    files, hard = facts.kernel.open_files.most, facts.kernel.open_files_hard
    hard_limit = f" (hard limit {hard})" if hard > files else ""
    yield "open files", f"{files}{hard_limit}, enough for {facts.kernel.local_workers} local workers"
    processes = facts.kernel.processes
    yield "processes", f"{processes.left} of {processes.most} left" if processes else "no limit"


def _gpus(gpus: Gpus) -> str:
    if gpus.driver is None:
        return f"{len(gpus.visible)}, no NVIDIA driver"
    nvml = "NVML works" if gpus.has_nvml and not gpus.nvml_error else "without NVML"
    return f"{len(gpus.visible)}, driver {gpus.driver or 'of unknown version'}, {nvml}"


def _cores(cores: Cores) -> str:
    quota = "" if cores.quota is None else f", with a cgroup quota of {cores.quota:g}"
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
    """Print the nodes of a Ray cluster, and return the problems with it."""
    if importlib.util.find_spec("ray") is None:
        return [Finding("Ray is not installed", "pip install 'bandmaster[ray]'")]
    from bandmaster.cli.ray import NotThere, links_and_nodes

    try:
        found = links_and_nodes(address)
    except NotThere as error:
        return [Finding(str(error), "ray start --head, or give the address of a running cluster: --ray HOST:PORT")]
    rows = [
        [
            node.name,
            "not counted" if node.is_many else _free(node, "CPU"),
            _free(node, "GPU"),
            "yes" if why_not is None else "no",
            ", ".join(node.holders),
        ]
        for node, why_not in found
    ]
    print()
    print(text_table("the Ray cluster", ["node", "free CPUs", "free GPUs", "direct link", "held by"], rows))
    return [
        Finding(
            f"this host cannot connect to a process on node {node.name} ({why_not}), so no group can be made with "
            "workers there",
            "let the hosts of the cluster reach each other on the ports of sysctl net.ipv4.ip_local_port_range",
        )
        for node, why_not in found
        if why_not is not None
    ]


def _free(node: Node, name: str) -> str:
    return f"{node.free.get(name, 0.0):g} of {node.total.get(name, 0.0):g}"


class Probe(Worker):
    """The worker that `doctor` starts as a test."""

    @register(Dispatch.ONE_TO_ALL)
    def pid(self) -> int:
        """The pid of the worker's process."""
        return os.getpid()


def _try_a_worker() -> list[Finding]:
    """Start a local worker, call it, close it, and print how long each step took. Returns the problems."""
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
            "fix the problems above first; if there are none, follow the advice in this message",
        )
        print(finding)
        return [finding]
    started, answered, closed = (1e3 * (after - before) for before, after in pairwise(times))
    print(f"a local worker: started in {started:.0f} ms, answered in {answered:.2f} ms, closed in {closed:.0f} ms")
    return []
