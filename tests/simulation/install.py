"""Gives the modules of the library the clock, locks, threads, polls and sockets of the world while programs run."""

from __future__ import annotations

import concurrent.futures._base as futures
import contextlib
import functools
import gc
import importlib
import itertools
import queue
import select
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import bandmaster as bm
import bandmaster.calls.open_work
import bandmaster.requests.router
import bandmaster.watching.watch
from bandmaster.answering import requests as answering
from bandmaster.backends import get_backend, host_workers, register_backend
from bandmaster.backends.host_workers import HostShare, HostWorkers
from bandmaster.backends.machine import MachineBackend
from bandmaster.callers import called, door, passed, reached
from bandmaster.calls import progress as progress_module
from bandmaster.groups import base
from bandmaster.hosts import agent, handshake, link
from bandmaster.platform import forks, locks
from bandmaster.requests import reader
from bandmaster.rows import kept
from bandmaster.turns import turns
from bandmaster.wire import lane, poller, status_page
from bandmaster.worker_process import call_path, event_loop
from bandmaster.worker_process import loop as worker_loop
from simulation import hosts, loop, net, sync
from simulation import world as worlds
from simulation.lines import Lines
from simulation.ranks import Rank
from simulation.workers import Worker
from simulation.world import START, World

_LOCKS = {type(threading.Lock()): sync.Lock, type(threading.RLock()): sync.RLock, threading.Event: sync.Event}
_LOCKS[threading.Condition] = sync.Condition
_MODULES = {
    id(threading): sync.Threading(),
    id(time): sync.Time(),
    id(select): net.Select(),
    id(queue): sync.Queue(),
}
_FUNCTIONS = {
    id(time.monotonic): sync.now,
    id(time.monotonic_ns): sync.Time.monotonic_ns,
    id(time.sleep): sync.sleep,
    id(ThreadPoolExecutor): sync.ThreadPoolExecutor,
    id(threading.main_thread): sync.main_thread,
    id(queue.SimpleQueue): sync.SimpleQueue,
    id(socket.gethostname): hosts.gethostname,
    id(forks.n_forks): hosts.n_forks,
    id(forks.end_if_forked): hosts.end_if_forked,
}

_SINGLE = {
    id(progress_module.progress): sync.PerProcess(progress_module.Progress),
    id(call_path.here): sync.PerProcess(hosts.Here),
}

# Modules that the path imports when it needs them: a program must not depend on whether it is the first.
LATER = (
    "requests.method",
    "requests.reader",
    "requests.map",
    "watching.turns",
    "flow.waiting",
    "turns.turns",
    "answering.request_tasks",
    "answering.requests",
    "callers.called",
    "callers.door",
    "callers.passed",
)


class Group:
    """The simulated ranks of one group, and what is checked of them together.

    Attributes:
        ended: When the last rank has ended a call, by its token.
        died_at: When the last rank has died.
    """

    def __init__(self, world: World, name: str, concurrency: int) -> None:
        self.world, self.name, self.concurrency = world, name, concurrency
        self.ranks: dict[int, Any] = {}
        self.ended: dict[Any, float] = {}
        self.died_at = START

    def __repr__(self) -> str:
        return self.name

    def check_fence(self, rank: Rank) -> None:
        """A rank that has failed a call begins the next one when no rank runs the failed one any more."""
        failed = rank.failed_token
        program: Any = self.world.program  # type: ignore[attr-defined]
        # Hosts end their ranks each at its own time.
        if program.is_closing or program.n_renewing or program.kind.acting:
            return
        for other in self.ranks.values():
            running = other.running
            is_meant = running is not None and running.stream is None  # the generators of ranks are alone
            is_at_it = is_meant and running.token == failed and other.is_alive and not other.is_cut_off
            self.world.check(
                failed is None or not is_at_it, "a rank passes the fence of a call that another runs", rank
            )

    def check_fence_passed(self, rank: Rank) -> None:
        """No call is waited for while a rank waits at a fence in vain."""
        ended_at = max(self.ended[rank.failed_token], self.died_at)
        self.world.program.check_fence_passed(rank, ended_at)  # type: ignore[attr-defined]

    def check_room(self, rank: Rank) -> None:
        """No more requests of a method run than may."""
        counts = Counter(running.name for running in rank.requests.values() if running.method != "tell")
        self.world.check(
            max(counts.values(), default=0) <= self.concurrency, "more requests run than may", rank, counts
        )


