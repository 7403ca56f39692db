"""Every rank is an object in this process, called in rank order: the specification, and where `pdb` works.

Values travel through the same codec as on every other backend, so they are isolated in the same way.
"""

from __future__ import annotations

import os
import pickle
import socket
import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from bandmaster.backends import CLOSED, Call, Launch, Reply
from bandmaster.backends.machine import MachineBackend
from bandmaster.construction import replacement
from bandmaster.errors import ConstructorError
from bandmaster.failure import Failure, FailureKind
from bandmaster.wire.codec import Payload, decode
from bandmaster.wire.host import WorkerHost
from bandmaster.wire.steady import check_not_held

__all__ = ["InProcessBackend"]


class InProcessBackend(MachineBackend):
    """All ranks in this process."""

    def start(self, launch: Launch) -> InProcessCrew:
        """Construct the workers in rank order."""
        crew = InProcessCrew(launch)
        try:
            for rank in range(len(launch.seats)):
                crew.construct(launch, rank)
        except BaseException:
            crew.stop()
            raise
        return crew

    def replace(self, crew: InProcessCrew, launch: Launch, rank: int) -> None:
        """Make one of the objects again."""
        with replacement(crew, rank):
            crew.construct(launch, rank)


class InProcessCrew:
    """A call runs as it is sent, so a ticket is done from the start: it holds the outcome.

    The calls of several threads run one after the other.
    """

    has_native_tickets = False
    processes: Mapping[int, int] = MappingProxyType({})
    is_stopped = False

    def __init__(self, launch: Launch) -> None:
        self.hosts = [WorkerHost() for _ in launch.seats]
        self.deaths: dict[int, Failure] = {}
        self._running = threading.RLock()  # held while a method or a constructor runs

    def construct(self, launch: Launch, rank: int) -> None:
        """Make the worker of a rank.

        Raises:
            ConstructorError: Its constructor raised.
        """
        seat = launch.seats[rank]
        device = f"cuda:{seat.reservation.gpus[seat.node][seat.index]}" if launch.uses_gpu else "cpu"
        failure = self.hosts[rank].construct(launch.context(rank, device), launch.constructor.private())
        if failure is not None:
            where = {rank: launch.mesh.coordinates(rank)}
            failures = {rank: _delivered(failure)}
            raise ConstructorError(f"{launch.cls.__name__}.__init__", failures, where, launch.group)
        self.deaths.pop(rank, None)

    @property
    def handles(self) -> list[Any]:
        """The worker objects themselves."""
        return [host.worker for host in self.hosts]

    def describe(self) -> list[dict[str, Any]]:
        """All in this process."""
        here = {"host": socket.gethostname(), "pid": os.getpid(), "lane": "in process"}
        return [{**here, "device": host.worker.device if host.worker else "-"} for host in self.hosts]

    def lend(self, ranks: Sequence[int], memory: Any) -> None:
        """CUDA does not lend memory to the process that has it."""

    def put(self, payloads: Sequence[Payload]) -> Sequence[Payload]:
        """Nothing to write: every rank copies what it reads."""
        return payloads

    def call(self, calls: Sequence[Call], tickets: dict[int, Any]) -> None:
        """Run the calls, one rank after the other."""
        by_rank = {rank: call for call in calls for rank in call.ranks}
        self._check_idle()
        try:
            with self._running:
                for rank in sorted(by_rank):
                    tickets[rank] = Ticket(self.deaths[rank]) if rank in self.deaths else self._run(rank, by_rank[rank])
        finally:
            self._let_go_of_the_dead()

    def _run(self, rank: int, call: Call) -> Ticket:
        parts = [part.private() for part in call.parts]
        outcome = self.hosts[rank].call(call.method, parts, call.reply is not Reply.NOTHING)
        return Ticket(outcome.private() if isinstance(outcome, Payload) else outcome)

    def wait(self, tickets: Sequence[Any], timeout_s: float | None) -> list[Any]:
        """All of them."""
        return list(tickets)

    def fetch(self, ticket: Ticket) -> Any | Failure:
        """The outcome, its exception having been through a pickle as everywhere."""
        if not isinstance(ticket.outcome, Payload):
            return ticket.outcome and _delivered(ticket.outcome)
        try:
            return decode(ticket.outcome)
        except BaseException as error:  # the user's objects may raise anything when they are unpickled
            was_interrupted, ticket.is_interrupted = ticket.is_interrupted, isinstance(error, KeyboardInterrupt)
            return Failure.unreadable(error, was_interrupted)

    def give_up(self, tickets: Mapping[int, Any]) -> None:
        """Nothing runs any more."""

    def stacks(self, tickets: Mapping[int, Any]) -> dict[int, str]:
        """Always empty: ranks run on the caller's own stack."""
        return {}

    def end(self, tickets: Mapping[int, Any], why: str) -> None:
        """Nobody can be ended alone."""

    def look_for_deaths(self) -> None:
        """Nobody can have died."""

    def kill(self, ranks: Sequence[int], why: str) -> None:
        """Let some of the workers go, once no method runs."""
        self._check_idle()
        for rank in ranks:
            self.deaths[rank] = Failure(FailureKind.DIED, why)
        self._let_go_of_the_dead()

    def _check_idle(self) -> None:
        """Refuse what a worker's method, or a signal handler, asks of the group while a method runs in this thread."""
        check_not_held(
            self._running,
            "a worker, or a signal handler, called the group in the middle of a call that runs in the same thread; "
            "call it between steps (a worker cannot call its own group on any backend)",
        )

    def _let_go_of_the_dead(self) -> None:
        """Let workers go that were ended; if a method runs, the thread that runs it does so afterwards."""
        if self.deaths and self._running.acquire(blocking=False):
            try:
                for rank in self.deaths:
                    self.hosts[rank].close()
            finally:
                self._running.release()

    def bury(self, rank: int) -> None:
        """Nothing to wait for."""

    def stop(self, why: str = CLOSED) -> None:
        """Let all of them go."""
        self._check_idle()
        self.is_stopped = True
        self.kill(range(len(self.hosts)), why)


class Ticket:
    """The outcome of one call on one rank."""

    def __init__(self, outcome: Payload | Failure | None) -> None:
        self.outcome = outcome
        self.is_interrupted = False  # whether unpickling it has raised KeyboardInterrupt


def _delivered(failure: Failure) -> Failure:
    """The failure as the controller of another process would get it."""
    revived: Failure = pickle.loads(pickle.dumps(failure))
    return revived
