"""The worker processes of some ranks of a group on one host, forked from a zygote and reached over lanes.

::

    HostWorkers(launch, zygote, place) ──► Zygote.spawn, once per rank ──► worker processes: worker_process.loop
         └── LaneClient ◄─ one lane each ──────────────────────────────────┘
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
from bandmaster.codec import Payload
from bandmaster.contract import CLOSED, Launch, ShowOutput, WorkerProcess, WorkerRecord
from bandmaster.errors import ClosedError, ResourceError
from bandmaster.errors.failure import Failure, FailureKind
from bandmaster.platform.hardware import count_cores, has_gpus
from bandmaster.platform.limits import working_directory
from bandmaster.platform.locks import SigintSafeLock
from bandmaster.platform.math_threads import THREAD_VARIABLES
from bandmaster.wire.lane import lane_pair
from bandmaster.wire.lanes import LaneClient
from bandmaster.wire.status_page import WorkerIdentity
from bandmaster.worker_process.rendezvous import listening_socket, rendezvous_environment

if TYPE_CHECKING:
    from bandmaster.output.streams import WorkerOutput

LOOPBACK = "127.0.0.1"
END_GRACE_S = 0.5  # time for workers to exit by themselves before they are killed


@dataclass(frozen=True)
class Place:
    """The share of one host in a group: the ranks that run there, with their address, GPUs and variables.

    Attributes:
        ranks: The ranks.
        address: Address of the host, on which rank 0 opens the rendezvous.
        gpus: For each rank, the entries of ``CUDA_VISIBLE_DEVICES`` for its GPUs; empty where it has none.
        variables: Environment variables besides those of the process that forks and those of the launch.
        modules: What a zygote imports where the launch does not say: see `bandmaster.backends.local`.
    """

    ranks: Sequence[int]
    address: str = LOOPBACK
    gpus: Mapping[int, Sequence[str]] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    modules: Sequence[str] = ()


class InheritedOutput:
    """Workers that write to the standard output and error of this process, where the room `output` was removed."""

    def add(self, rank: int) -> list[int]:
        """Return the descriptors that a worker writes to, the third for its log records; the caller closes them."""
        return [os.dup(1), os.dup(2)]

    def last_errors(self, rank: int) -> str:
        """Return the last lines that a worker that has ended wrote to standard error."""
        return ""

    def finish(self, timeout_s: float) -> None:
        """Wait until all output of workers that have ended is written."""


def _output_of(launch: Launch, shows: ShowOutput | None) -> InheritedOutput | WorkerOutput:
    try:
        from bandmaster.output.streams import WorkerOutput
    except ModuleNotFoundError:
        if launch.output is not None or launch.log_level is not None:
            raise
        return InheritedOutput()
    return WorkerOutput(launch, shows)


class HostWorkers:
    """The worker processes of a group on this host, each reached over a lane; see `bandmaster.contract.Workers`.

    Attributes:
        deaths: The ranks whose processes are known to have ended, and how.
        ranks_are_own: True.
    """

    ranks_are_own = True

    def __init__(self, launch: Launch, zygote: Zygote, place: Place, shows: ShowOutput | None = None) -> None:
        self._launch, self._zygote, self._place = launch, zygote, place
        self._output = _output_of(launch, shows)
        self.rendezvous: Mapping[str, str] = {}  # the variables by which workers find the rendezvous on rank 0
        self._is_ended, self._why_stopped = False, ""
        self._client = client = LaneClient(self._how_it_died)
        self.deaths: Mapping[int, Failure] = client.deaths
        self.put, self.wait, self.fetch, self.check = client.put, client.wait, client.fetch, client.check
        self.call, self.stacks, self.resume = client.call, client.stacks, client.resume
        try:
            zygote.hold(self)
            began = time.monotonic()
            for rank in place.ranks:
                self._start_process(rank, began)
        except BaseException:
            self._close(0.0)
            raise

    @property
    def arrivals(self) -> int | None:
        """A descriptor that is readable when a reply or a death may have arrived: both arrive over lanes."""
        return self._client.arrivals

    @property
    def records(self) -> list[WorkerRecord]:
        """Host, process and device of each rank here. Every worker has a lane; handles are `WorkerProcess` objects."""
        host, names = socket.gethostname(), self._launch.worker_names
        return [
            WorkerRecord(host, pid, self._device(rank), "lane", partial(WorkerProcess, names[rank], rank, host, pid))
            for rank, pid in sorted(self._client.processes.items())
        ]

    @property
    def is_stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._client.is_stopped

    def reserve(self, sizes: Sequence[int], is_kept: bool = False) -> Payload:
        """A payload whose bytes are still to be written, as `LaneClient.reserve` makes it."""
        return self._client.reserve(sizes, is_kept)

    def interrupt(self, tickets: Mapping[int, Any], kill_because: str | None = None) -> None:
        """Interrupt calls through the status page of each rank.

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
        """Fork a new process for a rank. A new rank 0 opens a new rendezvous, which the other ranks here are told."""
        if self.is_stopped:
            raise ClosedError(self._why_stopped)
        if rank in self._client.processes:
            self._kill([rank], "ended by the controller, because it is being replaced")
        self._start_process(rank, time.monotonic())
        if rank == 0:
            self.announce(self.rendezvous)

    def announce(self, rendezvous: Mapping[str, str]) -> None:
        """Have the ranks here find a rendezvous that a rank 0 has opened; rank 0 itself knows."""
        self.rendezvous = rendezvous
        for rank in self._client.processes:
            if rank != 0:
                self._client.change_environment(rank, rendezvous)

    def stop(self, why: str = CLOSED) -> None:
        """Close the lanes, so that the workers exit; kill those that do not exit in time."""
        if not self._is_ended:
            self._why_stopped = self._why_stopped or why
            self._client.close(why)
            self._close(END_GRACE_S)

    def _close(self, grace_s: float) -> None:
        self._client.close()
        processes = list(self._client.processes.values())
        try:
            self._zygote.end(processes, grace_s)
        except BaseException:  # Ctrl-C: kill the workers without waiting for them
            self._zygote.end(processes, 0.0)
            raise
        self._zygote.release(self)
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
                    descriptors = [theirs.fileno(), *self._output.add(rank)]
                    for fd in descriptors[1:]:
                        close_here.callback(os.close, fd)
                    if rank == 0:
                        listening = close_here.enter_context(listening_socket(self._place.address))
                        self.rendezvous = rendezvous_environment(self._place.address, listening.getsockname()[1])
                        descriptors.append(listening.fileno())
                pid = self._zygote.spawn(self._spawn_of(rank), descriptors, left_s)
            except NoAnswer as error:
                if limit_s is None or time.monotonic() < began + limit_s:
                    raise
                started = self._client.processes
                missing = [other for other in self._place.ranks if other == rank or other not in started]
                raise launch.late(missing, str(error)) from error
            except OSError as error:
                raise ResourceError(
                    f"cannot start rank {rank} of {len(launch.slots)}: {error}; each worker needs three file "
                    "descriptors in the controller: raise the limit on open files (ulimit -n), or ask for fewer workers"
                ) from error
            with SigintSafeLock():
                if_it_fails.pop_all()
                self._client.add(rank, mine, pid)

    def _spawn_of(self, rank: int) -> Spawn:
        launch, place = self._launch, self._place
        context = launch.context(rank, self._device(rank))
        environment = {**os.environ, **place.variables, **launch.env, **launch.variables}
        environment |= {**context.environment(), **self.rendezvous}
        if place.gpus.get(rank):
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(place.gpus[rank])
        if "OMP_NUM_THREADS" not in environment:
            share = str(max(1, count_cores() // len(place.ranks)))
            environment.update({name: share for name in THREAD_VARIABLES if name not in environment})
        identity = WorkerIdentity(0, os.getpid(), rank, len(launch.slots), launch.group)
        return Spawn(
            identity, context, environment, working_directory(), tuple(sys.path), tuple(sys.argv), launch.log_level
        )

    def _device(self, rank: int) -> str:
        """The device of a worker, which sees its own GPUs alone; "cpu" where Ray was told of GPUs that do not exist."""
        return "cuda:0" if self._place.gpus.get(rank) and has_gpus() else "cpu"

    def _kill(self, ranks: Sequence[int], why: str) -> None:
        """Kill the processes of ranks, with all processes that they started."""
        for rank in ranks:
            self._client.note_death(rank, replace(self._death(rank, why), kind=FailureKind.CANCELLED))
        self._zygote.end([self._client.processes[rank] for rank in ranks], 0.0)

    def _how_it_died(self, rank: int) -> Failure:
        ended = self._zygote.how_it_ended(self._client.processes[rank])
        return self._death(rank, ended, self._output.last_errors(rank))

    def _death(self, rank: int, why: str, last_errors: str = "") -> Failure:
        return Failure.of_death(
            why, last_errors, socket.gethostname(), self._client.processes[rank], self._device(rank)
        )