class SimulatedZygote:
    """Starts simulated ranks in place of processes."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.groups: dict[str, Group] = {}
        self.ranks: dict[int, Any] = {}
        self._pids = itertools.count(1 << 24)
        self.concurrency = 4

    def hold(self, holder: object) -> bool:
        return True

    def release(self, holder: object) -> None:
        return

    def spawn(self, spawn: Any, descriptors: Any, timeout_s: float | None) -> int:
        pid = next(self._pids)
        name = spawn.identity.group
        group = self.groups.setdefault(name, Group(self.world, name, self.concurrency))
        made = Worker if self.world.has_callers else Rank  # type: ignore[attr-defined]
        rank = made(self.world, group, spawn.identity.rank, pid, self.world.files[descriptors[0]], spawn.context)
        group.ranks[spawn.identity.rank] = self.ranks[pid] = rank
        return pid

    def how_it_ended(self, pid: int) -> str:
        sync.sleep(1e-4)
        return self.ranks[pid].died or "killed by SIGKILL"

    def end(self, pids: Any, grace_s: float) -> None:
        sync.sleep(1e-3)
        for pid in pids:
            self.ranks[pid].end("killed by SIGKILL")

    def kill_agent(self, agent: str) -> None:
        """Kill an agent; its ranks end a little later."""
        self.world.kill(agent)
        for rank in self.ranks.values():
            if rank.agent == agent:
                self.world.after(10 ** self.world.random.uniform(-5, -1), rank.end, "killed by SIGKILL")


class SimulatedBackend(MachineBackend):
    """Backend whose workers are simulated ranks, behind the true client of workers on this host."""

    def start(self, launch: Any) -> HostWorkers:
        world = worlds.world
        assert world is not None, "a program runs"
        return HostWorkers(launch, world.zygote, HostShare(range(len(launch.slots))))  # type: ignore[attr-defined]


class _Nowhere:
    """Stands for a socket of a rendezvous."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    def fileno(self) -> int:
        return 0


def _ranks() -> dict[int, Any]:
    return worlds.world.zygote.ranks  # type: ignore[union-attr]


def _interrupt(pid: int, number: int) -> None:
    worlds.tick()
    if pid in _ranks():  # else it is the controller
        _ranks()[pid].interrupt(number)


def _resume(pid: int, number: int) -> None:
    worlds.tick()
    _ranks()[pid].resume(number)


def _stacks(pids: Any, timeout_s: float = 0.5) -> dict[int, str]:
    sync.sleep(0.02)
    ranks = {pid: _ranks()[pid] for pid in pids if pid in _ranks()}
    alive = {pid: rank for pid, rank in ranks.items() if rank.is_alive and not rank.is_stopped}
    return {pid: f"(in {rank.signs().method or 'the loop'})\n" for pid, rank in alive.items()}


def _signs_of(pid: int) -> Any:
    worlds.tick()
    return _ranks()[pid].signs()


