"""Runs workers as processes on this machine, forked from a zygote and reached over lanes, which use no port or name.

::

    LocalBackend.start ──► Zygote.spawn, once per rank ──► worker processes: bandmaster.worker_process.loop
         └── WorkerClient ◄─ one lane each ─────────────────┘
         └── WorkerOutput ◄─ their standard output and error

The only port is that of the torch rendezvous, on the loopback address. Rank 0 inherits its listening socket.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from bandmaster.backends.machine import MachineBackend, Reservation
from bandmaster.backends.output import WorkerOutput
from bandmaster.backends.zygote import NoAnswer, Zygote
from bandmaster.backends.zygote_process import Spawn
from bandmaster.backends.zygotes import Zygotes
from bandmaster.contract import CLOSED, Launch, WorkerRecord
from bandmaster.errors import ResourceError
from bandmaster.failure import Failure
from bandmaster.platform.hardware import count_cores, visible_devices
from bandmaster.platform.limits import working_directory
from bandmaster.platform.locks import SigintSafeLock
from bandmaster.platform.math_threads import THREAD_VARIABLES
from bandmaster.transport.client import WorkerClient
from bandmaster.transport.control_page import WorkerIdentity
from bandmaster.transport.lane import Lane, lane_pair
from bandmaster.worker_process.rendezvous import listening_socket, rendezvous_environment

__all__ = ["LocalBackend", "LocalWorker", "LocalWorkers"]

LOOPBACK = "127.0.0.1"
END_GRACE_S = 0.5  # time for workers to exit by themselves before they are killed


@dataclass(frozen=True)
class LocalWorker:
    """The handle of a worker process that users see.

    Attributes:
        name: Name of the worker.
        rank: Its rank in the group.
        pid: Its process id.
    """

    name: str
    rank: int
    pid: int


class LocalBackend(MachineBackend):
    """Backend whose workers are processes on this machine."""

    def __init__(self) -> None:
        super().__init__()
        self._zygotes = Zygotes()
        self._released_pools: weakref.WeakSet[Reservation] = weakref.WeakSet()

    @property
    def lasting_zygote(self) -> Zygote | None:
        """The zygote that stays until the controller ends; None if it was not needed yet."""
        return self._zygotes.lasting

    def start(self, launch: Launch) -> LocalWorkers:
        """Fork a worker process for every slot."""
        pools = list(dict.fromkeys(slot.reservation for slot in launch.slots))
        zygote = self._zygotes.get(launch.preload, launch.env, pools)
        try:
            return LocalWorkers(launch, zygote)
        finally:
            for pool in self._released_pools.intersection(pools):  # another thread has closed it meanwhile
                self._zygotes.release(pool)

    def release(self, reservation: Reservation) -> None:
        """Release the GPUs of a reservation, and end the zygotes that only its pool has used."""
        super().release(reservation)
        self._released_pools.add(reservation)
        self._zygotes.release(reservation)


class LocalWorkers:
    """The worker processes of one group, each reached over a lane.

    Attributes:
        deaths: The ranks whose processes are known to have ended, and how.
        ranks_are_own: True.
    """

    ranks_are_own = True

    def __init__(self, launch: Launch, zygote: Zygote) -> None:
        self._launch = launch
        self._zygote = zygote
        self._output = WorkerOutput(launch)
        self._port = 0  # port of the rendezvous
        self._is_ended = False
        self._client = client = WorkerClient(self._how_it_died)
        self.deaths: Mapping[int, Failure] = client.deaths
        self.put, self.wait, self.fetch, self.check = client.put, client.wait, client.fetch, client.check
        self.call, self.stacks, self.resume = client.call, client.stacks, client.resume
        try:
            zygote.begin_use(self)
            began = time.monotonic()
            for rank in range(len(launch.slots)):
                self._start_process(rank, began)
            self._output.start()
        except BaseException:
            self._close(0.0)
            raise

    @property
    def arrivals(self) -> int | None:
        """A descriptor that is readable when a reply or a death may have arrived: both arrive over lanes."""
        return self._client.arrivals

    @property
    def records(self) -> list[WorkerRecord]:
        """Host, process and device of each rank. Every worker has a lane; the handles return `LocalWorker` objects."""
        host, device = socket.gethostname(), _device_of(self._launch)
        return [
            WorkerRecord(host, pid, device, "lane", partial(LocalWorker, self._launch.worker_names[rank], rank, pid))
            for rank, pid in sorted(self._client.processes.items())
        ]

    def interrupt(self, tickets: Mapping[int, Any], kill_because: str | None = None) -> None:
        """Interrupt calls through the control page of each rank.

        Args:
            tickets: The calls, by rank.
            kill_because: If it is given, the workers that are running these calls are killed instead, with all
                processes that they started.
        """
        if kill_because is None:
            self._client.interrupt(tickets)
        else:
            self._kill([rank for rank, t in tickets.items() if t is None or self._client.is_at(rank, t)], kill_because)

    def replace(self, rank: int) -> None:
        """Fork a new process for a rank. A new rank 0 opens a new rendezvous, whose port is sent to the other ranks."""
        self._kill([rank], "ended by the controller, because it is being replaced")
        self._start_process(rank, time.monotonic())
        self._output.start()
        if rank == 0:
            for other in self._client.processes:
                if other != 0:
                    self._client.change_environment(other, rendezvous_environment(LOOPBACK, self._port))

    def stop(self, why: str = CLOSED) -> None:
        """Close the lanes, so that the workers exit; kill those that do not exit in time."""
        if not self._is_ended:
            self._client.close_channels(why)
            self._close(END_GRACE_S)

    def _close(self, grace_s: float) -> None:
        self._client.close_channels()
        processes = list(self._client.processes.values())
        try:
            self._zygote.end(processes, grace_s)
        except BaseException:  # Ctrl-C: kill the workers without waiting for them
            self._zygote.end(processes, 0.0)
            raise
        self._zygote.end_use(self)
        self._output.finish(timeout_s=2.0)
        self._is_ended = True

    def _start_process(self, rank: int, began: float) -> None:
        """Fork a worker and open a lane to it.

        Args:
            rank: The worker's rank.
            began: `time.monotonic` from which the launch's ``start_timeout_s`` is counted.

        Raises:
            CallTimeout: The worker was not forked in time.
            PlacementError: The worker cannot be forked.
            ResourceError: The controller has too few file descriptors left.
        """
        launch, limit_s = self._launch, self._launch.start_timeout_s
        left_s = None if limit_s is None else limit_s + began - time.monotonic()
        with contextlib.ExitStack() as if_it_fails, contextlib.ExitStack() as close_here:
            try:
                with SigintSafeLock():  # so that Ctrl-C cannot leak a descriptor
                    mine, theirs = lane_pair()
                    if_it_fails.enter_context(mine)
                    close_here.enter_context(theirs)
                    descriptors = [theirs.fileno(), *self._output.add(rank)]
                    for fd in descriptors[1:]:
                        close_here.callback(os.close, fd)
                    if rank == 0:
                        listening = close_here.enter_context(listening_socket(LOOPBACK))
                        self._port = listening.getsockname()[1]
                        descriptors.append(listening.fileno())
                pid = self._zygote.spawn(_spawn_of(launch, rank, self._port), descriptors, left_s)
            except NoAnswer as error:
                if limit_s is None or time.monotonic() < began + limit_s:
                    raise
                started = self._client.processes
                missing = [other for other in range(len(launch.slots)) if other == rank or other not in started]
                raise launch.late(missing, str(error)) from error
            except OSError as error:
                raise ResourceError(
                    f"cannot start rank {rank} of {len(launch.slots)}: {error}; each worker needs three file "
                    "descriptors in the controller: raise the limit on open files (ulimit -n), or ask for fewer workers"
                ) from error
            with SigintSafeLock():
                if_it_fails.pop_all()
                self._client.add(rank, Lane(mine, self._client.writer, rank, blocks=False), pid)

    def _kill(self, ranks: Sequence[int], why: str) -> None:
        """Kill the processes of ranks, with all processes that they started."""
        for rank in ranks:
            self._client.is_killed(rank, why)
        self._zygote.end([self._client.processes[rank] for rank in ranks], 0.0)
        for rank in ranks:
            self._client.note_death(rank)

    def _how_it_died(self, rank: int) -> Failure:
        pid = self._client.processes[rank]
        ended, last = self._zygote.how_it_ended(pid), self._output.last_errors(rank)
        return Failure.of_death(ended, last, socket.gethostname(), pid, _device_of(self._launch))


def _device_of(launch: Launch) -> str:
    return "cuda:0" if launch.uses_gpu else "cpu"  # a worker sees only its own GPU


def _spawn_of(launch: Launch, rank: int, port: int) -> Spawn:
    slot, context = launch.slots[rank], launch.context(rank, _device_of(launch))
    environment = {**os.environ, **launch.env, **launch.variables, **context.environment()}
    environment.update(rendezvous_environment(LOOPBACK, port))
    if launch.uses_gpu:
        environment["CUDA_VISIBLE_DEVICES"] = visible_devices()[slot.reservation.gpus[slot.node][slot.index]]
    if "OMP_NUM_THREADS" not in environment:
        share = str(max(1, count_cores() // len(launch.slots)))
        environment.update({name: share for name in THREAD_VARIABLES if name not in environment})
    identity = WorkerIdentity(0, os.getpid(), rank, len(launch.slots), launch.group)
    return Spawn(
        identity, context, environment, working_directory(), tuple(sys.path), tuple(sys.argv), launch.log_level
    )
