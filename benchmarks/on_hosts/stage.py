"""Peers on the first of several hosts, and the traffic of the hosts while a peer has its turn."""

from __future__ import annotations

import contextlib
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from harness.cli import Options
from harness.environments import Found
from harness.peer_process import PeerProcess
from harness.stage import LIGHT, Cell, Stage
from peers.on_hosts import floor

from on_hosts import testbed
from on_hosts.peers import EIGHT_EACH, FLOOR, MONARCH, found

CONTROLLER, *OTHERS = range(testbed.N_HOSTS)
MONARCH_ADDRESSES = "MONARCH_ADDRESSES"  # which its peer reads


class HostStage(Stage):
    """Peers whose controllers are on the first host.

    Args:
        hosts: The testbed.
        names: Of the peers.
        n_workers: Ranks of each.
        is_smoke: Whether all is tiny.

    Attributes:
        traffic: For a cell and a peer, for each round: for each host, the bytes that it received and sent in a call.
    """

    def __init__(self, hosts: Any, names: Sequence[str], n_workers: int, is_smoke: bool) -> None:
        self.hosts = hosts
        self.traffic: dict[tuple[Cell, str], list[list[tuple[float, float]]]] = defaultdict(list)
        self._processes_of_hosts: list[subprocess.Popen[bytes]] = []
        super().__init__(Options(found(names), is_smoke, is_full=False), n_workers)

    def process(self, found: Found) -> PeerProcess:
        """The controller of a peer, on the first host."""
        environment = {**self.hosts.environment, **LIGHT}
        if found.kind.name == FLOOR:
            self._start_on_hosts(found.python, "peers.on_hosts.floor_host")
            environment[floor.ADDRESSES] = ",".join(map(testbed.address, OTHERS))
        if found.kind.name == MONARCH:
            self._start_on_hosts(found.python, "peers.on_hosts.monarch_host")
            environment[MONARCH_ADDRESSES] = ",".join(map(testbed.address, range(testbed.N_HOSTS)))
        return PeerProcess(found, environment, prefix=self.hosts.command(CONTROLLER, []))

    def measure(self, cell: Cell, name: str, is_warm_up: bool) -> tuple[tuple[float, ...], float]:
        """As `Stage.measure`; counts the traffic."""
        before = [self.hosts.traffic(host) for host in range(testbed.N_HOSTS)]
        seconds, cpu_s = super().measure(cell, name, is_warm_up)
        after = [self.hosts.traffic(host) for host in range(testbed.N_HOSTS)]
        if not is_warm_up:
            n = len(seconds)
            moved = [((a[0] - b[0]) / n, (a[1] - b[1]) / n) for a, b in zip(after, before, strict=True)]
            self.traffic[cell, name].append(moved)
        return seconds, cpu_s

    def too_big(self, name: str, cell: Cell) -> str:
        """Never: sizes were chosen for all peers."""
        return ""

    def close(self) -> None:
        """As `Stage.close`; the processes of peers on other hosts end with their connections, or are ended."""
        super().close()
        for process in self._processes_of_hosts:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.terminate()
                process.wait(5)

    def _start_on_hosts(self, python: str, module: str) -> None:
        """Run a module on each other host, which gets the host's address."""
        for host in OTHERS:
            command = self.hosts.command(host, [python, "-m", module, testbed.address(host)])
            self._processes_of_hosts.append(subprocess.Popen(command, env=self.hosts.environment))


class SimulatedStage(Stage):
    """Peers with so many simulated hosts. What is measured is the controller's processor time for a call.

    Args:
        names: Of the peers.
        n_hosts: Of each.
        is_smoke: Whether all is tiny.
    """

    def __init__(self, names: Sequence[str], n_hosts: int, is_smoke: bool) -> None:
        super().__init__(Options(found(names), is_smoke, is_full=False), n_hosts)

    def process(self, found: Found) -> PeerProcess:
        """The controller of a peer."""
        return PeerProcess(found, {**LIGHT, "PYTHONPATH": testbed.python_path()})

    def n_workers_of(self, name: str) -> int:
        """One for each host, or eight."""
        return self.n_workers * (8 if name == EIGHT_EACH else 1)

    def measure(self, cell: Cell, name: str, is_warm_up: bool) -> tuple[tuple[float, ...], float]:
        """The mean processor time of the calls of a turn, in place of each one's seconds: clocks of it are coarse."""
        seconds, cpu_s = super().measure(cell, name, is_warm_up)
        return (cpu_s / len(seconds),), cpu_s


@contextlib.contextmanager
def closing(stage: Stage) -> Iterator[Any]:
    """Close a stage whatever happens."""
    try:
        yield stage
    finally:
        stage.close()