class Installed:
    """What was replaced, and by what.

    Attributes:
        lines: The library's functions, between whose lines threads may be switched.
    """

    lines: Lines

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []
        self._locks: list[tuple[Any, str, Any]] = []
        self._seen: set[str] = set()
        self._caches: dict[int, Any] = {}  # functions that remember what they have returned

    def replace(self, owner: Any, name: str, new: Any) -> None:
        """Replace an attribute."""
        self._before.append((owner, name, owner.__dict__.get(name, _ABSENT)))
        setattr(owner, name, new)

    def begin(self) -> None:
        """Replace everything."""
        self._look_at_modules()
        self.replace(futures, "threading", sync.Threading())
        self.replace(futures, "time", sync.Time())
        self.replace(event_loop, "asyncio", loop.Asyncio())
        for module in (
            poller, progress_module, answering, called, call_path, door, lane, passed, reached, reader, worker_loop,
        ):  # fmt: skip
            self.replace(module, "os", net.Os())
        self.replace(poller, "open", net.opened)
        for module in (agent, door, handshake, host_workers, lane, link, reached):
            self.replace(module, "socket", hosts.SocketModule())
        for module in (base, door, passed):
            self.replace(module, "secrets", hosts.Secrets())
        self.replace(door, "peer_of", hosts.peer_of)
        self.replace(door.Door._opening, "lock", sync.RLock())
        self._locks.append((door.Door._opening, "lock", sync.RLock))
        self.replace(reached, "agents_door", hosts.agents_door)
        self.replace(called, "_known", sync.PerProcess(dict))
        self.replace(locks, "_handler", hosts.handler)
        self.replace(locks, "_set_handler", hosts.set_handler)
        self.replace(host_workers, "lane_pair", net.socket_pair)
        self.replace(host_workers, "rendezvous_sockets", lambda _: [_Nowhere()] * 2)
        self.replace(host_workers, "_output_of", lambda *_: None)
        for name, function in (
            ("interrupt", _interrupt), ("resume", _resume), ("stacks", _stacks), ("signs_of", _signs_of),
        ):  # fmt: skip
            self.replace(status_page, name, function)

    def _look_at_modules(self) -> None:
        """Look at those that were not looked at yet: some are imported when they are needed."""
        for name, module in sorted(sys.modules.items()):
            if (name == "bandmaster" or name.startswith("bandmaster.")) and name not in self._seen:
                self._seen.add(name)
                for attribute, value in sorted(vars(module).items()):
                    self._look_at(module, attribute, value)

    def _look_at(self, module: Any, attribute: str, value: Any) -> None:
        for one in vars(value).values() if isinstance(value, type) else (value,):
            one = getattr(one, "__func__", one)
            if isinstance(one, _CACHED):
                self._caches[id(one)] = one
        new = _MODULES.get(id(value), _FUNCTIONS.get(id(value), _SINGLE.get(id(value))))
        if new is not None:
            self.replace(module, attribute, new)
        elif type(value) in _LOCKS:
            self._locks.append((module, attribute, _LOCKS[type(value)]))
            self.replace(module, attribute, _LOCKS[type(value)]())
        elif isinstance(value, type) and value.__module__ == module.__name__:
            for one in vars(value).values():
                if isinstance(one, functools.cached_property) and hasattr(one, "lock"):
                    self.replace(one, "lock", sync.RLock())
        elif type(value).__module__.startswith("bandmaster.") and hasattr(value, "__dict__"):
            for inner, one in list(vars(value).items()):
                if type(one) in _LOCKS:
                    self._locks.append((value, inner, _LOCKS[type(one)]))
                    self.replace(value, inner, _LOCKS[type(one)]())

    def begin_anew(self) -> None:
        """Drop what a program that has failed has left."""
        self._look_at_modules()
        for cached in self._caches.values():
            cached.cache_clear()
        for owner, name, kind in self._locks:
            setattr(owner, name, kind())
        door.Door._open = None
        reached._counts.clear()
        bm.watching.watch.watch.__init__()  # type: ignore[misc]
        turns._takers.clear()
        kept._living.clear()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def end(self) -> None:
        """Put everything back."""
        for owner, name, value in reversed(self._before):
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


_ABSENT = object()
_CACHED = type(functools.cache(bool))
_registered: list[str] = []


@contextlib.contextmanager
def installed() -> Iterator[Installed]:
    """Replace everything within the block."""
    if not _registered:
        register_backend("simulated", SimulatedBackend)
        register_backend("simulated-hosts", hosts.SimulatedHosts)
        _registered.append("simulated")
    for name in ("simulated", "simulated-hosts", "inprocess"):
        get_backend(name)  # imports what it needs
    for name in bm.__all__:
        getattr(bm, name)
    for name in LATER:
        importlib.import_module(f"bandmaster.{name}")
    made = Installed()
    made.begin()
    gc.collect()
    made.lines = Lines()
    gc.freeze()
    try:
        yield made
    finally:
        gc.unfreeze()
        made.end()
