"""Workers as processes on this machine: forked from a zygote, reached by lanes, which need no port and no name.

::

    LocalBackend.start ──► Zygote.spawn, once per rank ──► worker processes
         └── LaneCrew ◄──── a lane each ────────────────────┘    (wire/lane.py, wire/segments.py, wire/loop.py)
         └── WorkerOutput ◄─ their standard output and error

The one port is that of torch's rendezvous, on the loopback address (wire/rendezvous.py).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bandmaster.backends import CLOSED, Launch
from bandmaster.backends.machine import MachineBackend
from bandmaster.backends.output import WorkerOutput
from bandmaster.backends.threads import THREAD_VARIABLES
from bandmaster.backends.zygote import NoAnswer, Spawn, Zygote
from bandmaster.construction import answers, await_construction, replacement, start_timeout
from bandmaster.errors import ResourceError, UsageError
from bandmaster.failure import Failure
from bandmaster.hardware import count_cores, visible_devices
from bandmaster.limits import cannot_start, working_directory
from bandmaster.wire.crew import LaneCrew
from bandmaster.wire.desk import Nameplate
from bandmaster.wire.lane import lane_pair
from bandmaster.wire.rendezvous import rendezvous_environment
from bandmaster.wire.steady import SteadyLock

__all__ = ["LocalBackend", "LocalWorker"]

LOOPBACK = "127.0.0.1"
END_GRACE_S = 0.5  # for workers to end by themselves before they are killed


@dataclass(frozen=True)
class LocalWorker:
    """A worker process, as a person sees it."""

    name: str
    rank: int
    pid: int


class LocalBackend(MachineBackend):
    """Processes on this machine."""

    def __init__(self) -> None:
        super().__init__()
        self._zygote: Zygote | None = None
        self._lock = threading.Lock()  # of those that start it

    def start(self, launch: Launch) -> LocalCrew:
        """Fork a worker for every seat, then construct all of them concurrently."""
        crew = LocalCrew(launch, self._living_zygote())
        try:
            _construct(crew, launch, range(len(launch.seats)))
        except BaseException:
            crew.stop()
            raise
        return crew

    def replace(self, crew: LocalCrew, launch: Launch, rank: int) -> None:
        """Fork a new worker for a seat, and construct it."""
        with replacement(crew, rank):
            crew.start_again(launch, rank)
            _construct(crew, launch, [rank])

    def _living_zygote(self) -> Zygote:
        if self._zygote is not None and not self._zygote.is_ours:
            raise UsageError("this process was forked from the one that has the workers; make pools in that one")
        with self._lock:
            if self._zygote is not None and not self._zygote.is_alive:
                self._zygote.close()
                self._zygote = None
            if self._zygote is None or self._zygote.is_abandoned:  # groups that were made before may still use that
                self._zygote = _started_zygote()
            return self._zygote


class LocalCrew(LaneCrew):
    """The processes of one group."""

    def __init__(self, launch: Launch, zygote: Zygote) -> None:
        self._zygote = zygote
        self._output = WorkerOutput(launch.cls.__name__)
        self.processes: dict[int, int] = {}
        self._is_ended = False
        self.port = 0  # of the rendezvous
        self._devices = [_device_of(launch)] * len(launch.seats)
        ours: list[socket.socket] = []
        zygote.begin_use(self)
        try:
            began = time.monotonic()
            for rank in range(len(launch.seats)):
                ours.append(self._start_process(launch, rank, began))
            self._output.start()
        except BaseException:
            for sock in ours:
                sock.close()
            try:
                zygote.end(list(self.processes.values()), 0.0)
            finally:
                zygote.end_use(self)
                self._output.finish(0.0)
            raise
        super().__init__(dict(enumerate(ours)), self.processes, self._how_it_died)
        named = enumerate(launch.worker_names)
        self._handles = [LocalWorker(name, rank, self.processes[rank]) for rank, name in named]

    @property
    def handles(self) -> Sequence[LocalWorker]:
        """Names and pids."""
        return self._handles

    def describe(self) -> list[dict[str, Any]]:
        """Pids and devices; all have a lane."""
        host = socket.gethostname()
        return [
            {"host": host, "pid": self.processes[rank], "device": device, "lane": "yes"}
            for rank, device in enumerate(self._devices)
        ]

    def start_again(self, launch: Launch, rank: int) -> None:
        """A new process for a rank that was buried."""
        mine = self._start_process(launch, rank, time.monotonic())
        pid = self.processes[rank]
        self._output.start()
        self._handles[rank] = LocalWorker(launch.worker_names[rank], rank, pid)
        with SteadyLock():  # so that Ctrl-C leaves no rank without a process
            self.forget_death(rank)
            self.add_lane(rank, mine, pid)

    def stop(self, why: str = CLOSED) -> None:
        """Hang up, so that the workers end; kill those that do not."""
        if self._is_ended:
            return
        self.close_lanes(why)
        processes = list(self.processes.values())
        try:
            self._zygote.end(processes, END_GRACE_S)
        except BaseException:  # Ctrl-C: nobody waits for them any longer
            self._zygote.end(processes, 0.0)
            raise
        self._zygote.end_use(self)
        self.forget_loans()
        self._output.finish(timeout_s=2.0)
        self._is_ended = True

    def _start_process(self, launch: Launch, rank: int, began: float) -> socket.socket:
        """Fork a worker; the controller's end of its lane.

        Raises:
            CallTimeout: It was not forked in time, counted from ``began``.
            PlacementError: It cannot be forked.
            ResourceError: There are too few descriptors.
        """
        spawn, limit_s = _spawn_of(launch, rank), launch.start_timeout_s
        left_s = None if limit_s is None else limit_s + began - time.monotonic()
        with contextlib.ExitStack() as if_it_fails, contextlib.ExitStack() as close_here:
            try:
                with SteadyLock():  # so that Ctrl-C leaves no descriptor that nobody closes
                    mine, theirs = lane_pair()
                    if_it_fails.enter_context(mine)
                    close_here.enter_context(theirs)
                    writers = self._output.add(rank)
                    for fd in writers:
                        close_here.callback(os.close, fd)
                self.processes[rank] = self._zygote.spawn(spawn, [theirs.fileno(), *writers], left_s)
            except NoAnswer as error:
                if limit_s is None or time.monotonic() < began + limit_s:
                    raise
                missing = [other for other in range(len(launch.seats)) if other == rank or other not in self.processes]
                raise start_timeout(launch, missing, str(error)) from error
            except OSError as error:
                raise ResourceError(
                    f"cannot start rank {rank} of {spawn.nameplate.world_size}: {error}; a worker takes three "
                    "descriptors of the controller: raise the limit on open files (ulimit -n), or ask for fewer"
                ) from error
            if_it_fails.pop_all()
        return mine

    def end(self, tickets: Mapping[int, Any], why: str) -> None:
        """Kill those that are at these calls, with all processes that they started."""
        self.kill([rank for rank, ticket in tickets.items() if self.is_at(rank, ticket)], why)

    def kill(self, ranks: Sequence[int], why: str) -> None:
        """Kill ranks, whatever they do."""
        for rank in ranks:
            self.note_end(rank, why)
        self._zygote.end([self.processes[rank] for rank in ranks], 0.0)

    def _how_it_died(self, rank: int) -> Failure:
        pid = self.processes[rank]
        ended, last = self._zygote.how_it_ended(pid), self._output.last_errors(rank)
        return Failure.of_death(ended, last, socket.gethostname(), pid, self._devices[rank])


def _construct(crew: LocalCrew, launch: Launch, ranks: Sequence[int]) -> None:
    """Construct these ranks; when one of them is rank 0, all learn of its new rendezvous."""
    if 0 in ranks:
        listening = crew.send(0, "listen", (LOOPBACK,))
        crew.port = int(answers(crew, {0: listening}, launch)[0])
    rendezvous = rendezvous_environment(LOOPBACK, crew.port)
    parts = crew.put([launch.constructor])
    tickets = {}
    for rank in ranks:
        context = launch.context(rank, _device_of(launch))
        tickets[rank] = crew.send(rank, "construct", (context, {**context.environment(), **rendezvous}), parts)
    others = [rank for rank in range(len(launch.seats)) if rank not in ranks]
    told = {rank: crew.send(rank, "environment", (rendezvous,)) for rank in others if 0 in ranks}
    await_construction(crew, {**tickets, **told}, launch)


def _started_zygote() -> Zygote:
    """A new process that workers can be forked from.

    Raises:
        UsageError: ``sys.executable`` is not the path of a Python.
        ResourceError: The system allows no more processes or descriptors.
    """
    modules = _modules_to_preload()
    if not os.access(sys.executable or "", os.X_OK):
        raise UsageError(
            f"backend 'local' forks workers from a process that it starts with sys.executable, and {sys.executable!r} "
            "cannot be run; set it to the path of a Python, or use backend 'inprocess'"
        )
    try:
        return Zygote(modules)
    except ResourceError:
        raise
    except (OSError, RuntimeError) as error:
        raise cannot_start("the process that workers are forked from", error) from error


def _device_of(launch: Launch) -> str:
    return "cuda:0" if launch.uses_gpu else "cpu"  # a worker sees no other GPU than its own


def _spawn_of(launch: Launch, rank: int) -> Spawn:
    seat = launch.seats[rank]
    environment = dict(os.environ)
    if launch.uses_gpu:
        environment["CUDA_VISIBLE_DEVICES"] = visible_devices()[seat.reservation.gpus[seat.node][seat.index]]
    if "OMP_NUM_THREADS" not in os.environ:
        share = str(max(1, count_cores() // len(launch.seats)))
        environment.update({name: share for name in THREAD_VARIABLES if name not in os.environ})
    nameplate = Nameplate(0, os.getpid(), rank, len(launch.seats), launch.group)
    return Spawn(nameplate, environment, working_directory(), tuple(sys.path), tuple(sys.argv))


def _modules_to_preload() -> list[str]:
    """``BANDMASTER_PRELOAD`` (names with commas between), or numpy, and torch where it is installed."""
    named = os.environ.get("BANDMASTER_PRELOAD")
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    return ["numpy.random", *(["torch"] if importlib.util.find_spec("torch") else [])]
