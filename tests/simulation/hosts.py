"""Other hosts of the world: connections that bytes take time to cross, and agents that run the library's own code.

::

    controller: AgentLinks ── Stream ── latency, parts of frames, a cut ── Stream ── AgentServer.run ── lanes ── ranks

An agent's threads are threads of the world that belong to a process of their own. When that is killed, they end at
their next step, and their sockets are closed.
"""

from __future__ import annotations

import _signal
import errno
import itertools
import math
import os
import signal
import socket
from collections import deque
from typing import Any

from bandmaster.backends.host_workers import HostShare, HostWorkers
from bandmaster.backends.machine import MachineBackend
from bandmaster.callers.door import Door
from bandmaster.callers.passed import PassedCalls
from bandmaster.hosts.agent import AgentServer
from bandmaster.hosts.link import TCP_INFO, Purpose, connect
from bandmaster.hosts.links import Agent, AgentLinks
from bandmaster.hosts.workers import AgentWorkers
from bandmaster.worker_process import call_path
from simulation import sync
from simulation import world as worlds
from simulation.net import HUP, IN, OUT, File, Named
from simulation.world import Process, Task

KEEP_ALIVE_S = 9.0  # after which both ends of a connection learn that the other host does not answer


AGENTS_PID = 1 << 16


class Network:
    """The connections of the world.

    Attributes:
        listening: Who accepts connections, by port.
        cut: The hosts that nothing comes from or goes to.
        gone: The hosts that were cut off for long, or whose agents were killed.
    """

    def __init__(self) -> None:
        self.listening: dict[int, Listening] = {}
        self.streams: list[Stream] = []
        self.cut: set[str] = set()
        self.cut_at: dict[str, float] = {}
        self.gone: set[str] = set()
        self.ports = itertools.count(30_000)

    def cut_off(self, host: str, seconds: float) -> None:
        """Have nothing come from or go to a host for some time."""
        world = worlds.world
        assert world is not None, "a program runs"
        self.cut.add(host)
        self.cut_at[host] = world.now
        world.after(seconds, self._heal, host)
        world.after(KEEP_ALIVE_S, self._give_up, [one for one in self.streams if host in one.hosts])

    def _heal(self, host: str) -> None:
        self.cut.discard(host)
        for stream in self.streams:
            if host in stream.hosts:
                stream.deliver_soon()

    def _give_up(self, streams: list[Stream]) -> None:
        for stream in streams:
            if stream.hosts & self.cut and not (stream.closed or stream.other.n_flying):  # else Linux goes on for long
                self.gone |= stream.hosts - {""}
                stream.error = errno.ETIMEDOUT
                stream.world.version += 1


class Listening(File):
    """A socket that accepts connections."""

    def __init__(self, network: Network, host: str) -> None:
        super().__init__()
        self.network, self.host, self.port = network, host, next(network.ports)
        self.waiting: deque[Stream] = deque()
        network.listening[self.port] = self

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    def accept(self) -> tuple[Stream, Any]:
        sync._block(lambda: bool(self.waiting), None, "a connection")
        return self.waiting.popleft(), ("127.0.0.1", 1)

    def close(self) -> None:
        self.network.listening.pop(self.port, None)
        super().close()


