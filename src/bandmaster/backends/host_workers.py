"""The worker processes of some ranks of a group on one host, forked from a zygote and reached over lanes.

::

    HostWorkers(launch, zygote, place) ──► Zygote.spawn, once per rank ──► worker processes: worker_process.loop
         └── a LaneClient ◄─ one lane each ────────────────────────────────┘
         └── WorkerOutput ◄─ their standard output and error

The controller has one of these for the ranks of its own host, and the agent of each other host one for those there.
The only port is that of the torch rendezvous. Rank 0 inherits its listening socket.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from bandmaster.backends.zygote import NoAnswer, Zygote
from bandmaster.backends.zygote_process import Spawn
from bandmaster.contract import CLOSED, Launch, ShowOutput, WorkerProcess, WorkerRecord
from bandmaster.errors import ClosedError, ResourceError
from bandmaster.errors.failure import REPLACED, Failure, FailureKind
from bandmaster.platform.hardware import count_cores, has_gpus
from bandmaster.platform.limits import working_directory
from bandmaster.platform.locks import SigintSafeLock
from bandmaster.platform.math_threads import THREAD_VARIABLES
from bandmaster.wire.lane import lane_pair
from bandmaster.wire.lanes import LaneClient
from bandmaster.wire.status_page import WorkerIdentity
from bandmaster.worker_process.rendezvous import rendezvous_environment, rendezvous_sockets

if TYPE_CHECKING:
    from bandmaster.output.streams import WorkerOutput

LOOPBACK = "127.0.0.1"
END_GRACE_S = 0.5  # time for workers to exit by themselves before they are killed


@dataclass(frozen=True)
class HostShare:
    """The share of one host in a group: the ranks that run there, with their address and GPUs.

    Attributes:
        ranks: The ranks.
        address: Address of the host, on which rank 0 opens the rendezvous.
        gpus: For each rank, the entries of ``CUDA_VISIBLE_DEVICES`` for its GPUs; empty where it has none.
        modules: What a zygote imports where the launch does not say: see `bandmaster.backends.local`.
    """

    ranks: Sequence[int]
    address: str = LOOPBACK
    gpus: Mapping[int, Sequence[str]] = field(default_factory=dict)
    modules: Sequence[str] = ()


def _output_of(launch: Launch, shows: ShowOutput | None) -> WorkerOutput | None:
    """Return the receiver of the output of workers; None without the room `output`: they write to our streams."""
    try:
        from bandmaster.output.streams import WorkerOutput
    except ModuleNotFoundError:
        if launch.output is not None or launch.log_level is not None:
            raise
        return None
    return WorkerOutput(launch, shows)


class HostWorkers(LaneClient):
    """The worker processes of a group on this host, each reached over a lane; see `bandmaster.contract.Workers`.

    Attributes:
        rendezvous: The environment variables by which workers find the rendezvous on rank 0.
    """

    def __init__(self, launch: Launch, zygote: Zygote, place: HostShare, shows: ShowOutput | None = None) -> None:
        self._launch, self._zygote, self._place = launch, zygote, place
        self._output = _output_of(launch, shows)
        self.rendezvous: Mapping[str, str] = {}
        self._is_ended = False
        super().__init__(self._how_it_died)
        try:
            zygote.hold(self)
            began = time.monotonic()
            for rank in place.ranks:
                self._start_process(rank, began)
        except BaseException:
            self._end(0.0)
            raise

    @property
    def records(self) -> list[WorkerRecord]:
        """Host, process and device of each rank here. Every worker has a lane; handles are `WorkerProcess` objects."""
        host, names = socket.gethostname(), self._launch.worker_names
        return [
            WorkerRecord(host, pid, self._device(rank), "lane", partial(WorkerProcess, names[rank], rank, host, pid))
            for rank, pid in sorted(self.processes.items())
        ]

    def interrupt(self, tickets: Mapping[int, Any], kill_because: str | None = None) -> None:
        """Interrupt calls through the status page of each rank.

        Args:
            tickets: The calls, by rank.
            kill_because: If it is given, the workers that are running these calls are killed instead, with all
                processes that they started.
        """
        if kill_because is None:
            super().interrupt(tickets)
        else:
            self._kill(tickets, kill_because)

    def replace(self, rank: int) -> None:
        """Fork a new process for a rank. A new rank 0 opens a new rendezvous, which the other ranks here are told."""
        if self.is_stopped:
            raise ClosedError(self._why_closed)
        if rank in self.processes:
            self._kill({rank: None}, REPLACED)
        self._start_process(rank, time.monotonic())
        if rank == 0:
            self.announce(self.rendezvous)

    def announce(self, rendezvous: Mapping[str, str]) -> None:
        """Have the ranks here find a rendezvous that a rank 0 has opened; rank 0 itself knows."""
        self.rendezvous = rendezvous
        for rank in self.processes:
            if rank != 0:
                self.change_environment(rank, rendezvous)

    def stop(self, why: str = CLOSED) -> None:
        """Close the lanes, so that the workers exit; kill those that do not exit in time."""
        if not self._is_ended:
            self.close(why)
            self._end(END_GRACE_S)

    def _end(self, grace_s: float) -> None:
        """Hang up on the workers, unless that was done, and have their processes end."""
        self.close()
        processes = list(self.processes.values())
        try:
            self._zygote.end(processes, grace_s)
        except BaseException:  # Ctrl-C: kill the workers without waiting for them
            self._zygote.end(processes, 0.0)
            raise
        self._zygote.release(self)
        if self._output is not None:
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
            ResourceError: The process that starts it has too few file descriptors left.
        """
        launch, limit_s = self._launch, self._launch.start_timeout_s
        left_s = None if limit_s is None else limit_s + began - time.monotonic()
        with contextlib.ExitStack() as if_it_fails, contextlib.ExitStack() as close_here:
            try:
                with SigintSafeLock():  # so that Ctrl-C cannot leak a descriptor
                    mine, theirs = lane_pair()
                    if_it_fails.enter_context(mine)
                    close_here.enter_context(theirs)
                    output = [os.dup(1), os.dup(2)] if self._output is None else self._output.add(rank)
                    descriptors = [theirs.fileno(), *output]
                    for fd in output:
                        close_here.callback(os.close, fd)
                    if rank == 0:
                        sockets = [close_here.enter_context(s) for s in rendezvous_sockets(self._place.address)]
                        self.rendezvous = rendezvous_environment(*sockets[0].getsockname())
                        descriptors += [sock.fileno() for sock in sockets]
                pid = self._zygote.spawn(self._spawn_of(rank), descriptors, left_s)
            except NoAnswer as error:
                if limit_s is None or time.monotonic() < began + limit_s:
                    raise
                started = self.processes
                missing = [other for other in self._place.ranks if other == rank or other not in started]
                raise launch.late(missing, str(error)) from error
            except OSError as error:
                raise ResourceError(
                    f"cannot start rank {rank} of {len(launch.slots)}: {error}; each worker needs three file "
                    f"descriptors in the process that starts it, {os.getpid()} on host {socket.gethostname()}: raise "
                    "its limit on open files (ulimit -n), or ask for fewer workers"
                ) from error
            with self.lock:  # so that Ctrl-C comes before or after
                if self.is_stopped:  # meanwhile, by another thread; the worker exits, as its lane is closed
                    raise ClosedError(self._why_closed)
                if_it_fails.pop_all()
                self.add(rank, mine, pid)

    def _spawn_of(self, rank: int) -> Spawn:
        launch, place = self._launch, self._place
        context = launch.context(rank, self._device(rank))
        environment = {**os.environ, **launch.env, **launch.variables}
        environment |= {**context.environment(), **self.rendezvous}
        if place.gpus.get(rank):
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(place.gpus[rank])
        if "OMP_NUM_THREADS" not in environment:
            share = str(max(1, count_cores() // len(place.ranks)))
            environment.update({name: share for name in THREAD_VARIABLES if name not in environment})
        identity = WorkerIdentity.here(rank, len(launch.slots), launch.group)
        return Spawn(
            identity, context, environment, working_directory(), tuple(sys.path), tuple(sys.argv), launch.log_level
        )

    def _device(self, rank: int) -> str:
        """The device of a worker, which sees its own GPUs alone; "cpu" where Ray was told of GPUs that do not exist."""
        return "cuda:0" if self._place.gpus.get(rank) and has_gpus() else "cpu"

    def _kill(self, tickets: Mapping[int, Any], why: str) -> None:
        """Kill the workers that are running these calls, which fail as cancelled; others tell of the death."""
        there = {rank: ticket for rank, ticket in tickets.items() if ticket is None or self.is_at(rank, ticket)}
        processes = []
        with self.lock:
            for rank, ticket in there.items():
                self.take_answered(rank)
                if ticket is not None and ticket.is_done:  # it has stopped by itself, or was replaced
                    continue
                processes.append(self.processes[rank])
                death = self._death(rank, why)
                if ticket is not None:
                    self.fail_one(rank, ticket, replace(death, kind=FailureKind.CANCELLED))
                self.note_death(rank, death)
        self._zygote.end(processes, 0.0)

    def _how_it_died(self, rank: int) -> Failure:
        ended = self._zygote.how_it_ended(self.processes[rank])
        return self._death(rank, ended, "" if self._output is None else self._output.last_errors(rank))

    def _death(self, rank: int, why: str, last_errors: str = "") -> Failure:
        return Failure.of_death(why, last_errors, socket.gethostname(), self.processes[rank], self._device(rank))
