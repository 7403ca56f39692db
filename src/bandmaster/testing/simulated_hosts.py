"""Many hosts on one machine: each is a process with an agent, whose ranks are objects in that process.

There is no Ray, no namespace and no worker process; only the controller's and the agents' work for a call remains. It
serves tests of agents, and measurements of the cost of a thousand ranks in a controller::

    bandmaster.backends.register_backend("simulated", SimulatedHosts)
    pool = bm.ResourcePool([8] * 128, backend="simulated")       # 128 hosts with 8 ranks each
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from bandmaster.backends.inprocess import InProcessWorkers
from bandmaster.backends.machine import MachineBackend
from bandmaster.codec import Payload
from bandmaster.contract import Launch, ShowOutput, WorkerProcess, WorkerRecord
from bandmaster.hosts.agent import AgentServer
from bandmaster.hosts.handshake import Secret
from bandmaster.hosts.link import Purpose, connect, in_memory
from bandmaster.hosts.links import Agent, AgentLinks
from bandmaster.hosts.workers import AgentWorkers
from bandmaster.platform.limits import start_thread

PATIENCE_S = 60.0


class SimulatedHosts(MachineBackend):
    """Backend whose nodes are processes with agents. They end with the last reservation, or with this process.

    Args:
        n_hosts: Number of hosts over which the ranks of every pool are dealt; by default each node of a pool is a host.
    """

    def __init__(self, n_hosts: int | None = None) -> None:
        super().__init__()
        self._n_hosts = n_hosts
        self._made: AgentLinks | None = None
        self._parent: subprocess.Popen[str] | None = None  # of the agents
        self._names = itertools.count()
        self._n_reserved = 0

    def reserve(self, request: Any, timeout_s: float) -> Any:
        """Reserve slots on this machine; see `MachineBackend.reserve`."""
        self._n_reserved += 1
        return super().reserve(request, timeout_s)

    def release(self, reservation: Any) -> None:
        """Release slots; see `MachineBackend.release`. The last release ends the processes."""
        super().release(reservation)
        self._n_reserved -= 1
        if not self._n_reserved and self._parent is not None:
            self._links.close()
            self._made = None
            assert self._parent.stdin is not None, "it was started with pipes"
            self._parent.stdin.close()
            self._parent.wait(10)
            if self._parent.stdout is not None:
                self._parent.stdout.close()
            self._parent = None

    @property
    def _links(self) -> AgentLinks:
        self._made = self._made or AgentLinks()
        return self._made

    def start(self, launch: Launch) -> AgentWorkers:
        """Start the ranks of each node in the process of its agent."""
        hosts = [slot.node_rank if self._n_hosts is None else slot.local_rank % self._n_hosts for slot in launch.slots]
        nodes = [str(host) for host in hosts]
        missing = [node for node in dict.fromkeys(nodes) if node not in self._links.agents]
        for node, (address, pid) in zip(missing, self._started(len(missing)), strict=True):
            link = connect(address, self._links.secret, Purpose.MESSAGES)
            with self._links.lock:
                self._links.add(Agent(link, node, f"host{node}", address, pid))
        agents = [self._links.agents[node] for node in nodes]
        workers = AgentWorkers(f"{launch.group} {next(self._names)}", self._links, agents)
        workers.hold_agents()
        workers.begin(launch, lambda ranks: (launch.sent(), tuple(ranks)))
        return workers

    def _started(self, n: int) -> list[tuple[tuple[str, int], int]]:
        """Start ``n`` agents. Returns the address and the pid of each."""
        if n and self._parent is None:
            secret = self._links.secret
            command = [sys.executable, "-m", __name__, secret.key.hex(), str(int(secret.is_encrypted)), *sys.path]
            self._parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if not n:
            return []
        assert self._parent is not None and self._parent.stdin and self._parent.stdout, "it was started with pipes"
        self._parent.stdin.write(f"{n}\n")
        self._parent.stdin.flush()
        said = [json.loads(self._parent.stdout.readline()) for _ in range(n)]
        return [((host, port), pid) for host, port, pid in said]


def _begun(said: tuple[Launch, Sequence[int]], shows: ShowOutput) -> tuple[_Ranks, Sequence[int]]:
    """The workers of some ranks, in this process."""
    return _Ranks(*said), said[1]


class _Ranks(InProcessWorkers):
    @property
    def records(self) -> Sequence[WorkerRecord]:
        """Host, process and device of each rank. The handles are `WorkerProcess` objects, which travel."""
        names = self._launch.worker_names
        return [
            record._replace(handle=partial(WorkerProcess, names[rank], rank, record.host, record.pid))
            for rank, record in zip(self._executors, super().records, strict=True)
        ]

    @property
    def rendezvous(self) -> Mapping[str, str]:
        """Always empty: the ranks have no processes."""
        return {}

    def announce(self, rendezvous: Mapping[str, str]) -> None:
        """Do nothing: there is no rendezvous."""

    def reserve(self, sizes: Sequence[int], is_kept: bool = False) -> Payload:
        """Allocate memory of this process for a payload."""
        return in_memory(0, (), sizes)


def _agent(secret: Secret) -> None:
    server = AgentServer(secret, "127.0.0.1", "a test", _begun)
    os.write(1, f"{json.dumps([*server.address, os.getpid()])}\n".encode())  # one write, as other agents write too
    os.close(0)
    os.open(os.devnull, os.O_RDONLY)  # takes its number
    start_thread("bandmaster-agent", server.run, PATIENCE_S).join()


def main() -> None:
    """Fork as many agents as each line on standard input says, and kill them at its end."""
    secret = Secret(bytes.fromhex(sys.argv[1]), sys.argv[2] == "1")
    sys.path.extend(path for path in sys.argv[3:] if path not in sys.path)
    children = []
    for line in sys.stdin:
        for _ in range(int(line)):
            child = os.fork()
            if not child:
                try:
                    _agent(secret)
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(0)
            children.append(child)
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