class Stream(File):
    """One end of a connection between two hosts."""

    MOST = 150_000

    def __init__(self, network: Network, hosts: frozenset[str]) -> None:
        super().__init__()
        self.network, self.hosts = network, hosts
        self.arrived, self.flying = bytearray(), deque[bytes]()
        self.n_flying = 0
        self.timeout_s: float | None = None
        self.error = 0
        self.is_ended = self.is_shut = False  # the other end has closed, and all that it sent has come
        self.other: Stream
        self._is_due = False
        network.streams.append(self)

    def settimeout(self, seconds: float | None) -> None:
        self.timeout_s = seconds

    def setsockopt(self, *_: Any) -> None:
        return

    def getsockopt(self, level: int, option: int, nbytes: int) -> bytes:
        """What Linux tells of the connection: keep-alive is answered unless a host is cut off."""
        now, network = self.world.now, self.network
        silent_ms = max([int(1000 * (now - network.cut_at[host])) for host in self.hosts & network.cut], default=0)
        return TCP_INFO.pack(int(self.other.n_flying > 0), silent_ms, silent_ms, 1)

    def shutdown(self, how: int) -> None:
        self.is_shut = True
        self.other.deliver_soon()

    def events(self) -> int:
        readable = self.arrived or self.is_ended or self.error or self.is_shut
        return (IN if readable else 0) | (OUT if self._room() > 0 else 0) | (HUP if self.error else 0)

    def _room(self) -> int:
        other = self.other
        return 1 if self.error or other.closed else self.MOST - len(other.arrived) - other.n_flying

    def _check(self) -> None:
        if self.fd < 0:
            raise OSError(errno.EBADF, "Bad file descriptor")
        if self.error:
            raise OSError(self.error, os.strerror(self.error))

    def _until(self, ready: Any, waits: str) -> None:
        if not ready():
            if self.timeout_s == 0.0:
                raise BlockingIOError(errno.EAGAIN, "not now")
            if not sync._block(ready, self.timeout_s, waits):
                raise TimeoutError("timed out")

    def send(self, data: Any, flags: int = 0) -> int:
        worlds.tick()
        self._check()
        self._until(lambda: self._room() > 0 or bool(self.error), "room in a connection")
        self._check()
        other = self.other
        if other.closed or self.is_shut:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        room = self._room()
        if self.world.random.random() < 0.1:  # a part of a frame
            room = 1 + int(self.world.random.random() * room)
        part = bytes(data[:room])
        other.flying.append(part)
        other.n_flying += len(part)
        other.deliver_soon()
        return len(part)

    def sendmsg(self, parts: Any, ancillary: Any = (), flags: int = 0, address: Any = None) -> int:
        return self.send(memoryview(b"".join(parts)))

    def sendall(self, data: Any) -> None:
        view = memoryview(data)
        while len(view):
            view = view[self.send(view) :]

    def recv(self, n: int) -> bytes:
        buffer = bytearray(n)
        return bytes(buffer[: self.recv_into(buffer)])

    def recv_into(self, buffer: Any) -> int:
        worlds.tick()
        self._check()
        view = memoryview(buffer)
        is_there = lambda: bool(self.arrived or self.is_ended or self.error or self.is_shut or self.fd < 0)  # noqa: E731
        self._until(is_there, "bytes of a connection")
        self._check()
        n = min(len(view), len(self.arrived))
        view[:n] = self.arrived[:n]
        del self.arrived[:n]
        self.world.version += 1
        return n

    # --- on their way ---

    def deliver_soon(self) -> None:
        """Have what flies arrive."""
        if not self._is_due and not self.closed:
            self._is_due = True
            draw = self.world.random.random()
            self.world.after(1e-4 * draw if draw < 0.95 else 0.03 * self.world.random.random(), self._deliver)

    def _deliver(self) -> None:
        self._is_due = False
        if self.closed or self.hosts & self.network.cut:
            return
        while self.flying:
            part = self.flying.popleft()
            self.n_flying -= len(part)
            self.arrived += part
            if self.world.random.random() < 0.2:
                self.deliver_soon()  # the rest comes later
                break
        if not self.flying and (self.other.closed or self.other.is_shut):
            self.is_ended = True
        self.world.version += 1

    def close(self) -> None:
        if self.fd >= 0:
            super().close()
            self.network.streams.remove(self)
            self.other.deliver_soon()


class SocketModule:
    """Stands for the module `socket` where hosts are connected, and where processes of one host are."""

    @staticmethod
    def socket(family: int = -1, kind: int = -1, *, fileno: int | None = None) -> Any:
        return Named() if fileno is None else _world().files[fileno]

    @staticmethod
    def gethostname() -> str:
        return gethostname()

    @staticmethod
    def create_server(address: Any, backlog: int = 0) -> Listening:
        return Listening(_network(), _world().current.process)

    @staticmethod
    def create_connection(address: Any, timeout: float | None = None) -> Stream:
        worlds.tick()
        network = _network()
        listening = network.listening.get(address[1])
        if listening is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        process = _world().current.process
        hosts = frozenset([listening.host, _process().parent or process])
        mine, theirs = Stream(network, hosts), Stream(network, hosts)
        mine.other, theirs.other = theirs, mine
        theirs.process = listening.process
        mine.settimeout(timeout)
        listening.waiting.append(theirs)
        listening.world.version += 1
        return mine

    def __getattr__(self, name: str) -> Any:
        return getattr(socket, name)


class Secrets:
    """Stands for the module `secrets`."""

    @staticmethod
    def token_hex(n: int) -> str:
        return f"{next(_world().secrets):0{2 * n}x}"

    @staticmethod
    def randbits(n: int) -> int:
        return int(next(_world().secrets) << 40)


class Here(call_path._Here):
    """What calls of a process ask for."""

    told_of_calls = staticmethod(lambda: "")


def gethostname() -> str:
    """The name of the host of the process."""
    return socket.gethostname() if _world() is None else str(_process().host)


def n_forks() -> int:
    """A number of the process: each is as a fork of the others."""
    return 0 if _world() is None else int(_process().pid)


def end_if_forked(n_before: int, error: BaseException | None = None) -> None:
    """Do nothing: methods of the world fork no processes."""


def peer_of(sock: Named) -> tuple[int, int]:
    """The process of the other end, and its user."""
    return _world().processes[sock.other.process].pid, os.getuid()


def agents_door() -> str | None:
    """The door of the agent that has started the process."""
    return _world().processes[_process().parent].state.get("door")  # type: ignore[no-any-return]


def handler(number: int) -> Any:
    """The handler of a signal in the process."""
    world = worlds.world
    if world is None or not world.current.process:
        return _signal.getsignal(number)  # the C function, as in `bandmaster.platform.locks`
    return _process().state.get(number, signal.default_int_handler)


def set_handler(number: int, new: Any) -> Any:
    """Have another handler of a signal in the process; returns that before."""
    world = worlds.world
    if world is None or world.current is world.main:
        return _signal.signal(number, new)
    # Also in threads that the coroutines of a killed process start as they are collected, which may have its idents.
    before, _process().state[number] = handler(number), new
    return before


def _process() -> Any:
    return _world().processes[_world().current.process]


def _world() -> Any:
    return worlds.world


def _network() -> Network:
    found: Network = _world().network
    return found


def _start(said: Any, shows: Any) -> tuple[HostWorkers, Any]:
    launch, ranks = said
    return HostWorkers(launch, _world().zygote, HostShare(ranks), shows), ranks


class SimulatedHosts(MachineBackend):
    """Backend whose ranks are on other hosts of the world, behind agents."""

    def __init__(self) -> None:
        super().__init__()
        self._names = itertools.count()

    def start(self, launch: Any) -> AgentWorkers:
        world = _world()
        links = world.links
        if links is None:
            links = world.links = AgentLinks(lambda: None)
        hosts = [f"host{rank % world.n_hosts}" for rank in range(len(launch.slots))]
        for host in dict.fromkeys(hosts):
            if host not in links.agents:
                address = self._begin_agent(host, links.secret)
                link = connect(address, links.secret, Purpose.MESSAGES)
                with links.lock:
                    links.add(Agent(link, host, host, address, 1))
        workers = AgentWorkers(f"{launch.group} {next(self._names)}", links, [links.agents[host] for host in hosts])
        workers.hold_agents()
        workers.begin(launch, lambda ranks: (launch.sent(), tuple(ranks)))
        return workers

    def _begin_agent(self, host: str, secret: Any) -> Any:
        """Start the process of an agent. Returns its address."""
        world, made = _world(), list[AgentServer]()

        number = next(world.n_agents)
        process = f"{host} {number}"

        def live() -> None:
            server = AgentServer(secret, "127.0.0.1", "simulated", _start)
            os.close(server._announced)
            if world.has_callers:
                world.processes[process].state["door"] = Door(PassedCalls(server)).address
            made.append(server)
            world.servers[process] = server
            server.run(60.0)
            world.zygote.kill_agent(process)

        # An agent serves in a thread that is not the main one, where signal handlers run.
        world.processes[process] = Process(host, Task("main", process), world.current.process, AGENTS_PID + number)
        world.spawn(f"agent of {host}", live, process=process)
        sync._block(lambda: bool(made), math.inf, "an agent")
        return made[0].address
